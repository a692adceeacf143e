"""Executes rules: every candidate of a call on several ranks must equal the call on one.

    check_rule("aten.linear.default", (x, weight, bias))

For each candidate the operands are cut as it needs them, the local call runs on every rank, the
results are put together as it promises and compared with the whole call, in float64. Then a
random gradient goes back: the gradient of a shard is a shard, that of a partial sum is the same
on all ranks, that of a value used for different work (R~) is a partial sum.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.splits import assemble
from shardwise.sharding import rules as _registers_the_table  # noqa: F401
from shardwise.sharding.candidates import Candidate, ShardAxis, axis_structures, candidates
from shardwise.sharding.dims import Structure
from shardwise.sharding.placements import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    compatible,
    local_shape,
)
from shardwise.sharding.registry import rule_for
from shardwise.sharding.rule import (
    Call,
    NodeRule,
    Part,
)
from tests.support.local_calls import (
    Arrangement,
    Coords,
    Dense,
    Runner,
    coordinate_of,
    dense_call,
    execute,
    is_float,
    splits_of,
)


def check_shapes(call: Call, rule: NodeRule) -> None:
    """The rule's dims have the sizes of the tensors."""
    assert len(rule.operands) == len(call.operands), (rule.operands, call.operands)
    assert len(rule.results) == len(call.results), (rule.results, call.results)
    pairs = (
        *zip(rule.operands, call.operands, strict=True),
        *zip(rule.results, call.results, strict=True),
    )
    for dims, shape in pairs:
        assert len(dims) == len(shape), f"{dims} for shape {shape}"
        for dim, size in zip(dims, shape, strict=True):
            if isinstance(dim, Part):
                assert 0 <= dim.start < dim.stop <= rule.axes[dim.axis].size
                assert dim.stop - dim.start == size, f"{dim} of size {size}"
            else:
                assert math.prod(rule.axes[a].size for a in dim) == size, f"{dim} of size {size}"


