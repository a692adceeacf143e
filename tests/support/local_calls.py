"""Run a call on one device, and the local calls of a rule on a small mesh of threads."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import shardwise.runtime
import shardwise.runtime.operators
from shardwise.ir import Node, Ref, TensorType, map_refs
from shardwise.ir.operators import operator
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.splits import Split, take_local
from shardwise.runtime.transport.threads import run_threads
from shardwise.sharding import rules as _registers_the_table  # noqa: F401
from shardwise.sharding.candidates import Candidate, Pass, ShardAxis
from shardwise.sharding.placements import Layout, Partial, local_shape
from shardwise.sharding.rule import Call, Local, LocalCall, MeshAxis, NodeRule, replace_arguments
from shardwise.shares import AxisSize, num_ranks

Coords = tuple[int, ...]
Runner = Callable[..., Any]


@dataclass(frozen=True)
class Dense:
    """A call on one device: operands, results, their gradients, and gradients of operands."""

    call: Call
    run: Runner
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    seeds: tuple[Tensor | None, ...]  # None if the result has no gradient
    gradients: tuple[Tensor | None, ...]
    compare: str = "values"  # or "shapes" if the values are undefined
    constant: frozenset[int] = frozenset()  # operands without a derivative


@dataclass(frozen=True)
class Arrangement:
    """A candidate for each axis of a mesh."""

    sizes: Mapping[str, AxisSize]
    chosen: Mapping[str, Candidate]

    def layout(self, kind: str, index: int) -> Layout:
        return Layout(tuple((a, getattr(c, kind)[index]) for a, c in self.chosen.items()))

    @property
    def places(self) -> list[Coords]:
        return list(itertools.product(*(range(num_ranks(n)) for n in self.sizes.values())))

    def __str__(self) -> str:
        return ", ".join(f"{a}={self.sizes[a]}: {c.choice}" for a, c in self.chosen.items())


def tensors_of(arg: Any) -> Iterator[Tensor]:
    """Yield all tensors in a nested argument, in order."""
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
    """Return normally distributed numbers, or small integers."""
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
    """Run the call on one device, forward and backward."""
    generator = torch.Generator().manual_seed(seed)
    arguments = (tuple(args), tuple((kwargs or {}).items()))
    operands = tuple(tensors_of(arguments))
    names = iter(f"x{i}" for i in range(len(operands)))
    node_args, node_kwargs = replace_tensors(arguments, lambda _: Ref(next(names)))
    leaves = [
        t.detach().clone().requires_grad_(is_float(t) and i not in constant)
        for i, t in enumerate(operands)
    ]
    run = run or operator(op)
    results = run_operator(run, node_args, node_kwargs, leaves)
    seeds = tuple(random_like(r, generator) if r.requires_grad else None for r in results)
    try:
        gradients = backward(results, seeds, leaves)
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
    if "embedding_bag" in op:  # its other results serve its backward
        results, seeds = results[:1], seeds[:1]
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


def run_operator(
    run: Runner, args: Any, kwargs: Any, operands: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    supply = iter(operands)
    positional, named = map_refs((args, kwargs), lambda _: next(supply))
    results = run(*positional, **dict(named))
    assert next(supply, None) is None, "the local call omits operands"
    return tuple(tensors_of(results))


def backward(
    results: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None]
    pairs = [(r, s) for r, s in pairs if r.requires_grad]
    inputs = [t for t in leaves if t.requires_grad]
    if not pairs or not inputs:
        return tuple(None for _ in leaves)
    outs, grads = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(outs, inputs, grads, allow_unused=True))
    return tuple(next(gradients) if t.requires_grad else None for t in leaves)


def coordinate_of(arrangement: Arrangement, place: Coords) -> dict[str, tuple[int, int]]:
    return {a: (i, n) for (a, n), i in zip(arrangement.sizes.items(), place, strict=True)}


def splits_of(layout: Layout) -> tuple[Split, ...]:
    return tuple(Split(axis=a, dim=s.dim, of=s.of) for a, s in layout.shards)


def execute(
    dense: Dense, rule: NodeRule, arrangement: Arrangement
) -> tuple[dict[Coords, tuple[Tensor, ...]], dict[Coords, tuple[Tensor | None, ...]]]:
    """Run the local call and its backward pass on every rank."""
    local_operands = [
        shard_operand(t, arrangement.layout("operands", i), arrangement, seed=i)
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
            for i, parts in enumerate(local_operands)
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
                else take_local(seed, splits_of(layout), coords, arrangement.sizes)
            )
        gradients = backward(results, seeds, leaves)
        return tuple(r.detach() for r in results), gradients

    if any(localized(dense.call, rule, arrangement, p).fn.startswith("rt.") for p in places):
        outcome = run_threads(len(places), work)
    else:
        outcome = [work(rank, None) for rank in range(len(places))]
    results, gradients = zip(*outcome, strict=True)
    return dict(zip(places, results, strict=True)), dict(zip(places, gradients, strict=True))


def shard_operand(
    operand: Tensor, layout: Layout, arrangement: Arrangement, seed: int = 0
) -> dict[Coords, Tensor]:
    """Return the local operand of every rank: shards, or random terms of partial sums."""
    generator = torch.Generator().manual_seed(seed)
    summed = [i for i, (_, p) in enumerate(layout.axes) if isinstance(p, Partial)]
    terms: dict[Coords, Tensor] = {}
    keys = sorted({tuple(place[i] for i in summed) for place in arrangement.places})
    for key in keys[:-1]:
        terms[key] = random_like(operand, generator)
    terms[keys[-1]] = operand - sum(terms.values()) if terms else operand
    return {
        place: take_local(
            terms[tuple(place[i] for i in summed)],
            splits_of(layout),
            dict(zip(arrangement.sizes, place, strict=True)),
            arrangement.sizes,
        )
        for place in arrangement.places
    }


def localized(call: Call, rule: NodeRule, arrangement: Arrangement, place: Coords) -> LocalCall:
    """Return the local call of one rank as lowering does."""
    coordinate = coordinate_of(arrangement, place)
    operands = tuple(arrangement.layout("operands", i) for i in range(len(call.operands)))
    results = tuple(arrangement.layout("results", i) for i in range(len(call.results)))
    shapes = [
        tuple(
            local_shape(layout, shape, coordinate) for layout, shape in zip(of, full, strict=True)
        )
        for of, full in ((operands, call.operands), (results, call.results))
    ]
    if rule.localize is not None:
        sharded: dict[str, tuple[str, ...]] = {}
        for axis, candidate in arrangement.chosen.items():
            if isinstance(candidate.choice, ShardAxis):
                name = candidate.choice.axis
                sharded[name] = (*sharded.get(name, ()), axis)
        passing = [a for a, c in arrangement.chosen.items() if isinstance(c.choice, Pass)]
        local = Local(
            sharded=sharded,
            operands=shapes[0],
            results=shapes[1],
            result_layouts=results,
            operand_layouts=operands,
            coordinate=coordinate,
            partial=tuple(passing),
        )
        return rule.localize(call, local)
    if rule.size_arg is not None:
        return replace_arguments(call.node, {rule.size_arg: shapes[1][0]})
    return LocalCall(call.node.op, call.node.args, call.node.kwargs)


def run_local(
    local: LocalCall, operands: Sequence[Tensor], mesh: ProcessMesh | None, dense: Dense
) -> tuple[Tensor, ...]:
    """Run a local call of an ATen operator or a runtime function."""

    def resolve(arg: Any) -> Any:
        if isinstance(arg, MeshAxis):
            assert mesh is not None
            return mesh.axis(*arg.names)
        return tuple(resolve(a) for a in arg) if isinstance(arg, tuple | list) else arg

    kwargs = tuple((name, resolve(arg)) for name, arg in local.kwargs)
    if "key" in dict(kwargs):
        kwargs = (*kwargs, ("rng", random_source(mesh)))
    run = dense.run if local.fn == dense.call.node.op else find_function(local.fn)
    return run_operator(run, resolve(local.args), kwargs, operands)


def random_source(mesh: ProcessMesh | None) -> Any:
    """Return the exact random number generator of the runtime."""
    from shardwise.runtime.rng import Rng

    return Rng(0, "exact", mesh)


def find_function(name: str) -> Runner:
    """Return an ATen operator, or a function of the runtime."""
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
