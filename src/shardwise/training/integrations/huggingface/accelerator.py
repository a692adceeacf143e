"""The accelerator of a trainer whose ranks all do the same.

Enters: the `Accelerator` that `transformers.Trainer` made. Leaves: the same object, which prepares
data loaders as for one process, makes optimizers sharded, and clips the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from shardwise.runtime import ParallelModule, clip_grad_norm_
from shardwise.runtime.optimizer import ShardedOptimizer
from shardwise.training.integrations.huggingface.arguments import rank

Shard = Callable[[torch.optim.Optimizer], ShardedOptimizer]


class OneProcess(Accelerator):  # type: ignore[misc]
    """All ranks as one process; `parallel` is the module they train, once there is one."""

    parallel: ParallelModule | None
    shard: Shard
    skipped_steps: int

    @classmethod
    def take_over(cls, accelerator: Accelerator, shard: Shard) -> None:
        """Turn an accelerator into one of this class."""
        accelerator.__class__ = cls
        accelerator.parallel, accelerator.shard = None, shard
        accelerator.skipped_steps = 0
        accelerator.scaler = None  # the plan's precision scales losses

    @property
    def num_processes(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    @property
    def use_distributed(self) -> bool:
        return False

    @property
    def distributed_type(self) -> DistributedType:
        return DistributedType.NO

    @property
    def dispatch_batches(self) -> bool:
        return False

    @property
    def is_main_process(self) -> bool:
        return rank() == 0

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Loaders as for one process, optimizers sharded, the rest as it is."""
        made = tuple(map(self._prepared, objects))
        return made[0] if len(made) == 1 else made

    def _prepared(self, value: Any) -> Any:
        if isinstance(value, DataLoader):
            return self.prepare_data_loader(value)
        if isinstance(value, torch.optim.Optimizer):
            return value if isinstance(value, ShardedOptimizer) else self.shard(value)
        return value

    def gather(self, tensor: Any) -> Any:
        """Every rank has the whole already."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As on one process: only what the last batch repeats is cut off."""
        return super().gather_for_metrics(input_data)

    def pad_across_processes(self, tensor: Any, **options: Any) -> Any:
        """All ranks have the same shape."""
        return tensor

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """The norm of the whole model's gradient, over all ranks."""
        assert self.parallel is not None
        return clip_grad_norm_(self.parallel, max_norm, norm_type)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step overflowed, which a schedule of learning rates passes over."""
        optimizer = getattr(self, "optimizer", None)
        now = optimizer.skipped_steps if isinstance(optimizer, ShardedOptimizer) else 0
        before, self.skipped_steps = self.skipped_steps, now
        return now > before
