"""Import Lightning from the package that the user has, and start its processes.

`lightning.pytorch` and `pytorch_lightning` are two installations of the same code with distinct
classes. A program that has imported only the latter gets strategies of the latter.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.runtime.rendezvous import group_store

__all__ = [
    "DoublePrecision", "HalfPrecision", "LightningModule", "MixedPrecision", "MockOptimizer",
    "MultiProcessingLauncher", "ParallelStrategy", "Precision", "Processes", "ScriptLauncher",
    "TrainerFn", "default_backend", "init_connection", "init_optimizers", "is_overridden",
    "is_param_in_hook_signature", "reduce_if_available", "seed_worker", "set_rank_zero",
]  # fmt: skip


def _packages() -> tuple[str, str]:
    """Return the root packages of PyTorch Lightning and of Fabric."""
    unified = importlib.util.find_spec("lightning") is not None
    separate = importlib.util.find_spec("pytorch_lightning") is not None
    if not unified and not separate:
        raise ModuleNotFoundError("Lightning is missing; try: pip install 'shardwise[lightning]'")
    imported = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    if separate and (imported or not unified):
        return "pytorch_lightning", "lightning_fabric"
    return "lightning.pytorch", "lightning.fabric"


PACKAGE, FABRIC = _packages()

if TYPE_CHECKING:
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device as default_backend,
    )
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_connection
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_if_available
    from lightning.fabric.utilities.seed import pl_worker_init_function as seed_worker
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import (
        _init_optimizers_and_lr_schedulers as init_optimizers,
    )
    from lightning.pytorch.core.optimizer import _MockOptimizer as MockOptimizer
    from lightning.pytorch.plugins.precision import (
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.strategies.launchers import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as ScriptLauncher
    from lightning.pytorch.strategies.parallel import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:

    def _find(path: str, root: str = PACKAGE) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"{root}.{module}" if module else root), name)

    LightningModule = _find("LightningModule")
    MockOptimizer = _find("core.optimizer._MockOptimizer")
    init_optimizers = _find("core.optimizer._init_optimizers_and_lr_schedulers")
    DoublePrecision = _find("plugins.precision.DoublePrecision")
    HalfPrecision = _find("plugins.precision.HalfPrecision")
    MixedPrecision = _find("plugins.precision.MixedPrecision")
    Precision = _find("plugins.precision.Precision")
    MultiProcessingLauncher = _find("strategies.launchers._MultiProcessingLauncher")
    ScriptLauncher = _find("strategies.launchers._SubprocessScriptLauncher")
    ParallelStrategy = _find("strategies.parallel.ParallelStrategy")
    TrainerFn = _find("trainer.states.TrainerFn")
    is_overridden = _find("utilities.model_helpers.is_overridden")
    is_param_in_hook_signature = _find("utilities.signature_utils.is_param_in_hook_signature")
    default_backend = _find(
        "utilities.distributed._get_default_process_group_backend_for_device", FABRIC
    )
    init_connection = _find("utilities.distributed._init_dist_connection", FABRIC)
    reduce_if_available = _find("utilities.distributed._sync_ddp_if_available", FABRIC)
    seed_worker = _find("utilities.seed.pl_worker_init_function", FABRIC)


def set_rank_zero(rank: int) -> None:
    """Tell Lightning's `rank_zero_only` functions which rank this is."""
    for name in (f"{PACKAGE}.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        importlib.import_module(name).rank_zero_only.rank = rank


# ------------------------------------------------------------ processes


class Processes(ParallelStrategy):
    """One process per device, as in Lightning's DDPStrategy.

    torchrun, a cluster's scheduler or Lightning itself starts them.
    """

    def __init__(
        self,
        *,
        start_method: Literal["popen", "spawn", "fork", "forkserver"],
        process_group_backend: str | None,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self.num_nodes = 1
        self._start_method, self._timeout = start_method, timeout
        self._process_group_backend = process_group_backend

    @property
    def is_distributed(self) -> bool:
        """Return False: Lightning must not split data or combine logs of ranks."""
        return False

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )
        else:
            self._launcher = MultiProcessingLauncher(self, start_method=self._start_method)

    def setup_environment(self) -> None:
        """Join the process group, if there are several processes."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.world_size == 1:
            return
        device = self.root_device
        self._process_group_backend = self._process_group_backend or default_backend(device)
        options: dict[str, Any] = {}
        if not dist.is_initialized():
            store = group_store(
                self.cluster_environment.main_address,
                self.cluster_environment.main_port,
                rank=self.global_rank,
                num_hosts=self.num_nodes,
                timeout=self._timeout,
            )
            options = {} if store is None else {"store": store}
        init_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type == "cuda" else None,
            **options,
        )

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        set_rank_zero(self.global_rank)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_available() and dist.is_initialized():
            device = [self.root_device.index] if dist.get_backend() == "nccl" else None
            dist.barrier(device_ids=device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's object on all ranks, for Lightning and its callbacks."""
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks."""
        if isinstance(tensor, Tensor):
            return reduce_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def broadcast_weights(self, module: nn.Module) -> None:
        """Copy the weights of rank 0 to all ranks, which may have initialized others."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_meta:
                continue
            value = tensor.detach().to(self.root_device).contiguous()
            dist.broadcast(value, 0)
            tensor.data.copy_(value)
