"""The processes of a training, started by torchrun, a cluster's scheduler or Lightning itself.

Enters: Lightning's cluster environment and devices. Leaves: a process group of all ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.runtime.rendezvous import group_store
from shardwise.training.integrations.lightning.library import (
    MultiProcessingLauncher,
    ParallelStrategy,
    ScriptLauncher,
    default_backend,
    init_connection,
    reduce_if_available,
    set_rank_zero,
)

__all__ = ["Processes"]


class Processes(ParallelStrategy):
    """One process for each device, as Lightning's DDPStrategy has them."""

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
        """Lightning need not split data or join logged values: every rank has the whole batch."""
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
        """One rank's object on all, as Lightning and its callbacks ask for it."""
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The tensor reduced over all ranks."""
        if isinstance(tensor, Tensor):
            return reduce_if_available(tensor, group, reduce_op=reduce_op)
        return tensor

    def same_weights(self, module: nn.Module) -> None:
        """Rank 0's weights everywhere, should the ranks have begun with others."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_meta:
                continue
            near = tensor.detach().to(self.root_device).contiguous()
            dist.broadcast(near, 0)
            tensor.data.copy_(near)
