"""Measure the time of local calls on this machine, forward and backward.

A call that does not fit in memory, or does not run on random operands, is skipped with a note.

In a program, the operands of a node have left the nearest cache, unlike in a loop over one call:
`evict_cache` empties it before every run. The process keeps freed memory (`keep_heap`), as ranks
do.

`python -m shardwise.cost.timing` measures in another process: it reads a job as JSON from stdin and
writes the `OpTable` as JSON to stdout. Calls that JSON cannot express, such as functions that the
model defines, are skipped.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from statistics import median
from typing import Any, TypedDict

import torch
from torch import Tensor

from shardwise.cluster import Curve, Device
from shardwise.cost.meta_run import cost_of, function_of
from shardwise.cost.signature import Signature, call_signature, under_autocast
from shardwise.cost.table import UPDATE, OpTable
from shardwise.ir import TensorType, map_refs
from shardwise.ir.operators import tensors
from shardwise.ir.stored import NotStorable, decode, encode
from shardwise.malloc_tuning import keep_heap

BUDGET_S = 0.02  # for forward, and again for backward
MAX_REPEATS, MIN_REPEATS, WARM_UPS = 20, 3, 2
CACHE_BYTES = 1 << 24  # several times a core's L2 cache: 1 to 4 MiB on servers of 2017 to 2025


def measure(
    calls: Iterable[Signature],
    device: Device,
    *,
    budget_s: float = BUDGET_S,
    memory_bytes: int | None = None,
) -> OpTable:
    """Return the medians of repeated runs of every call, under the name of `device`."""
    if device.kind == "cpu":
        keep_heap()
    table = OpTable()
    limit = device.usable_bytes if memory_bytes is None else memory_bytes
    for call in dict.fromkeys(calls):
        needed = _needed_bytes(call)
        if needed > limit:
            table.notes.append(f"{call}: needs {needed:,} bytes of {limit:,}")
            continue
        reason = ""
        for indices in (True, False):  # some operators accept no index but 0
            try:
                seconds = _timed(call, device.kind, budget_s, indices)
            except Exception as error:  # operators reject random operands by errors of many types
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]}"
                continue
            table.add(str(call), device.name, *seconds)
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
    """Return the seconds of forward and of backward."""
    function = under_autocast(call.op, call.function or function_of(call, kind), call.autocast)
    distinct = {first: _operand(call, first, kind, indices) for first in dict.fromkeys(call.firsts)}
    supply = iter([distinct[first] for first in call.firsts])
    args, kwargs = map_refs((call.args, call.kwargs), lambda _: next(supply))
    options = dict(kwargs)

    def forward() -> Any:
        return function(*args, **options)

    with torch.set_grad_enabled(bool(call.grads)):
        results = [t for t in tensors(forward()) if t.requires_grad]
        forward_s = _median(forward, kind, budget_s)
        leaves = [t for t in distinct.values() if t.requires_grad]
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
        laid_out = torch.empty_strided(type_.shape, stride, dtype=type_.dtype, device=kind)
        values = laid_out.copy_(values)
    needs_grad = any(call.firsts[i] == position for i in call.grads)
    return values.requires_grad_(needs_grad and values.is_floating_point())


def _random(type_: TensorType, call: Signature, kind: str, indices: bool) -> Tensor:
    if type_.dtype == torch.bool:
        return torch.rand(type_.shape, device=kind) < 0.5
    if type_.dtype.is_floating_point or type_.dtype.is_complex:
        return torch.randn(type_.shape, device=kind).to(type_.dtype)
    sizes = [n for t in call.types if t.dtype.is_floating_point for n in t.shape]
    high = max(min(sizes, default=2), 1) if indices else 1
    return torch.randint(0, high, type_.shape, dtype=type_.dtype, device=kind)


@cache
def _scratch() -> Tensor:
    return torch.zeros(CACHE_BYTES // 4)


def evict_cache(kind: str) -> None:
    """Evict operands from the cache of a CPU, as other nodes of a program would."""
    if kind == "cpu":
        _scratch().add_(1.0)


def _median(run: Callable[[], Any], kind: str, budget_s: float) -> float:
    """Return the median time of repeated runs within the budget."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if kind == "cuda" else lambda: None

    def once() -> float:
        evict_cache(kind)
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - start

    mean_s = sum(once() for _ in range(WARM_UPS)) / WARM_UPS
    repeats = min(max(round(budget_s / max(mean_s, 1e-9)), MIN_REPEATS), MAX_REPEATS)
    return median(once() for _ in range(repeats))


# ------------------------------------------------------------ in another process
UPDATES = tuple(4**n for n in range(5, 13))  # elements of parameters, 1,024 to 16 million
UPDATE_REPEATS = 5


ENCODED = ("args", "kwargs", "types", "results", "strides", "autocast", "device")


def encode_call(call: Signature) -> dict[str, Any] | None:
    """Return a call as JSON, or None if some of it cannot be written as JSON."""
    if call.function is not None:
        return None
    positions = {"grads": sorted(call.grads), "parameters": sorted(call.parameters)}
    try:
        return {"op": call.op, **positions, **{n: encode(getattr(call, n)) for n in ENCODED}}
    except NotStorable:
        return None


def decode_call(data: dict[str, Any]) -> Signature:
    """Return the call that `encode_call` wrote."""
    fields = {name: decode(data[name]) for name in ENCODED}
    grads, parameters = frozenset(data["grads"]), frozenset(data["parameters"])
    return call_signature(data["op"], grads=grads, parameters=parameters, **fields)


def measure_updates(sizes: Iterable[int], device: Device) -> OpTable:
    """Return the seconds that AdamW takes for one float32 parameter, for each of these sizes."""
    table = OpTable()
    for numel in sizes:
        parameter = torch.zeros(numel, device=device.kind, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-4)
        samples = []
        for _ in range(1 + UPDATE_REPEATS):
            evict_cache(device.kind)
            start = time.perf_counter()
            optimizer.step()
            samples.append(time.perf_counter() - start)
        table.add(UPDATE.format(numel), device.name, median(samples[1:]), 0.0)
    return table


class TimingJob(TypedDict):
    """The measurements of one process, as JSON: encoded calls and sizes of updates."""

    name: str
    kind: str
    memory_bytes: int
    calls: list[Any]
    updates: list[int]
    budget_s: float


def measure_job(job: TimingJob) -> OpTable:
    """Measure the calls and updates of a job on one thread of this process."""
    torch.set_num_threads(1)
    device = Device(  # its rates are not used
        name=job["name"],
        kind=job["kind"],
        memory_bytes=job["memory_bytes"],
        matmul_flops_per_s=(("float32", Curve.constant(1.0)),),
        memory_bytes_per_s=Curve.constant(1.0),
    )
    calls = [decode_call(data) for data in job["calls"]]
    table = measure(calls, device, budget_s=job["budget_s"])
    table.merge(measure_updates(job["updates"], device))
    return table


def main() -> None:
    """Measure the job on stdin."""
    table = measure_job(json.loads(sys.stdin.readline()))
    sys.stdout.write(json.dumps({"result": table.to_json()}) + "\n")


if __name__ == "__main__":
    main()
