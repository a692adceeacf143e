"""Make the trainer's arguments and accelerator behave as on one device with the global batch.

Every rank reads all batches in full; the plan divides the work. The trainer's own data parallelism,
seeds by rank and gathering are therefore switched off, and only rank 0 writes and prints.
"""

import copy
import copyreg
import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from shardwise.errors import PlanError
from shardwise.plans import Plan
from shardwise.runtime import ParallelModule, clip_grad_norm_
from shardwise.runtime.devices import process_rank
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


class OneDevice(TrainingArguments):  # type: ignore[misc]
    """A mixin for the class of the arguments: all ranks together are one device."""

    world_size = 1
    process_index = local_process_index = 0
    parallel_mode = ParallelMode.NOT_PARALLEL
    place_model_on_device = False  # only the shards go to the devices

    @property
    def n_gpu(self) -> int:
        num_gpus: int = super().n_gpu
        return min(1, num_gpus)

    @property
    def should_save(self) -> bool:
        return process_rank() == 0

    should_log = should_save

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as an object of the user's class."""
        args = (type(self).__mro__[2], object, None)
        return copyreg._reconstructor, args, dict(self.__dict__)  # type: ignore[attr-defined]


def one_device(args: TrainingArguments) -> TrainingArguments:
    """Return a copy of the arguments that describes one device."""
    for name, alternative in _OWN_PARALLELISM.items():
        if getattr(args, name, None):
            raise PlanError(
                f"TrainingArguments({name}={getattr(args, name)!r}) cannot be combined with a plan",
                hint=f"ShardwiseTrainer(…) with {alternative}",
            )
    _ = args.device  # starts the process group if torchrun started this process
    kind = type(args)
    view = copy.copy(args)
    view.__class__ = type(kind.__name__, (OneDevice, kind), {})
    return view


def replicas_of(plan: Plan) -> int:
    """Return the number of groups of ranks with different samples, as `accelerate` does."""
    return max(
        math.prod(stage.mesh.axis_size(a) for a in stage.mesh.names if plan.roles[a] == "batch")
        for stage in plan.all_stages
    )


# ------------------------------------------------------------ the accelerator
Shard = Callable[[torch.optim.Optimizer], ShardedOptimizer]


class OneProcess(Accelerator):  # type: ignore[misc]
    """An accelerator for which all ranks are one process; `parallel` is the trained module."""

    num_processes, process_index = 1, 0
    use_distributed = dispatch_batches = False
    distributed_type = DistributedType.NO
    parallel: ParallelModule | None
    shard: Shard
    skipped_steps: int

    @classmethod
    def take_over(cls, accelerator: Accelerator, shard: Shard) -> None:
        """Change the class of an accelerator to this one."""
        accelerator.__class__ = cls
        accelerator.parallel, accelerator.shard = None, shard
        accelerator.skipped_steps = 0
        accelerator.scaler = None  # the plan's precision scales losses

    @property
    def is_main_process(self) -> bool:
        return process_rank() == 0

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare loaders as for one process, shard optimizers, and return others unchanged."""
        prepared = tuple(map(self._prepared, objects))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepared(self, value: Any) -> Any:
        if isinstance(value, DataLoader):
            return self.prepare_data_loader(value)
        if isinstance(value, torch.optim.Optimizer):
            return value if isinstance(value, ShardedOptimizer) else self.shard(value)
        return value

    def gather(self, tensor: Any) -> Any:
        """Return the tensor, which every rank has in full."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as in one process, which only removes padding of the last batch."""
        return super().gather_for_metrics(input_data)

    def pad_across_processes(self, tensor: Any, **options: Any) -> Any:
        """Return the tensor, whose shape is the same on all ranks."""
        return tensor

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip by the norm of the full model's gradient, over all ranks."""
        assert self.parallel is not None
        return clip_grad_norm_(self.parallel, max_norm, norm_type)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether the last step overflowed, so that learning-rate schedules skip it."""
        optimizer = getattr(self, "optimizer", None)
        now = optimizer.skipped_steps if isinstance(optimizer, ShardedOptimizer) else 0
        before, self.skipped_steps = self.skipped_steps, now
        return now > before
