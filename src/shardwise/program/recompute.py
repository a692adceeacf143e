"""Which nodes backward computes again: the groups that a plan's `recompute` asks for.

A group is the nodes of one module:

    "none"       the model's own checkpoints, as captured
    "full"       every block of the plan's units: only what enters it is kept
    "selective"  the same, and the results of products (matrices, convolutions, attention) are kept
    globs        every module that matches and is not inside another one that does

A checkpoint of the model inside a group becomes part of it; one that is not stays as it is.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, Node, Ref
from shardwise.ir.blocks import node_blocks
from shardwise.plans import Plan
from shardwise.sharding.rule import LocalCall

PRODUCTS_KEPT = " with products kept"
STATISTICS = ("shardwise.batch_norm",)  # give new statistics, and results that do not use the old


def mark_recompute(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with every node's group; marking it again changes nothing."""
    groups = {node.name: node.recompute for node in graph.nodes if node.recompute}
    groups |= _within(_planned(graph, plan), groups)
    groups = _useful(graph, groups)
    nodes = [dataclasses.replace(n, recompute=groups.get(n.name)) for n in graph.nodes]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def keeps_products(group: str | None) -> bool:
    """Whether backward of this group computes all but products again."""
    return group is not None and group.endswith(PRODUCTS_KEPT)


def recompute_notes(graph: Graph, plan: Plan) -> list[str]:
    """One line that says what backward computes again.

    >>> folded(["blocks.0", "blocks.1", "head"])
    'blocks.* (2), head'
    """
    groups = list(dict.fromkeys(n.recompute for n in graph.nodes if n.recompute))
    if groups:
        return [f"backward recomputes {folded(groups)}"]
    if plan.recompute in ("full", "selective") and not plan.units:
        return [f"recompute {plan.recompute!r}: the plan has no units, nothing is recomputed"]
    return []


def folded(groups: Sequence[str]) -> str:
    """Groups that differ in numbers alone, with how many they are."""
    stars = {group: re.sub(r"(^|[._])\d+(?=[. ]|$)", r"\1*", group) for group in groups}
    counts = Counter(stars.values())
    shown = {
        group if counts[star] == 1 else f"{star} ({counts[star]})": None
        for group, star in stars.items()
    }
    return ", ".join(shown)


def _planned(graph: Graph, plan: Plan) -> dict[str, str]:
    """Node -> the group that the plan puts it in."""
    if plan.recompute == "none":
        return {}
    if isinstance(plan.recompute, str):
        modules = set(plan.units)
        suffix = PRODUCTS_KEPT if plan.recompute == "selective" else ""
    else:
        modules, suffix = _matching(graph, plan.recompute), ""
    found = {}
    for name, path in node_modules(graph.nodes).items():
        outermost = next((p for p in _prefixes(path) if p in modules), None)
        if outermost is not None:
            found[name] = outermost + suffix
    return found


def _matching(graph: Graph, globs: Sequence[str]) -> set[str]:
    paths = [path for path in graph.module_classes if path]
    for glob in globs:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise PlanError(
                f"recompute {glob!r} of the plan matches none of the model's {len(paths)} modules"
                f"{did_you_mean(glob, paths)}",
                where="recompute",
            )
    return {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)}


