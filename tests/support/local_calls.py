"""Execute a rule's candidates as ranks would: in threads, on shards, forward and backward.

`check(op, args, kwargs, mesh)` compares every candidate (on a mesh of one axis), or pairs of them
(on two axes), with the operator on whole tensors, in float64.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.ir import Node, Ref, TensorType, map_refs
from shardwise.ir.schema import operator
from shardwise.runtime import operators
from shardwise.runtime.mesh import ProcessMesh, coordinates
from shardwise.runtime.splits import Split, take_local
from shardwise.runtime.threads import run_threads
from shardwise.sharding import rules  # noqa: F401 (registers them)
from shardwise.sharding.candidates import Candidate, Cut, candidates
from shardwise.sharding.placements import (
    REPLICATE,
    Layout,
    Partial,
    Replicate,
    Shard,
    local_shape,
)
from shardwise.sharding.registry import rule_for
from shardwise.sharding.rule import Call, Local, LocalCall, MeshAxis, NodeRule

TOLERANCE = 1e-9
EXTRA: dict[str, Callable[..., Any]] = {
    "shardwise.batch_norm.default": operators.batch_norm,
}


class Case:
    """One call on whole tensors: its results and the gradients of its operands."""

    def __init__(self, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.op = op
        refs = map_tensors((args, tuple(kwargs.items())), self._name)
        run = EXTRA.get(op) or operator(op)
        self.leaves = {n: _leaf(t) for n, t in self.tensors.items()}
        plain = map_refs(refs, lambda ref: self.leaves[ref.name])
        self.results = _tuple(run(*plain[0], **dict(plain[1])))
        self.incoming = [_like(r) for r in self.results]
        _backward(self.results, self.incoming)
        names = tuple(f"out{i}" for i in range(len(self.results)))
        types = {n: TensorType(tuple(t.shape), t.dtype) for n, t in self.tensors.items()}
        pairs = zip(names, self.results, strict=True)
        types |= {n: TensorType(tuple(t.shape), t.dtype) for n, t in pairs}
        node = Node(name="node", op=op, args=refs[0], kwargs=refs[1], outputs=names)
        self.call = Call.of(node, types)
        found = rule_for(self.call)
        assert found is not None, f"{op} has no rule"
        self.rule: NodeRule = found

    def _name(self, tensor: Tensor) -> Ref:
        name = f"x{len(self.tensors)}"
        self.tensors[name] = tensor.detach()
        return Ref(name)


def map_tensors(arg: Any, replace: Callable[[Tensor], Any]) -> Any:
    if isinstance(arg, Tensor):
        return replace(arg)
    if isinstance(arg, tuple | list):
        return tuple(map_tensors(a, replace) for a in arg)
    return arg


def _leaf(t: Tensor) -> Tensor:
    differentiable = t.is_floating_point() or t.is_complex()
    return t.detach().clone().requires_grad_(differentiable)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _like(t: Tensor) -> Tensor:
    differentiable = t.is_floating_point() or t.is_complex()
    generator = torch.Generator().manual_seed(7)
    if not differentiable:
        return torch.zeros_like(t)
    return torch.randn(t.shape, dtype=t.dtype, generator=generator)


def _backward(results: tuple[Tensor, ...], incoming: list[Tensor]) -> None:
    pairs = [(r, g) for r, g in zip(results, incoming, strict=True) if r.requires_grad]
    if pairs:
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])


def check(
    op: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    structures: Mapping[str, Any] | None = None,
    limit: int = 24,
) -> list[str]:
    """Check all candidates on this mesh; returns what was checked, as text."""
    mesh = mesh or {"tp": 2}
    case = Case(op, args, kwargs or {})
    options = candidates(case.rule, structures)
    combined = [dict(zip(mesh, c, strict=True)) for c in itertools.product(options, repeat=len(mesh))]
    combined = [c for c in combined if _legal(case.rule, c)]
    if len(combined) > limit:
        combined = random.Random(0).sample(combined, limit)
    for chosen in combined:
        try:
            check_candidates(case, mesh, chosen)
        except Exception as error:
            error.add_note(f"{op} {[str(t) for t in case.call.types.values()]}")
            error.add_note(f"mesh {dict(mesh)}, {({a: str(c.choice) for a, c in chosen.items()})}")
            raise
    return [" ".join(f"{a}: {c.choice}" for a, c in chosen.items()) for chosen in combined]


def _legal(rule: NodeRule, chosen: Mapping[str, Candidate]) -> bool:
    cut = [c.choice.axis for c in chosen.values() if isinstance(c.choice, Cut)]
    twice = [a for a in set(cut) if cut.count(a) > 1]
    if any(rule.axes[a].once or rule.axes[a].outermost for a in twice):
        return False
    places = {}
    for candidate in chosen.values():
        for i, placement in enumerate((*candidate.operands, *candidate.results)):
            if isinstance(placement, Shard):
                places.setdefault((i, placement.dim), []).append(placement.of)
    # Two factors of one dim are compatible only if one is outside the other.
    return all(len(set(map(len, of))) == 1 for of in places.values())


def layouts(chosen: Mapping[str, Candidate], kind: str) -> tuple[Layout, ...]:
    columns = zip(*(getattr(c, kind) for c in chosen.values()), strict=True)
    return tuple(Layout(tuple(zip(chosen, column, strict=True))) for column in columns)


def check_candidates(case: Case, mesh: Mapping[str, int], chosen: Mapping[str, Candidate]) -> None:
    operands, results = layouts(chosen, "operands"), layouts(chosen, "results")
    total = 1
    for size in mesh.values():
        total *= size
    terms = {i: _terms(t, lay, mesh) for i, (t, lay) in
             enumerate(zip(case.tensors.values(), operands, strict=True))}

    def run(rank: int, transport: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        return _run_rank(case, mesh, chosen, operands, results, terms, rank, transport)

    outcomes = run_threads(total, run, timeout=20)
    places = [coordinates(mesh, rank) for rank in range(total)]
    for i, layout in enumerate(results):
        local = [outcome[0][i] for outcome in outcomes]
        _compare(f"result {i}", local, case.results[i].detach(), layout, mesh, places)
    for i, (name, layout) in enumerate(zip(case.tensors, operands, strict=True)):
        leaf = case.leaves[name]
        if not leaf.requires_grad:
            continue
        grads = [outcome[1][i] for outcome in outcomes]
        missing = [rank for rank, g in enumerate(grads) if g is None]
        if missing and len(missing) == total:
            assert leaf.grad is None or not leaf.grad.any(), f"no gradient of operand {i}"
            continue
        assert not missing, f"ranks {missing} have no gradient of operand {i}"
        full = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        dual = Layout(tuple((n, _dual(p)) for n, p in layout.axes))
        _compare(f"gradient {i}", grads, full, dual, mesh, places)


def _dual(placement: Any) -> Any:
    if isinstance(placement, Replicate):
        return Partial() if placement.differs else REPLICATE
    return REPLICATE if isinstance(placement, Partial) else placement


def _terms(t: Tensor, layout: Layout, mesh: Mapping[str, int]) -> list[Tensor]:
    """This operand's whole value, or its term on every combination of partial axes, by rank."""
    partial = [n for n, p in layout.axes if isinstance(p, Partial)]
    total = 1
    for size in mesh.values():
        total *= size
    keys = [tuple(coordinates(mesh, r)[n] for n in partial) for r in range(total)]
    generator = torch.Generator().manual_seed(3)
    found: dict[tuple[int, ...], Tensor] = {}
    rest = t.clone()
    for key in sorted(set(keys))[1:]:
        found[key] = torch.randn(t.shape, dtype=t.dtype, generator=generator)
        rest = rest - found[key]
    found[min(keys)] = rest
    return [found[key] for key in keys]


