"""`time_compute`: run a plan's programs on this machine without communication.

A program takes longer than the sum of its calls: operands have left the caches, ranks wait for the
slowest one, and Python runs between the calls. All ranks of a node therefore run at the same time,
each in its own process, and start every step together. The time spent on faking the messages of
other ranks is subtracted.
"""

import gc
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from shardwise.api.compile import compile
from shardwise.api.memory import SingleRank
from shardwise.cluster import Cluster
from shardwise.errors import RankError
from shardwise.ir import Graph, TensorType
from shardwise.plans import Plan
from shardwise.processes import fork_ranks
from shardwise.runtime.memory import grow_segments
from shardwise.runtime.optimizer import optimizer
from shardwise.runtime.transport.fake import UninitializedTransport

WARM_UPS, STEPS = 2, 6
Samples = tuple[list[float], list[float]]  # seconds of training and of the optimizer
WEIGHT = 0.02  # standard deviation of parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeTimes:
    """Seconds of a step without communication, by group of ranks: those of its slowest rank."""

    training_s: Mapping[int, float]
    update_s: Mapping[int, float]


def time_compute(graph: Graph, plan: Plan, cluster: Cluster) -> ComputeTimes:
    """Run steps of the plan's programs on this machine, each rank by itself.

    A CPU runs all ranks of the cluster's first node at the same time, a GPU the first rank.
    """
    program = compile(graph, plan)
    kind = cluster.device(0).kind

    def steps(rank: int, barrier: Callable[[], object]) -> Samples:
        device = torch.device(kind)
        return _steps(SingleRank(program, rank, device, transport=UninitializedTransport), barrier)

    if kind == "cpu":
        samples = fork_ranks(steps, len(cluster.nodes[0].devices))
    else:
        samples = [_here(steps, torch.device(kind))]
    # Devices of one kind may differ in speed; this machine is taken as speed 1.
    speeds = [cluster.device(rank).speed for rank in range(len(samples))]
    training, update = (
        [[s / speed for s in sample[i]] for sample, speed in zip(samples, speeds, strict=True)]
        for i in (0, 1)
    )
    return ComputeTimes(training_s=_by_group(training, plan), update_s=_by_group(update, plan))


def _here(steps: Callable[[int, Callable[[], object]], Samples], device: torch.device) -> Samples:
    """Run rank 0 in this process, and free everything that it allocated."""
    grow_segments(device)
    failure = ""
    try:
        return steps(0, lambda: None)
    except Exception as error:  # a model's own operators may fail in any way
        failure = f"{type(error).__name__}: {error}"
    finally:
        gc.collect()  # modules and hooks refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    raise RankError(f"rank 0 cannot run here: {failure}")


def _by_group(samples: Sequence[Sequence[float]], plan: Plan) -> dict[int, float]:
    """Return the median over steps of the slowest rank's seconds, for groups with a rank here."""
    local = {
        group: [samples[rank] for rank in ranks if rank < len(samples)]
        for group, ranks in enumerate(plan.groups)
    }
    return {
        group: median(map(max, zip(*members, strict=True)))
        for group, members in local.items()
        if members
    }


def _steps(single_rank: SingleRank, barrier: Callable[[], object]) -> Samples:
    """Return the seconds of training and of the optimizer, step by step."""
    fill(single_rank)
    batch = batch_of(single_rank)
    adamw = optimizer(single_rank.module, torch.optim.AdamW, lr=0.0)
    training, update = [], []
    for _ in range(WARM_UPS + STEPS):
        barrier()
        began = _now(single_rank)
        single_rank.module.train_step(batch)
        trained = _now(single_rank)
        adamw.step()
        adamw.zero_grad()
        training.append(trained - began)
        update.append(_now(single_rank) - trained)
    return training[WARM_UPS:], update[WARM_UPS:]


def fill(single_rank: SingleRank) -> None:
    """Fill parameters with values of a usual magnitude: uninitialized memory may hold denormals.

    Values that several ranks store are the same on all of them.
    """
    store = single_rank.store
    tensors = [(str(index), group.shard) for index, group in enumerate(store.groups)]
    tensors += [(e.spec.name, t) for e in store.entries for t in (e.leaf, e.piece)]
    tensors += store.buffers.items()
    generator = torch.Generator(single_rank.device)
    with torch.no_grad():
        for name, tensor in tensors:
            if not tensor.untyped_storage().size():  # gathered when it is used
                continue
            if tensor.is_floating_point():
                generator.manual_seed(zlib.crc32(name.encode()))
                tensor.normal_(0.0, WEIGHT, generator=generator)
            else:
                tensor.zero_()


def batch_of(single_rank: SingleRank) -> dict[str, Tensor]:
    """Return a random batch, the same on all ranks; integers are 0, an index valid in any table."""
    device = single_rank.device
    generator = torch.Generator(device).manual_seed(0)

    def tensor(kind: TensorType) -> Tensor:
        if kind.dtype.is_floating_point:
            return torch.randn(kind.shape, device=device, generator=generator).to(kind.dtype)
        return torch.zeros(kind.shape, dtype=kind.dtype, device=device)

    return {name: tensor(kind) for name, kind in single_rank.batch_types().items()}


def _now(single_rank: SingleRank) -> float:
    """Wait for all issued work and return the time, without the time spent on fake messages."""
    if single_rank.device.type == "cuda":
        torch.cuda.synchronize(single_rank.device)
    assert isinstance(single_rank.transport, UninitializedTransport)
    return time.perf_counter() - single_rank.transport.seconds