def _within(planned: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the plan's groups, less the nodes of checkpoints of the model that reach out of a
    group.
    """
    homes: dict[str, set[str | None]] = {}
    for name, group in own.items():
        homes.setdefault(group, set()).add(planned.get(name))
    inside = {group for group, found in homes.items() if len(found) == 1 and None not in found}
    return {n: g for n, g in planned.items() if n not in own or own[n] in inside}


def _useful(graph: Graph, groups: Mapping[str, str]) -> dict[str, str]:
    """Return the groups without nodes that must not be repeated, and without what would save
    nothing.
    """
    carries = _carrying(graph)
    once = _unrepeatable(graph)
    members: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.name in groups and node.name not in once:
            members.setdefault(groups[node.name], []).append(node)
    found: dict[str, str] = {}
    for group, nodes in members.items():
        trained = any(n.grad_enabled and carries.intersection(n.outputs) for n in nodes)
        only_loss = len(nodes) == 1 and graph.loss in nodes[0].outputs
        if trained and not only_loss:
            found |= {node.name: group for node in nodes}
    return found


def _carrying(graph: Graph) -> set[str]:
    """Values that may have a gradient."""
    received = [i.value for i in graph.inputs if i.kind == "received"]
    found = {v for v in received if graph.values[v].dtype.is_floating_point}
    found |= {p.value for p in graph.parameters if p.requires_grad}
    for node in graph.nodes:
        if node.grad_enabled and found.intersection(node.inputs):
            found |= {o for o in node.outputs if graph.values[o].dtype.is_floating_point}
    return found


def _unrepeatable(graph: Graph) -> set[str]:
    """Nodes on the way to the loss that read a buffer which the step changes.

    When backward runs, the buffer has its new content. What counts batches is only read to be
    written, and batch norm's results do not depend on the statistics it had.
    """
    changed = {b.value for b in graph.buffers if b.mutation}
    matters = {*graph.sends, *([graph.loss] if graph.loss else [])}
    for node in reversed(graph.nodes):
        if matters.intersection(node.outputs):
            matters |= set(node.inputs)
    return {
        node.name
        for node in graph.nodes
        if changed.intersection(node.inputs)
        and matters.intersection(node.outputs)
        and not node.op.startswith(STATISTICS)
    }


# ---------------------------------------------------------------- nodes and blocks


def node_modules(nodes: Sequence[Node]) -> dict[str, str]:
    """Node -> the module it counts to: its own, or the block that its code belongs to."""
    found = {}
    for node, home in zip(nodes, node_blocks(nodes), strict=True):
        inside = home is None or f"{node.module}.".startswith(f"{home}.")
        found[node.name] = node.module if inside else home or ""
    return found


def _prefixes(path: str) -> list[str]:
    pieces = path.split(".")
    return [".".join(pieces[: i + 1]) for i in range(len(pieces))]


# Products with a parameter in a form whose weight gradients can wait.


Weights = Callable[[Any], bool]  # whether an argument is a parameter as it is stored


def deferred(call: LocalCall, is_weight: Weights, dims: Callable[[Any], int]) -> LocalCall:
    """Return the call as one of `pipeline.weight_grad`, if it multiplies with a parameter."""
    args, kwargs = call.args, dict(call.kwargs)
    weight = _WEIGHT.get(call.fn)
    if weight is None or len(args) <= weight or not is_weight(args[weight]):
        return call
    if call.fn in _CONVOLUTIONS:
        return _convolution(call, dims(args[weight]) - 2)
    if kwargs or len(args) > _MOST[call.fn]:
        return call
    return LocalCall(_NAMES[call.fn], args)


def _convolution(call: LocalCall, space: int) -> LocalCall:
    given = [*call.args, *([None] * (7 - len(call.args)))]
    x, weight, bias, stride, padding, dilation, groups = given
    if call.kwargs or isinstance(padding, str):
        return call
    sizes = [_spread(stride, 1, space), _spread(padding, 0, space), _spread(dilation, 1, space)]
    return LocalCall(
        "rt.conv", (x, weight, bias, *sizes, False, (0,) * space, 1 if groups is None else groups)
    )


def _spread(sizes: Any, default: int, space: int) -> tuple[int, ...]:
    """One number for every dim of space."""
    if sizes is None:
        return (default,) * space
    if isinstance(sizes, int):
        return (sizes,) * space
    return tuple(sizes) if len(sizes) == space else tuple(sizes) * space


_CONVOLUTIONS = {f"aten.conv{n}d.default" for n in (1, 2, 3)}
_NAMES = {
    "aten.linear.default": "rt.linear",
    "aten.addmm.default": "rt.addmm",
    "aten.matmul.default": "rt.matmul",
    "aten.mm.default": "rt.matmul",
    "aten.embedding.default": "rt.embedding",
}
_MOST = {
    "aten.linear.default": 3,
    "aten.addmm.default": 3,
    "aten.matmul.default": 2,
    "aten.mm.default": 2,
    "aten.embedding.default": 3,
}
_WEIGHT = {
    "aten.linear.default": 1,
    "aten.addmm.default": 2,
    "aten.matmul.default": 1,
    "aten.mm.default": 1,
    "aten.embedding.default": 0,
    **dict.fromkeys(_CONVOLUTIONS, 1),
}


def refers(arg: Any, names: frozenset[str]) -> bool:
    """Whether an argument is one of these values."""
    return isinstance(arg, Ref) and arg.name in names