def splits(layout: Layout) -> tuple[Split, ...]:
    return tuple(Split(axis=n, dim=s.dim, of=s.of) for n, s in layout.shards)


def _run_rank(
    case: Case,
    mesh: Mapping[str, int],
    chosen: Mapping[str, Candidate],
    operands: tuple[Layout, ...],
    results: tuple[Layout, ...],
    terms: Mapping[int, list[Tensor]],
    rank: int,
    transport: Any,
) -> tuple[list[Tensor], list[Tensor | None]]:
    place = coordinates(mesh, rank)
    ranks = ProcessMesh(mesh, rank, transport)
    coordinate = {n: (place[n], mesh[n]) for n in mesh}
    leaves = {
        name: _leaf(take_local(terms[i][rank], splits(operands[i]), place, mesh))
        for i, name in enumerate(case.tensors)
    }
    cuts: dict[str, tuple[str, ...]] = {}
    for axis, candidate in chosen.items():
        if isinstance(candidate.choice, Cut):
            cuts[candidate.choice.axis] = (*cuts.get(candidate.choice.axis, ()), axis)
    local = Local(
        cuts=cuts,
        operands=tuple(tuple(t.shape) for t in leaves.values()),
        results=tuple(
            local_shape(lay, tuple(r.shape), coordinate)
            for lay, r in zip(results, case.results, strict=True)
        ),
        result_layouts=results,
        operand_layouts=operands,
        coordinate=coordinate,
    )
    node = case.call.node
    plain = LocalCall(node.op, node.args, node.kwargs)
    call = case.rule.localize(case.call, local) if case.rule.localize else plain
    outs = _tuple(_execute(call, leaves, ranks))
    for i, (out, shape) in enumerate(zip(outs, local.results, strict=True)):
        assert tuple(out.shape) == shape, f"result {i}: {tuple(out.shape)} for {shape}"
    incoming = [
        take_local(g, splits(lay), place, mesh) for g, lay in zip(case.incoming, results, strict=True)
    ]
    _backward(outs, incoming)
    return [o.detach() for o in outs], [leaf.grad for leaf in leaves.values()]


def _execute(call: LocalCall, leaves: Mapping[str, Tensor], mesh: ProcessMesh) -> Any:
    def value(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return leaves[arg.name]
        if isinstance(arg, MeshAxis):
            return mesh.axis(*arg.names)
        if isinstance(arg, tuple | list):
            return tuple(value(a) for a in arg)
        return arg

    if call.fn.startswith("rt."):
        run = getattr(operators, call.fn.removeprefix("rt."))
    else:
        run = EXTRA.get(call.fn) or operator(call.fn)
    return run(*value(call.args), **{k: value(v) for k, v in call.kwargs})


def _compare(
    what: str,
    local: list[Tensor],
    full: Tensor,
    layout: Layout,
    mesh: Mapping[str, int],
    places: list[dict[str, int]],
) -> None:
    """Sum over partial axes, then every rank's tensor is its part of the whole."""
    partial = [n for n, p in layout.axes if isinstance(p, Partial)]
    sums: dict[tuple[int, ...], Tensor] = {}
    for t, place in zip(local, places, strict=True):
        key = tuple(place[n] for n in mesh if n not in partial)
        sums[key] = sums[key] + t if key in sums else t
    for t, place in zip(local, places, strict=True):
        key = tuple(place[n] for n in mesh if n not in partial)
        expected = take_local(full, splits(layout), place, mesh)
        assert t.dtype == expected.dtype, f"{what}: {t.dtype} for {expected.dtype}"
        torch.testing.assert_close(
            sums[key], expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True,
            msg=lambda text: f"{what} at {place} as {layout}: {text}",
        )