def factored(rule: NodeRule) -> dict[str, Structure]:
    """The axes as products of two factors, where their size allows: inner factors get cut, too."""
    structures = axis_structures(rule)
    for name, structure in structures.items():
        if len(structure) == 1 and len(structure[0]) == 1:
            size = structure[0][0]
            outer = next((p for p in range(2, size) if size % p == 0), None)
            if outer:
                structures[name] = ((outer, size // outer),)
    return structures


def all_candidates(rule: NodeRule) -> tuple[Candidate, ...]:
    """Of the plain axes and of the factored ones."""
    return tuple(dict.fromkeys((*candidates(rule), *candidates(rule, factored(rule)))))


def check_rule(
    op: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: Sequence[int] = (2, 3),
    pairs: bool = False,
    tolerance: float = 1e-9,
    run: Runner | None = None,
    rule: NodeRule | None = None,
    constant: Sequence[int] = (),
    random: bool = False,
) -> tuple[Candidate, ...]:
    """Check every candidate on every number of ranks; `pairs`: on two mesh axes as well.

    A `random` operator is compared with the runtime's own draw on one rank.
    """
    dense = dense_call(op, args, kwargs, run, constant=constant)
    found = rule or rule_for(dense.call)
    assert found is not None, f"{op} has no rule"
    check_shapes(dense.call, found)
    chosen = all_candidates(found)
    if random:
        results, gradients = execute(dense, found, Arrangement({"x": 1}, {"x": chosen[0]}))
        dense = dataclasses.replace(dense, results=results[0,], gradients=gradients[0,])
    for candidate in chosen:
        for num in ranks:
            check_arrangement(dense, found, Arrangement({"x": num}, {"x": candidate}), tolerance)
    if pairs:
        for first, second in itertools.product(chosen, repeat=2):
            arrangement = Arrangement({"x": 2, "y": 3}, {"x": first, "y": second})
            if is_legal(found, arrangement):
                check_arrangement(dense, found, arrangement, tolerance)
    return chosen


def is_legal(rule: NodeRule, arrangement: Arrangement) -> bool:
    """Whether two axes' candidates go together."""
    first, second = (c.choice for c in arrangement.chosen.values())
    if isinstance(first, ShardAxis) and isinstance(second, ShardAxis) and first.axis == second.axis:
        axis = rule.axes[first.axis]
        if axis.once or not compatible(first.pattern, second.pattern):
            return False
    for kind, tensors in (("operands", rule.operands), ("results", rule.results)):
        for index in range(len(tensors)):
            shards = [s for _, s in arrangement.layout(kind, index).shards]
            together = len(shards) == 2 and shards[0].dim == shards[1].dim
            if together and not compatible(shards[0].of, shards[1].of):
                return False
    return True


def check_arrangement(
    dense: Dense, rule: NodeRule, arrangement: Arrangement, tolerance: float = 1e-9
) -> None:
    """One choice for each mesh axis: forward and backward."""
    what = f"{dense.call.node.op}{dense.call.operands} with {arrangement}"
    floats = [t for t in (*dense.operands, *dense.results) if is_float(t)]
    if any(torch.finfo(t.dtype).bits < 64 for t in floats):
        tolerance = max(tolerance, 1e-5)
    try:
        locals_, gradients = execute(dense, rule, arrangement)
    except Exception as error:
        error.add_note(f"in {what}")
        raise
    for i, whole in enumerate(dense.results):
        parts = {place: results[i] for place, results in locals_.items()}
        layout = arrangement.layout("results", i)
        for place, part in parts.items():
            expected = local_shape(layout, tuple(whole.shape), coordinate_of(arrangement, place))
            assert tuple(part.shape) == expected, f"result {i} has {part.shape}: {what}"
        if dense.compare == "values":
            _assert_equal(
                combine(parts, layout, arrangement, whole),
                whole,
                tolerance,
                f"result {i} of {what}",
            )
    for i, (whole, operand) in enumerate(zip(dense.gradients, dense.operands, strict=True)):
        grads = {place: found[i] for place, found in gradients.items()}
        if whole is None and all(g is None for g in grads.values()):
            continue
        without = [place for place, g in grads.items() if g is None]
        assert len(without) in (0, len(grads)), (
            f"ranks {without} have no gradient of operand {i} of {what}: "
            "they would not come to its collective"
        )
        unreached = [place for place, g in grads.items() if g is None and whole is not None]
        assert not unreached, f"no gradient of operand {i} on ranks {unreached} of {what}"
        whole = torch.zeros_like(operand) if whole is None else whole
        layout = _dual(arrangement.layout("operands", i))
        parts = {
            place: _filled(g, operand, layout, arrangement, place) for place, g in grads.items()
        }
        found = combine(parts, layout, arrangement, whole)
        _assert_equal(found, whole, tolerance, f"gradient of operand {i} of {what}")


def _filled(
    gradient: Tensor | None,
    operand: Tensor,
    layout: Layout,
    arrangement: Arrangement,
    place: Coords,
) -> Tensor:
    if gradient is not None:
        return gradient
    shape = local_shape(layout, tuple(operand.shape), coordinate_of(arrangement, place))
    return operand.new_zeros(shape)


def _dual(layout: Layout) -> Layout:
    """Of an operand's gradient: g(S)=S, g(P)=g(R)=R, g(R~)=P."""

    def dual(placement: Placement) -> Placement:
        if isinstance(placement, Replicate):
            return Partial() if placement.partial_grad else placement
        return Replicate() if isinstance(placement, Partial) else placement

    return Layout(tuple((a, dual(p)) for a, p in layout.axes))


def _assert_equal(found: Tensor, whole: Tensor, tolerance: float, what: str) -> None:
    try:
        torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def combine(
    parts: Mapping[Coords, Tensor], layout: Layout, arrangement: Arrangement, whole: Tensor
) -> Tensor:
    """The whole value of all ranks' parts."""
    remaining = dict(parts)
    for i, (axis, placement) in enumerate(layout.axes):
        if isinstance(placement, Shard):
            continue
        merged: dict[Coords, list[Tensor]] = {}
        for place, part in remaining.items():
            merged.setdefault((*place[:i], 0, *place[i + 1 :]), []).append(part)
        remaining = {place: _merge(placement, tensors, axis) for place, tensors in merged.items()}
    return assemble(remaining, whole.shape, splits_of(layout), arrangement.sizes)


def _merge(placement: Placement, tensors: list[Tensor], axis: str) -> Tensor:
    if isinstance(placement, Partial):
        stacked = torch.stack(tensors)
        if placement.op == "sum":
            return stacked.sum(0).to(tensors[0].dtype)
        return stacked.amax(0) if placement.op == "max" else stacked.amin(0)
    for other in tensors[1:]:
        _assert_equal(other, tensors[0], 1e-9, f"ranks of {axis} hold different values")
    return tensors[0]
