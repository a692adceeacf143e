"""The training arguments as one device with the whole batch would have them.

Enters: the user's `TrainingArguments`. Leaves: a copy, of which `transformers.Trainer` reads that
there is one process. Every rank reads all batches whole; the plan says which part of the work is
whose. So nothing of the trainer's own data parallelism, seeds by rank or gathering takes place, and
only what is written and printed is left to rank 0.
"""

from __future__ import annotations

import copy
import copyreg
import math
from typing import Any

import torch.distributed as dist
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from shardwise.errors import PlanError
from shardwise.plans import Plan

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
        math.prod(int(n) for axis, n in stage.mesh.axes if plan.roles[axis] == "batch")
        for stage in plan.all_stages
    )
