"""Local calls measured by another process: `python -m shardwise.cost.calls`.

Enters: a JSON object on stdin, with calls as `encode` writes them and sizes of parameters. Leaves:
a JSON object on stdout: the `OpTable` of what it measured, with notes on what it could not.

Only what JSON can say travels: numbers, texts, shapes, dtypes, operands. A call with anything else,
such as a function of the model's own, is left out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import torch

from shardwise.cluster import Curve, Device
from shardwise.cost.signature import Signature, call_signature
from shardwise.cost.table import UPDATE, OpTable
from shardwise.cost.timing import measure, settle
from shardwise.dtypes import dtype_name
from shardwise.ir import Ref, TensorType

_TORCH = (torch.dtype, torch.layout, torch.memory_format)
UPDATES = tuple(4**n for n in range(5, 13))  # elements of parameters, 1,024 to 16 million
UPDATE_REPEATS = 5


def encode(call: Signature) -> dict[str, Any] | None:
    """A call as JSON, or None if it has parts that cannot travel."""
    if call.function is not None:
        return None
    try:
        return {
            "op": call.op,
            "args": _given(call.args),
            "kwargs": _given(call.kwargs),
            "types": [_type(t) for t in call.types],
            "grads": sorted(call.grads),
            "parameters": sorted(call.parameters),
            "results": [_type(t) for t in call.results],
            "strides": [None if s is None else list(s) for s in call.strides],
            "autocast": _given(call.autocast),
            "device": call.device,
        }
    except TypeError:
        return None


def decode(data: dict[str, Any]) -> Signature:
    """The call that `encode` wrote."""
    return call_signature(
        data["op"],
        _taken(data["args"]),
        _taken(data["kwargs"]),
        [_tensor_type(t) for t in data["types"]],
        frozenset(data["grads"]),
        frozenset(data["parameters"]),
        results=[_tensor_type(t) for t in data["results"]],
        strides=[None if s is None else tuple(s) for s in data["strides"]],
        autocast=_taken(data["autocast"]),
        device=data["device"],
    )


def _given(arg: Any) -> Any:
    if arg is None or isinstance(arg, bool | int | float | str):
        return arg
    if isinstance(arg, tuple | list):
        return {"items": [_given(item) for item in arg]}
    if isinstance(arg, Ref):
        return {"operand": arg.name}
    if isinstance(arg, _TORCH):
        return {"torch": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    raise TypeError(f"{type(arg).__name__} does not travel")


def _taken(arg: Any) -> Any:
    if not isinstance(arg, dict):
        return arg
    if "items" in arg:
        return tuple(_taken(item) for item in arg["items"])
    if "operand" in arg:
        return Ref(arg["operand"])
    return torch.device(arg["device"]) if "device" in arg else getattr(torch, arg["torch"])


def _type(kind: TensorType) -> list[Any]:
    return [list(kind.shape), dtype_name(kind.dtype)]


def _tensor_type(data: list[Any]) -> TensorType:
    return TensorType(tuple(data[0]), getattr(torch, data[1]))


def measure_updates(sizes: Iterable[int], device: Device) -> OpTable:
    """Seconds that AdamW takes for one float32 parameter of so many elements."""
    table = OpTable()
    for numel in sizes:
        parameter = torch.zeros(numel, device=device.kind, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], lr=1e-4)
        samples = []
        for _ in range(1 + UPDATE_REPEATS):
            settle(device.kind)
            started = time.perf_counter()
            optimizer.step()
            samples.append(time.perf_counter() - started)
        table.add(UPDATE.format(numel), device.name, median(samples[1:]), 0.0)
    return table


def measure_job(job: Mapping[str, Any]) -> OpTable:
    """What a job asks for, on one thread of this process."""
    torch.set_num_threads(1)
    device = Device(  # rates play no part in measuring
        name=job["name"],
        kind=job["kind"],
        memory_bytes=job["memory_bytes"],
        matmul_flops_per_s=(("float32", Curve.constant(1.0)),),
        memory_bytes_per_s=Curve.constant(1.0),
    )
    calls = [decode(data) for data in job["calls"]]
    table = measure(calls, device, budget_s=job["budget_s"])
    table.merge(measure_updates(job["updates"], device))
    return table


def main() -> None:
    """Measure what stdin asks for."""
    table = measure_job(json.loads(sys.stdin.readline()))
    sys.stdout.write(json.dumps({"result": table.to_json()}) + "\n")


if __name__ == "__main__":
    main()
