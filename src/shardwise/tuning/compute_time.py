"""A plan's own programs run on this machine without communication: `rehearse`.

The sum of the times of calls is not the time of a program: what a node reads has left the caches,
ranks wait for the slowest, Python runs between the calls. As many ranks as one node has
run at the same time, each a process with what the plan gives it, and start every step together.
What a rank takes to pretend that others have answered does not count.
"""

from __future__ import annotations

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
from shardwise.runtime import UninitializedTransport
from shardwise.runtime.offload import grow_segments
from shardwise.runtime.optimizer import optimizer

WARM_UPS, STEPS = 2, 6
Samples = tuple[list[float], list[float]]  # seconds of training and of the optimizer
WEIGHT = 0.02  # standard deviation of parameters: numbers of a usual size, none too small


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Seconds of a step without communication, by group of ranks: those of its slowest rank."""

    training_s: Mapping[int, float]
    update_s: Mapping[int, float]


def rehearse(graph: Graph, plan: Plan, cluster: Cluster) -> Rehearsal:
    """Run steps of the plan's programs on this machine, each rank by itself.

    A CPU runs all ranks of the cluster's first node at the same time, a GPU the first rank.
    """
    program = compile(graph, plan)
    kind = cluster.device(0).kind

    def steps(rank: int, meet: Callable[[], object]) -> Samples:
        return _steps(
            SingleRank(program, rank, torch.device(kind), transport=UninitializedTransport), meet
        )

    if kind == "cpu":
        found = fork_ranks(steps, len(cluster.nodes[0].devices))
    else:
        found = [_here(steps, torch.device(kind))]
    training, update = ([_at_speed(s[i], cluster, r) for r, s in enumerate(found)] for i in (0, 1))
    return Rehearsal(training_s=_by_group(training, plan), update_s=_by_group(update, plan))


def _here(steps: Callable[[int, Callable[[], object]], Samples], device: torch.device) -> Samples:
    """What rank 0 found in this process, to which nothing of it is left."""
    grow_segments(device)
    failed = ""
    try:
        return steps(0, lambda: None)
    except Exception as error:  # a model's own operators may fail in any way
        failed = f"{type(error).__name__}: {error}"
    finally:
        gc.collect()  # modules and hooks hold each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
    raise RankError(f"rank 0 cannot run here: {failed}")


def _at_speed(seconds: Sequence[float], cluster: Cluster, rank: int) -> list[float]:
    """What a rank takes that is as fast as the cluster says."""
    return [s / cluster.device(rank).speed for s in seconds]


def _by_group(samples: Sequence[Sequence[float]], plan: Plan) -> dict[int, float]:
    """The median over steps of the slowest rank's seconds, for groups of which some rank ran."""
    found = {}
    for group, ranks in enumerate(plan.groups):
        mine = [samples[rank] for rank in ranks if rank < len(samples)]
        if mine:
            found[group] = median(map(max, zip(*mine, strict=True)))
    return found


def _steps(alone: SingleRank, meet: Callable[[], object]) -> Samples:
    """Seconds of training and of the optimizer, step by step."""
    fill(alone)
    batch = batch_of(alone)
    adamw = optimizer(alone.module, torch.optim.AdamW, lr=0.0)
    training, update = [], []
    for _ in range(WARM_UPS + STEPS):
        meet()
        began = _now(alone)
        alone.module.train_step(batch)
        trained = _now(alone)
        adamw.step()
        adamw.zero_grad()
        training.append(trained - began)
        update.append(_now(alone) - trained)
    return training[WARM_UPS:], update[WARM_UPS:]


def fill(alone: SingleRank) -> None:
    """Parameters of usual sizes: memory as it comes may hold numbers that take longer.

    What ranks hold in common gets the same numbers on each of them.
    """
    store = alone.store
    held = [(str(at), group.shard) for at, group in enumerate(store.groups)]
    held += [(e.spec.name, t) for e in store.entries for t in (e.leaf, e.piece)]
    held += store.buffers.items()
    numbers = torch.Generator(alone.device)
    with torch.no_grad():
        for name, tensor in held:
            if not tensor.untyped_storage().size():  # gathered when it is used
                continue
            if tensor.is_floating_point():
                numbers.manual_seed(zlib.crc32(name.encode()))
                tensor.normal_(0.0, WEIGHT, generator=numbers)
            else:
                tensor.zero_()


def batch_of(alone: SingleRank) -> dict[str, Tensor]:
    """Random numbers, the same on all ranks; zeros for integers: an index that every table has."""
    numbers = torch.Generator(alone.device).manual_seed(0)

    def made(kind: TensorType) -> Tensor:
        if kind.dtype.is_floating_point:
            made = torch.randn(kind.shape, device=alone.device, generator=numbers)
            return made.to(kind.dtype)
        return torch.zeros(kind.shape, dtype=kind.dtype, device=alone.device)

    return {name: made(kind) for name, kind in alone.batch_types().items()}


def _now(alone: SingleRank) -> float:
    """When all work so far was done, on a clock that stands while a rank pretends."""
    if alone.device.type == "cuda":
        torch.cuda.synchronize(alone.device)
    assert isinstance(alone.transport, UninitializedTransport)
    return time.perf_counter() - alone.transport.seconds
