"""Times local calls on this machine, forward and backward.

Enters: `Signature`s and the device they run on. Leaves: an `OpTable`. A call that does not fit
in memory, or does not run on random numbers, is left out with a note.

A program finds a CPU in another state than a loop over one call does: what a node reads has left
the nearest cache. `settle` brings this state about before every run. Memory is kept (`keep_pages`),
as ranks keep theirs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.cluster import Device
from shardwise.cost.autocast import cast
from shardwise.cost.kernels import tensors
from shardwise.cost.signature import Signature
from shardwise.cost.table import OpTable
from shardwise.cost.trial import cost_of, function_of
from shardwise.ir import TensorType, map_refs
from shardwise.pages import keep_pages

BUDGET_S = 0.02  # for forward, and as much for backward
MOST_REPEATS, FEWEST_REPEATS, WARM_UPS = 20, 3, 2
CACHE_BYTES = 1 << 24  # several times a core's own cache: 1 to 4 MiB on servers of 2017 to 2025


def measure(
    calls: Iterable[Signature],
    device: Device,
    *,
    budget_s: float = BUDGET_S,
    memory_bytes: int | None = None,
) -> OpTable:
    """Medians of repeated runs of every call, kept under the name of `device`."""
    if device.kind == "cpu":
        keep_pages()
    table = OpTable()
    limit = device.usable_bytes if memory_bytes is None else memory_bytes
    for call in dict.fromkeys(calls):
        needed = _needed_bytes(call)
        if needed > limit:
            table.notes.append(f"{call}: needs {needed:,} bytes of {limit:,}")
            continue
        reason = ""
        for indices in (True, False):  # some operators take no index but 0
            try:
                found = _timed(call, device.kind, budget_s, indices)
            except Exception as error:  # an operator may refuse random operands in any way
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]}"
                continue
            table.add(str(call), device.name, *found)
            break
        else:
            table.notes.append(f"{call}: {reason}")
    return table


def _needed_bytes(call: Signature) -> int:
    cost = cost_of(call)
    operands = sum(call.types[i].num_bytes for i in set(call.firsts))
    results = sum(t.num_bytes for t in cost.results)
    own = sum(s.num_bytes for s in cost.saved if s.operand is None and s.result is None)
    return 2 * (operands + results) + own + cost.temporary_bytes


def _timed(call: Signature, kind: str, budget_s: float, indices: bool) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    function = cast(call.op, call.function or function_of(call, kind), call.autocast)
    made: dict[int, Tensor] = {}
    for first in call.firsts:
        if first not in made:
            made[first] = _operand(call, first, kind, indices)
    supply = iter([made[first] for first in call.firsts])
    args, kwargs = map_refs((call.args, call.kwargs), lambda _: next(supply))
    options = dict(kwargs)

    def forward() -> Any:
        return function(*args, **options)

    with torch.set_grad_enabled(bool(call.grads)):
        results = [t for t in tensors(forward()) if t.requires_grad]
        forward_s = _median(forward, kind, budget_s)
        leaves = [t for t in made.values() if t.requires_grad]
        if not results or not leaves:
            return forward_s, 0.0
        seeds = [torch.ones_like(t) for t in results]

        def backward() -> Any:
            return torch.autograd.grad(results, leaves, seeds, retain_graph=True, allow_unused=True)

        return forward_s, _median(backward, kind, budget_s)


def _operand(call: Signature, position: int, kind: str, indices: bool) -> Tensor:
    type_, stride = call.types[position], call.strides[position]
    values = _random(type_, call, kind, indices)
    if stride is not None:
        values = torch.empty_strided(type_.shape, stride, dtype=type_.dtype, device=kind).copy_(
            values
        )
    wanted = any(call.firsts[i] == position for i in call.grads)
    return values.requires_grad_(wanted and values.is_floating_point())


def _random(type_: TensorType, call: Signature, kind: str, indices: bool) -> Tensor:
    if type_.dtype == torch.bool:
        return torch.rand(type_.shape, device=kind) < 0.5
    if type_.dtype.is_floating_point or type_.dtype.is_complex:
        drawn = torch.randn(type_.shape, device=kind)
        return drawn.to(type_.dtype)
    sizes = [n for t in call.types if t.dtype.is_floating_point for n in t.shape]
    high = max(min(sizes, default=2), 1) if indices else 1
    return torch.randint(0, high, type_.shape, dtype=type_.dtype, device=kind)


@cache
def _scratch() -> Tensor:
    return torch.zeros(CACHE_BYTES // 4)


def settle(kind: str) -> None:
    """Leave a CPU's caches as a program would."""
    if kind == "cpu":
        _scratch().add_(1.0)


def _median(run: Callable[[], Any], kind: str, budget_s: float) -> float:
    """The median of runs, as many as the budget holds."""

    def once() -> float:
        settle(kind)
        _wait(kind)
        began = time.perf_counter()
        run()
        _wait(kind)
        return time.perf_counter() - began

    spent = sum(once() for _ in range(WARM_UPS)) / WARM_UPS
    repeats = round(budget_s / max(spent, 1e-9))
    repeats = min(max(repeats, FEWEST_REPEATS), MOST_REPEATS)
    return statistics.median(once() for _ in range(repeats))


def _wait(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()
