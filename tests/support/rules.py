"""Executes rules: every candidate of a call on several ranks must equal the call on one.

    check_rule("aten.linear.default", (x, weight, bias))

For each candidate the operands are cut as it needs them, the local call runs on every rank, the
results are put together as it promises and compared with the whole call, in float64. Then a
random gradient goes back: the gradient of a shard is a shard, that of a partial sum is the same
on all ranks, that of a value used for different work (R≠) is a partial sum.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import shardwise.runtime
import shardwise.runtime.operators
from shardwise.ir import Node, Ref, TensorType, map_refs
from shardwise.ir.schema import operator
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.splits import Split, assemble, take_local
from shardwise.runtime.threads import run_threads
from shardwise.sharding import rules as _registers_the_table  # noqa: F401
from shardwise.sharding.candidates import Candidate, Cut, Pass, axis_structures, candidates
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
    Local,
    LocalCall,
    MeshAxis,
    NodeRule,
    Part,
    replace_arguments,
)

Coords = tuple[int, ...]
Runner = Callable[..., Any]


@dataclass(frozen=True)
class Dense:
    """The whole call: operands, results, the gradient that goes back and what comes out."""

    call: Call
    run: Runner
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    seeds: tuple[Tensor | None, ...]  # None: the result carries no gradient
    gradients: tuple[Tensor | None, ...]
    compare: str = "values"  # or "shapes", where the values are undefined
    constant: frozenset[int] = frozenset()  # operands that have no derivative


@dataclass(frozen=True)
class Arrangement:
    """A candidate for each axis of a mesh."""

    sizes: Mapping[str, int]
    chosen: Mapping[str, Candidate]

    def layout(self, kind: str, index: int) -> Layout:
        return Layout(tuple((a, getattr(c, kind)[index]) for a, c in self.chosen.items()))

    @property
    def places(self) -> list[Coords]:
        return list(itertools.product(*(range(n) for n in self.sizes.values())))

    def __str__(self) -> str:
        return ", ".join(f"{a}={self.sizes[a]}: {c.choice}" for a, c in self.chosen.items())


def tensors_of(arg: Any) -> Iterator[Tensor]:
    """All tensors in a nested argument, in order."""
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, tuple | list):
        for item in arg:
            yield from tensors_of(item)


def replace_tensors(arg: Any, replace: Callable[[Tensor], Any]) -> Any:
    if isinstance(arg, Tensor):
        return replace(arg)
    if isinstance(arg, tuple | list):
        return tuple(replace_tensors(item, replace) for item in arg)
    return arg


def random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Normal numbers, or small integers."""
    if is_float(tensor):
        return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
    return torch.randint(-5, 6, tensor.shape, dtype=tensor.dtype, generator=generator)


def is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def dense_call(
    op: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    run: Runner | None = None,
    seed: int = 0,
    constant: Sequence[int] = (),
) -> Dense:
    """Run the whole call forward and backward."""
    generator = torch.Generator().manual_seed(seed)
    given = (tuple(args), tuple((kwargs or {}).items()))
    operands = tuple(tensors_of(given))
    names = iter(f"x{i}" for i in range(len(operands)))
    node_args, node_kwargs = replace_tensors(given, lambda _: Ref(next(names)))
    leaves = [
        t.detach().clone().requires_grad_(is_float(t) and i not in constant)
        for i, t in enumerate(operands)
    ]
    run = run or operator(op)
    results = _run(run, node_args, node_kwargs, leaves)
    seeds = tuple(random_like(r, generator) if r.requires_grad else None for r in results)
    try:
        gradients = _backward(results, seeds, leaves)
    except RuntimeError as error:
        if not any(text in str(error) for text in ("derivative for", "no autograd formula")):
            raise
        seeds, gradients = tuple(None for _ in results), tuple(None for _ in leaves)
    types = {f"x{i}": TensorType(tuple(t.shape), t.dtype) for i, t in enumerate(operands)}
    types |= {f"y{i}": TensorType(tuple(t.shape), t.dtype) for i, t in enumerate(results)}
    node = Node(
        name="node",
        op=op,
        args=node_args,
        kwargs=node_kwargs,
        outputs=tuple(f"y{i}" for i in range(len(results))),
    )
    return Dense(
        call=Call.of(node, types),
        run=run,
        operands=tuple(t.detach() for t in operands),
        results=tuple(r.detach() for r in results),
        seeds=seeds,
        gradients=gradients,
        compare="shapes" if "empty" in op else "values",
        constant=frozenset(constant),
    )


