"""Call the runtime's operators for the cost model, on a mesh whose collectives are only counted.

A `Signature` names the mesh axes of a call but not their sizes, so that ranks of different meshes
share one entry. Operators that depend on a size (factories, random numbers) get one that makes
this rank's part as large as the call's result says it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shardwise import runtime as rt
from shardwise.cost.kernels import CollectiveCall
from shardwise.cost.signature import Signature
from shardwise.ir import TensorType
from shardwise.runtime.mesh import Axis
from shardwise.runtime.rng import Rng, Splits
from shardwise.runtime.splits import Of, whole_length
from shardwise.runtime.transport import Group, Pending, Transport
from shardwise.runtime.transport.fake import FakeTransport
from shardwise.sharding.rule import MeshAxis
from shardwise.shares import Shares


def runtime_function(
    signature: Signature, device: str, collectives: list[CollectiveCall]
) -> Callable[..., Any]:
    """Return a function of local tensors that runs the `rt.*` operator of `signature`.

    Tensors that come from no operand are made on `device`. Every collective that the operator
    calls, in forward or backward, is appended to `collectives`.
    """
    name = signature.op.removeprefix("rt.")
    function = getattr(rt, name, None)
    if function is None:
        raise LookupError(f"the runtime has no operator {name!r}")
    parameters = _parameters(function)
    local = next(iter((*signature.results, *signature.types)), None)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind_partial(*args, **kwargs)
        given = bound.arguments
        if name == "grouped_mm":
            _divide_rows_evenly(given)
        for parameter, value in given.items():
            if isinstance(value, MeshAxis):
                of = given.get(parameter.replace("axis", "of"))
                length = local.shape[-2 if parameter == "row_axis" else -1] if of and local else 0
                given[parameter] = _axis(value.names, of, length, collectives)
        if "rng" in parameters.parameters:
            given |= {"rng": _Rng(_drawn_shape(name, given, local)), "key": ""}
        if "device" in parameters.parameters:
            given["device"] = device
        return function(*bound.args, **bound.kwargs)

    return call


@cache
def _parameters(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


class _CountingTransport:
    """Count the collectives over some mesh axes; results have the right size, but no values."""

    rank, world_size = 0, 2

    def __init__(self, axes: tuple[str, ...], collectives: list[CollectiveCall]) -> None:
        self._axes, self._collectives = axes, collectives

    def __getattr__(self, operation: str) -> Callable[..., Pending]:
        run = getattr(FakeTransport(self.rank, self.world_size), operation)

        def count(flat: Tensor, *args: Any) -> Pending:
            size = flat.numel() * flat.element_size()
            self._collectives.append(CollectiveCall(op=operation, num_bytes=size, axes=self._axes))
            return cast(Pending, run(flat, *args))

        return count


def _axis(
    names: tuple[str, ...], of: Of | None, length: int, collectives: list[CollectiveCall]
) -> Axis:
    """Return an axis of two ranks, the first of which holds `length` of a dim split as `of`."""
    transport = cast(Transport, _CountingTransport(names, collectives))
    whole = whole_length(of) if of else 0
    shares = Shares(length, whole - length) if 0 < whole >= length else 2
    return Axis(".".join(names), Group((0, 1), 0), transport, shares)


class _Rng(Rng):
    """Draw the whole tensor and take a part of `shape`, as the runtime does in mode "exact"."""

    def __init__(self, shape: Sequence[int] | None) -> None:
        super().__init__(0)
        self._shape = shape

    def generator(
        self, key: str, device: torch.device | str = "cpu", place: Sequence[tuple[str, int]] = ()
    ) -> torch.Generator:
        kind = torch.device(device).type
        return torch.Generator("cpu" if kind == "meta" else kind)

    def part(
        self,
        fill: Callable[[tuple[int, ...], torch.Generator], Tensor],
        key: str,
        shape: Sequence[int],
        splits: Splits,
        device: torch.device | str,
    ) -> Tensor:
        part = fill(tuple(shape), self.generator(key, device))
        for dim, length in enumerate(shape if self._shape is None else self._shape):
            if length != part.shape[dim]:
                part = part.narrow(dim, 0, length)
        return part.contiguous()


def _drawn_shape(
    name: str, given: dict[str, Any], local: TensorType | None
) -> tuple[int, ...] | None:
    """Return the shape of this rank's random numbers, if it is known."""
    if name == "attention":  # numbers are drawn for its weights
        return (*given["query"].shape[:-1], given["key_"].shape[-2])
    return local.shape[: len(given.get("shape", ()))] if local else None


def _divide_rows_evenly(given: dict[str, Any]) -> None:
    """Give every expert as many rows: how many it really gets, only the data tells."""
    rows = given["x"].shape[0] // max(given["offs"].shape[0], 1)
    given["offs"] = np.arange(1, given["weight"].shape[0] + 1) * rows
    for parameter in ("row_axis", "rows", "expert_axis", "experts"):
        given.pop(parameter, None)
