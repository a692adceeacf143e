"""The training arguments as one device with the whole batch would have them.

Every rank reads all batches whole; the plan says which part of the work is
whose. So nothing of the trainer's own data parallelism, seeds by rank or gathering takes place, and
only what is written and printed is left to rank 0.
"""

from __future__ import annotations

import copy
import copyreg
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from shardwise.errors import PlanError
from shardwise.plans import Plan
from shardwise.runtime import ParallelModule, clip_grad_norm_
from shardwise.runtime.optimizer import ShardedOptimizer

_OWN_PARALLELISM = {
    "fsdp": 'plan="fsdp"',
    "deepspeed": 'plan="zero2" or plan="fsdp"',
    "parallelism_config": 'plan={"name": "hybrid", "args": {"dp": 2, "tp": 4}}',
    "auto_find_batch_size": "a smaller per_device_train_batch_size, or plan='auto'",
    "fp16_full_eval": "fp16=True",
    "bf16_full_eval": "bf16=True",
    "use_liger_kernel": "a model of torch operators",
}


def rank() -> int:
    """This process's rank."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


class OneDevice(TrainingArguments):  # type: ignore[misc]
    """Mixed into the class of the arguments: all ranks together are one device."""

    @property
    def world_size(self) -> int:
        return 1

    @property
    def process_index(self) -> int:
        return 0

    @property
    def local_process_index(self) -> int:
        return 0

    @property
    def n_gpu(self) -> int:
        found: int = super().n_gpu
        return min(1, found)

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.NOT_PARALLEL

    @property
    def place_model_on_device(self) -> bool:
        return False  # the user's model stays where it is; its parts go to the devices

    @property
    def should_save(self) -> bool:
        return rank() == 0

    @property
    def should_log(self) -> bool:
        return rank() == 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy, or a saved file, has the class that the user knows."""
        made = (type(self).__mro__[2], object, None)
        return copyreg._reconstructor, made, dict(self.__dict__)  # type: ignore[attr-defined]


def one_device(args: TrainingArguments) -> TrainingArguments:
    """A copy of the arguments that describes one device."""
    for name, instead in _OWN_PARALLELISM.items():
        if getattr(args, name, None):
            raise PlanError(
                f"TrainingArguments({name}={getattr(args, name)!r}) and a plan exclude each other",
                hint=f"ShardwiseTrainer(…) with {instead}",
            )
    _ = args.device  # starts the process group, where torchrun started this process
    kind = type(args)
    view = copy.copy(args)
    view.__class__ = type(kind.__name__, (OneDevice, kind), {})
    return view


def scale_batches(args: TrainingArguments, replicas: int) -> None:
    """Make the batch sizes those of all replicas together."""
    args.per_device_train_batch_size *= replicas
    args.per_device_eval_batch_size *= replicas


def replicas_of(plan: Plan) -> int:
    """Return how many groups of ranks have samples of their own, as `accelerate` counts them."""
    return max(
        math.prod(stage.mesh.axis_size(a) for a in stage.mesh.names if plan.roles[a] == "batch")
        for stage in plan.all_stages
    )


# The accelerator of a trainer whose ranks all do the same.


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
