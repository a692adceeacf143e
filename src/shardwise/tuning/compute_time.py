"""`time_compute`: run a plan's programs on this machine without communication.

The sum of the times of single calls is not the time of a program: operands have left the caches,
ranks wait for the slowest, Python runs between the calls. As many ranks as a node has run at the
same time, each in its own process, and start every step together. The time that a rank spends to
fake the answers of others does not count.
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

    def steps(rank: int, meet: Callable[[], object]) -> Samples:
        return _steps(
            SingleRank(program, rank, torch.device(kind), transport=UninitializedTransport), meet
        )

    if kind == "cpu":
        found = fork_ranks(steps, len(cluster.nodes[0].devices))
    else:
        found = [_here(steps, torch.device(kind))]
    training, update = ([_at_speed(s[i], cluster, r) for r, s in enumerate(found)] for i in (0, 1))
    return ComputeTimes(training_s=_by_group(training, plan), update_s=_by_group(update, plan))


def _here(steps: Callable[[int, Callable[[], object]], Samples], device: torch.device) -> Samples:
    """Run rank 0 in this process, and free everything that it allocated."""
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
    """Scale seconds measured here to the speed of a rank's device."""
    return [s / cluster.device(rank).speed for s in seconds]


def _by_group(samples: Sequence[Sequence[float]], plan: Plan) -> dict[int, float]:
    """Return the median over steps of the slowest rank's seconds, for groups with a rank here."""
    found = {}
    for group, ranks in enumerate(plan.groups):
        mine = [samples[rank] for rank in ranks if rank < len(samples)]
        if mine:
            found[group] = median(map(max, zip(*mine, strict=True)))
    return found


def _steps(alone: SingleRank, meet: Callable[[], object]) -> Samples:
    """Return the seconds of training and of the optimizer, step by step."""
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
    """Fill parameters with values of usual magnitude: uninitialized memory may hold denormals.

    Values that several ranks store are the same on each of them.
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
    """Return a random batch, the same on all ranks; integers are 0, an index valid in any table."""
    numbers = torch.Generator(alone.device).manual_seed(0)

    def made(kind: TensorType) -> Tensor:
        if kind.dtype.is_floating_point:
            made = torch.randn(kind.shape, device=alone.device, generator=numbers)
            return made.to(kind.dtype)
        return torch.zeros(kind.shape, dtype=kind.dtype, device=alone.device)

    return {name: made(kind) for name, kind in alone.batch_types().items()}


def _now(alone: SingleRank) -> float:
    """Wait for the work so far and return the time, without what fake answers took."""
    if alone.device.type == "cuda":
        torch.cuda.synchronize(alone.device)
    assert isinstance(alone.transport, UninitializedTransport)
    return time.perf_counter() - alone.transport.seconds
