"""Weights and inputs for a twin: cut from real ones, or drawn.

Enters: a scaled `Graph` and what real tensors there are. Leaves: a state and inputs in float64 that
every index in the graph accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shardwise.equivalence.twin.rewrite import crop
from shardwise.ir import Graph, Node
from shardwise.ir.schema import bind, indexed_dim, op_name
from shardwise.plans import Plan
from shardwise.plans.resolve import input_cuts
from shardwise.sharding.placements import Shard

IGNORED = -100


def make_state(graph: Graph, real: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters are drawn: small, none of them zero. Buffers are cut from real ones."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for parameter in graph.parameters:
        kind = graph.values[parameter.value]
        drawn = torch.randn(kind.shape, generator=generator, dtype=torch.float64)
        wide = len(kind.shape) > 1
        state[parameter.name] = drawn / kind.shape[-1] ** 0.5 if wide else 1 + drawn / 10
    for buffer in graph.buffers:
        kind = graph.values[buffer.value]
        given = real.get(buffer.name)
        if given is not None and not given.is_meta:
            state[buffer.name] = crop(given.detach().cpu(), kind.shape).to(kind.dtype)
        else:
            state[buffer.name] = _drawn_buffer(kind.shape, kind.dtype, generator)
    return state


def _drawn_buffer(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).add(0.5).to(dtype)
    if dtype == torch.bool:
        return (
            torch.ones(shape, dtype=dtype).tril()
            if len(shape) > 1
            else torch.ones(shape, dtype=dtype)
        )
    rows = torch.arange(shape[-1]) if shape else torch.tensor(0)
    return rows.expand(shape).clone().to(dtype)


def make_batches(
    graph: Graph, plan: Plan, real: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Inputs of a batch whose micro-batches are batches of their own, and those of each."""
    cuts = input_cuts(graph, plan) or {}
    dims = {i.name: cuts[i.value].dim for i in graph.inputs if isinstance(cuts.get(i.value), Shard)}  # type: ignore[union-attr]
    batches = []
    for k in range(plan.num_microbatches):
        parts = dict(real)
        for name, dim in dims.items():
            rows = real[name].shape[dim] // plan.num_microbatches
            parts[name] = real[name].narrow(dim, k * rows, rows)
        batches.append(make_inputs(graph, parts, seed=1 + k))
    whole = {
        name: torch.cat([b[name] for b in batches], dims[name]) if name in dims else given
        for name, given in batches[0].items()
    }
    return whole, [{n: b[n] if n in dims else whole[n] for n in b} for b in batches]


def make_inputs(
    graph: Graph, real: Mapping[str, torch.Tensor], seed: int = 1
) -> dict[str, torch.Tensor]:
    """Inputs of the twin's shapes; integers are kept inside what they index."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for source in graph.inputs:
        kind, given = graph.values[source.value], real[source.name]
        bounds = list(index_bounds(graph, source.value))
        if not given.is_meta:
            data = crop(given.detach().cpu(), kind.shape).to(kind.dtype)
            if bounds and not kind.dtype.is_floating_point:
                data = torch.where(data >= 0, data % min(bounds), data)
        elif kind.dtype.is_floating_point:
            data = torch.randn(kind.shape, generator=generator, dtype=torch.float64).to(kind.dtype)
        elif bounds and kind.dtype != torch.bool:
            data = torch.randint(min(bounds), kind.shape, generator=generator, dtype=kind.dtype)
            if ignores_some(graph, source.value) and data.dim() > 1:
                for row in range(1, data.shape[0]):  # a ragged mean
                    data[row, : min(row, data.shape[1] - 1)] = IGNORED
        else:
            data = torch.ones(kind.shape, dtype=kind.dtype)
        found[source.name] = data
    return found


def _followed(graph: Graph, value: str) -> Iterator[tuple[Node, str]]:
    """Nodes that use an integer value, or what shape operators make of it."""
    names = {value}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            if name not in names:
                continue
            yield node, name
            kept = [o for o in node.outputs if graph.values[o].dtype == graph.values[value].dtype]
            names |= set(kept)


def index_bounds(graph: Graph, value: str) -> Iterator[int]:
    """Sizes of what a value indexes."""
    if graph.values[value].dtype.is_floating_point:
        return
    for node, name in _followed(graph, value):
        op, found = op_name(node), indexed_dim(node, name)
        if found is not None:
            table, dim = found
            yield graph.values[table].shape[dim]
        elif op in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"):
            scores = graph.values[bind(node)["self"].name].shape
            yield scores[1 if len(scores) > 1 else 0]
        elif op == "one_hot" and bind(node).get("num_classes", -1) > 0:
            yield bind(node)["num_classes"]


def ignores_some(graph: Graph, value: str) -> bool:
    """Whether a value holds classes of which a loss leaves some out."""
    return any(
        "cross_entropy" in node.op and bind(node).get("ignore_index", IGNORED) == IGNORED
        for node, _ in _followed(graph, value)
    )