def _run(run: Runner, args: Any, kwargs: Any, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    supply = iter(operands)
    given, named = map_refs((args, kwargs), lambda _: next(supply))
    found = run(*given, **dict(named))
    assert next(supply, None) is None, "the local call leaves out operands"
    return tuple(tensors_of(found))


def _backward(
    results: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None]
    pairs = [(r, s) for r, s in pairs if r.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not pairs or not wanted:
        return tuple(None for _ in leaves)
    outs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
    return tuple(next(found) if t.requires_grad else None for t in leaves)


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
        results, gradients = _execute(dense, found, Arrangement({"x": 1}, {"x": chosen[0]}))
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
    if isinstance(first, Cut) and isinstance(second, Cut) and first.axis == second.axis:
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
        locals_, gradients = _execute(dense, rule, arrangement)
    except Exception as error:
        error.add_note(f"in {what}")
        raise
    for i, whole in enumerate(dense.results):
        parts = {place: results[i] for place, results in locals_.items()}
        layout = arrangement.layout("results", i)
        for place, part in parts.items():
            expected = local_shape(layout, tuple(whole.shape), _coordinate(arrangement, place))
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
    shape = local_shape(layout, tuple(operand.shape), _coordinate(arrangement, place))
    return operand.new_zeros(shape)


def _dual(layout: Layout) -> Layout:
    """Of an operand's gradient: g(S)=S, g(P)=g(R=)=R=, g(R≠)=P."""

    def dual(placement: Placement) -> Placement:
        if isinstance(placement, Replicate):
            return Partial() if placement.differs else placement
        return Replicate() if isinstance(placement, Partial) else placement

    return Layout(tuple((a, dual(p)) for a, p in layout.axes))


def _assert_equal(found: Tensor, whole: Tensor, tolerance: float, what: str) -> None:
    try:
        torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def _coordinate(arrangement: Arrangement, place: Coords) -> dict[str, tuple[int, int]]:
    return {a: (i, n) for (a, n), i in zip(arrangement.sizes.items(), place, strict=True)}


def _splits(layout: Layout) -> tuple[Split, ...]:
    return tuple(Split(axis=a, dim=s.dim, of=s.of) for a, s in layout.shards)


def _execute(
    dense: Dense, rule: NodeRule, arrangement: Arrangement
) -> tuple[dict[Coords, tuple[Tensor, ...]], dict[Coords, tuple[Tensor | None, ...]]]:
    """Run the local call and its backward on every rank."""
    cut = [
        cut_operand(t, arrangement.layout("operands", i), arrangement, seed=i)
        for i, t in enumerate(dense.operands)
    ]
    places = arrangement.places

    def work(rank: int, transport: Any) -> tuple[Any, Any]:
        place = places[rank]
        mesh = ProcessMesh(dict(arrangement.sizes), rank, transport) if transport else None
        leaves = [
            parts[place]
            .detach()
            .clone()
            .requires_grad_(is_float(parts[place]) and i not in dense.constant)
            for i, parts in enumerate(cut)
        ]
        local = localized(dense.call, rule, arrangement, place)
        results = run_local(local, leaves, mesh, dense)
        seeds = []
        for i, seed in enumerate(dense.seeds):
            layout = arrangement.layout("results", i)
            coords = dict(zip(arrangement.sizes, place, strict=True))
            seeds.append(
                None
                if seed is None
                else take_local(seed, _splits(layout), coords, arrangement.sizes)
            )
        gradients = _backward(results, seeds, leaves)
        return tuple(r.detach() for r in results), gradients

    if any(localized(dense.call, rule, arrangement, p).fn.startswith("rt.") for p in places):
        outcome = run_threads(len(places), work)
    else:
        outcome = [work(rank, None) for rank in range(len(places))]
    results, gradients = zip(*outcome, strict=True)
    return dict(zip(places, results, strict=True)), dict(zip(places, gradients, strict=True))


def cut_operand(
    whole: Tensor, layout: Layout, arrangement: Arrangement, seed: int = 0
) -> dict[Coords, Tensor]:
    """Every rank's part: shards cut, partial sums as random terms."""
    generator = torch.Generator().manual_seed(seed)
    summed = [i for i, (_, p) in enumerate(layout.axes) if isinstance(p, Partial)]
    terms: dict[Coords, Tensor] = {}
    keys = sorted({tuple(place[i] for i in summed) for place in arrangement.places})
    for key in keys[:-1]:
        terms[key] = random_like(whole, generator)
    terms[keys[-1]] = whole - sum(terms.values()) if terms else whole
    return {
        place: take_local(
            terms[tuple(place[i] for i in summed)],
            _splits(layout),
            dict(zip(arrangement.sizes, place, strict=True)),
            arrangement.sizes,
        )
        for place in arrangement.places
    }


def localized(call: Call, rule: NodeRule, arrangement: Arrangement, place: Coords) -> LocalCall:
    """The local call of one rank, as lowering makes it."""
    coordinate = _coordinate(arrangement, place)
    operands = tuple(arrangement.layout("operands", i) for i in range(len(call.operands)))
    results = tuple(arrangement.layout("results", i) for i in range(len(call.results)))
    shapes = [
        tuple(
            local_shape(layout, shape, coordinate) for layout, shape in zip(of, full, strict=True)
        )
        for of, full in ((operands, call.operands), (results, call.results))
    ]
    if rule.localize is not None:
        cuts: dict[str, tuple[str, ...]] = {}
        for axis, candidate in arrangement.chosen.items():
            if isinstance(candidate.choice, Cut):
                name = candidate.choice.axis
                cuts[name] = (*cuts.get(name, ()), axis)
        passing = [a for a, c in arrangement.chosen.items() if isinstance(c.choice, Pass)]
        local = Local(
            cuts=cuts,
            operands=shapes[0],
            results=shapes[1],
            result_layouts=results,
            operand_layouts=operands,
            coordinate=coordinate,
            partial=tuple(passing),
        )
        return rule.localize(call, local)
    if rule.size_arg is not None:
        return replace_arguments(call.node, call.arguments, {rule.size_arg: shapes[1][0]})
    return LocalCall(call.node.op, call.node.args, call.node.kwargs)


def run_local(
    local: LocalCall, operands: Sequence[Tensor], mesh: ProcessMesh | None, dense: Dense
) -> tuple[Tensor, ...]:
    """Run a local call: ATen operators, or functions of the runtime with their axis objects."""

    def resolve(arg: Any) -> Any:
        if isinstance(arg, MeshAxis):
            assert mesh is not None
            return mesh.axis(*arg.names)
        return tuple(resolve(a) for a in arg) if isinstance(arg, tuple | list) else arg

    kwargs = tuple((name, resolve(arg)) for name, arg in local.kwargs)
    if "key" in dict(kwargs):
        kwargs = (*kwargs, ("rng", random_source(mesh)))
    run = dense.run if local.fn == dense.call.node.op else find_function(local.fn)
    return _run(run, resolve(local.args), kwargs, operands)


def random_source(mesh: ProcessMesh | None) -> Any:
    """The runtime's exact source of random numbers."""
    from shardwise.runtime.random import Rng

    return Rng(0, "exact", mesh)


def find_function(name: str) -> Runner:
    """An ATen operator, or a function of the runtime."""
    if not name.startswith("rt."):
        return operator(name)
    short = name.removeprefix("rt.")
    modules = [shardwise.runtime]
    modules += [
        importlib.import_module(f"shardwise.runtime.operators.{info.name}")
        for info in pkgutil.iter_modules(shardwise.runtime.operators.__path__)
    ]
    for module in modules:
        if hasattr(module, short):
            return getattr(module, short)
    raise LookupError(f"the runtime has no function {name}")


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
    return assemble(remaining, whole.shape, _splits(layout), arrangement.sizes)


def _merge(placement: Placement, tensors: list[Tensor], axis: str) -> Tensor:
    if isinstance(placement, Partial):
        stacked = torch.stack(tensors)
        if placement.op == "sum":
            return stacked.sum(0).to(tensors[0].dtype)
        return stacked.amax(0) if placement.op == "max" else stacked.amin(0)
    for other in tensors[1:]:
        _assert_equal(other, tensors[0], 1e-9, f"ranks of {axis} hold different values")
    return tensors[0]
