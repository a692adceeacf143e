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

import torch.distributed as dist
from torch import nn

from shardwise.runtime.rendezvous import group_store


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
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_connection
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
    from lightning.pytorch.strategies.parallel import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    DDPStrategy: Any  # for its methods, of another strategy
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
    DDPStrategy = _find("strategies.ddp.DDPStrategy")
    ParallelStrategy = _find("strategies.parallel.ParallelStrategy")
    TrainerFn = _find("trainer.states.TrainerFn")
    is_overridden = _find("utilities.model_helpers.is_overridden")
    is_param_in_hook_signature = _find("utilities.signature_utils.is_param_in_hook_signature")
    init_connection = _find("utilities.distributed._init_dist_connection", FABRIC)
    seed_worker = _find("utilities.seed.pl_worker_init_function", FABRIC)


# ------------------------------------------------------------ processes


class Processes(ParallelStrategy):
    """One process per device, with the methods of Lightning's DDPStrategy.

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

    # Not inherited: Lightning splits the data of subclasses of DDPStrategy.
    root_device = DDPStrategy.root_device
    num_processes = DDPStrategy.num_processes
    set_world_ranks = DDPStrategy.set_world_ranks
    barrier = DDPStrategy.barrier
    broadcast = DDPStrategy.broadcast
    reduce = DDPStrategy.reduce
    determine_ddp_device_ids = DDPStrategy.determine_ddp_device_ids
    _configure_launcher = DDPStrategy._configure_launcher
    _get_process_group_backend = DDPStrategy._get_process_group_backend

    @property
    def is_distributed(self) -> bool:
        """Return False: Lightning must not split data or combine logs of ranks."""
        return False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def setup_environment(self) -> None:
        """Join the process group, if there are several processes."""
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if self.world_size == 1:
            return
        device = self.root_device
        self._process_group_backend = self._get_process_group_backend()
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
