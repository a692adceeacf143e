"""Check rules by execution: every candidate on several ranks must equal the call on one.

    check_rule("aten.linear.default", (x, weight, bias))

For each candidate, the operands are sharded as it requires and the local call runs on every rank.
The results are assembled by their layouts and compared with the call on one device, in float64.
Then a random gradient is propagated backward: the gradient of a shard is a shard, that of a partial
sum is replicated, and that of R~ is a partial sum.
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
from shardwise.sharding.rule import Call, NodeRule, Part
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
    """Require that the dims of the rule have the sizes of the tensors."""
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
    """Return the axes as products of two factors if possible, to test sharding of inner factors."""
    structures = axis_structures(rule)
    for name, structure in structures.items():
        if len(structure) == 1 and len(structure[0]) == 1:
            size = structure[0][0]
            outer = next((p for p in range(2, size) if size % p == 0), None)
            if outer:
                structures[name] = ((outer, size // outer),)
    return structures


def all_candidates(rule: NodeRule) -> tuple[Candidate, ...]:
    """Return the candidates of plain and factored axes."""
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
    """Check every candidate on all numbers of ranks, and on two mesh axes with `pairs`.

    A `random` operator is compared with the runtime's draw on one rank.
    """
    dense = dense_call(op, args, kwargs, run, constant=constant)
    rule = rule or rule_for(dense.call)
    assert rule is not None, f"{op} has no rule"
    check_shapes(dense.call, rule)
    chosen = all_candidates(rule)
    if random:
        results, gradients = execute(dense, rule, Arrangement({"x": 1}, {"x": chosen[0]}))
        dense = dataclasses.replace(dense, results=results[0,], gradients=gradients[0,])
    for candidate in chosen:
        for num in ranks:
            check_arrangement(dense, rule, Arrangement({"x": num}, {"x": candidate}), tolerance)
    if pairs:
        for first, second in itertools.product(chosen, repeat=2):
            arrangement = Arrangement({"x": 2, "y": 3}, {"x": first, "y": second})
            if is_legal(rule, arrangement):
                check_arrangement(dense, rule, arrangement, tolerance)
    return chosen


def is_legal(rule: NodeRule, arrangement: Arrangement) -> bool:
    """Return whether the candidates of two axes are compatible."""
    first, second = (c.choice for c in arrangement.chosen.values())
    if isinstance(first, ShardAxis) and isinstance(second, ShardAxis):
        axis, other = rule.axes[first.axis], rule.axes[second.axis]
        if axis.name in other.joins or other.name in axis.joins:
            return False
        if axis == other and (axis.once or not compatible(first.pattern, second.pattern)):
            return False
    for kind, tensors in (("operands", rule.operands), ("results", rule.results)):
        for index in range(len(tensors)):
            shards = [s for _, s in arrangement.layout(kind, index).shards]
            share_dim = len(shards) == 2 and shards[0].dim == shards[1].dim
            if share_dim and not compatible(shards[0].of, shards[1].of):
                return False
    return True


def check_arrangement(
    dense: Dense, rule: NodeRule, arrangement: Arrangement, tolerance: float = 1e-9
) -> None:
    """Check one choice for each mesh axis, forward and backward."""
    what = f"{dense.call.node.op}{dense.call.operands} with {arrangement}"
    floats = [t for t in (*dense.operands, *dense.results) if is_float(t)]
    if any(torch.finfo(t.dtype).bits < 64 for t in floats):
        tolerance = max(tolerance, 1e-5)
    try:
        locals_, gradients = execute(dense, rule, arrangement)
    except Exception as error:
        error.add_note(f"in {what}")
        raise
    for i, expected in enumerate(dense.results):
        parts = {place: results[i] for place, results in locals_.items()}
        layout = arrangement.layout("results", i)
        for place, part in parts.items():
            shape = local_shape(layout, tuple(expected.shape), coordinate_of(arrangement, place))
            assert tuple(part.shape) == shape, f"result {i} has {part.shape}: {what}"
        if dense.compare == "values":
            _assert_equal(
                combine(parts, layout, arrangement, expected),
                expected,
                tolerance,
                f"result {i} of {what}",
            )
    for i, (expected, operand) in enumerate(zip(dense.gradients, dense.operands, strict=True)):
        grads = {place: local[i] for place, local in gradients.items()}
        if expected is None and all(g is None for g in grads.values()):
            continue
        without = [place for place, g in grads.items() if g is None]
        assert len(without) in (0, len(grads)), (
            f"ranks {without} have no gradient of operand {i} of {what}: "
            "they would miss its collective"
        )
        unreached = [place for place, g in grads.items() if g is None and expected is not None]
        assert not unreached, f"no gradient of operand {i} on ranks {unreached} of {what}"
        expected = torch.zeros_like(operand) if expected is None else expected
        layout = _dual(arrangement.layout("operands", i))
        parts = {
            place: _filled(g, operand, layout, arrangement, place) for place, g in grads.items()
        }
        actual = combine(parts, layout, arrangement, expected)
        _assert_equal(actual, expected, tolerance, f"gradient of operand {i} of {what}")


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
    """Return the layout of a gradient: S for S, R for P and R, P for R~."""

    def dual(placement: Placement) -> Placement:
        if isinstance(placement, Replicate):
            return Partial() if placement.partial_grad else placement
        return Replicate() if isinstance(placement, Partial) else placement

    return Layout(tuple((a, dual(p)) for a, p in layout.axes))


def _assert_equal(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    try:
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def combine(
    parts: Mapping[Coords, Tensor], layout: Layout, arrangement: Arrangement, expected: Tensor
) -> Tensor:
    """Return the full value of the local parts of all ranks."""
    remaining = dict(parts)
    for i, (axis, placement) in enumerate(layout.axes):
        if isinstance(placement, Shard):
            continue
        merged: dict[Coords, list[Tensor]] = {}
        for place, part in remaining.items():
            merged.setdefault((*place[:i], 0, *place[i + 1 :]), []).append(part)
        remaining = {place: _merge(placement, tensors, axis) for place, tensors in merged.items()}
    return assemble(remaining, expected.shape, splits_of(layout), arrangement.sizes)


def _merge(placement: Placement, tensors: list[Tensor], axis: str) -> Tensor:
    if isinstance(placement, Partial):
        stacked = torch.stack(tensors)
        if placement.op == "sum":
            return stacked.sum(0).to(tensors[0].dtype)
        return stacked.amax(0) if placement.op == "max" else stacked.amin(0)
    for other in tensors[1:]:
        _assert_equal(other, tensors[0], 1e-9, f"ranks of {axis} have different values")
    return tensors[0]
