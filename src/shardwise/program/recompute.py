"""Group the nodes that backward recomputes, as a plan's `recompute` says; defer weight gradients.

A group is the nodes of one module:

    "none"       the model's own checkpoints, as captured
    "full"       every block of the plan's units: only its inputs are saved
    "selective"  the same, but results of products (matrices, convolutions, attention) are saved
    globs        every module that matches and is not inside another match

A checkpoint of the model inside a group becomes part of it; any other stays as it is.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, Node, Ref
from shardwise.ir.blocks import node_blocks
from shardwise.plans import Plan
from shardwise.sharding.factors import gradient_carriers
from shardwise.sharding.rule import LocalCall

PRODUCTS_KEPT = " with products kept"
STATISTICS = ("shardwise.batch_norm",)  # results do not depend on the running statistics


def mark_recompute(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with every node's group; marking is idempotent."""
    groups = {node.name: node.recompute for node in graph.nodes if node.recompute}
    groups |= _within(_planned(graph, plan), groups)
    groups = _useful(graph, groups)
    nodes = [dataclasses.replace(n, recompute=groups.get(n.name)) for n in graph.nodes]
    return dataclasses.replace(graph, nodes=tuple(nodes))


def keeps_products(group: str | None) -> bool:
    """Return whether backward of this group recomputes everything but products."""
    return group is not None and group.endswith(PRODUCTS_KEPT)


def recompute_notes(graph: Graph, plan: Plan) -> list[str]:
    """Return a line about the groups that backward recomputes, or an empty list."""
    groups = list(dict.fromkeys(n.recompute for n in graph.nodes if n.recompute))
    if groups:
        return [f"backward recomputes {folded(groups)}"]
    if plan.recompute in ("full", "selective") and not plan.units:
        return [f"recompute {plan.recompute!r}: the plan has no units, nothing is recomputed"]
    return []


def folded(groups: Sequence[str]) -> str:
    """Join the names of groups; those that differ only in numbers become one name with a count.

    >>> folded(["blocks.0", "blocks.1", "head"])
    'blocks.* (2), head'
    """
    stars = {group: re.sub(r"(^|[._])\d+(?=[. ]|$)", r"\1*", group) for group in groups}
    counts = Counter(stars.values())
    shown = {
        group if counts[star] == 1 else f"{star} ({counts[star]})": None
        for group, star in stars.items()
    }
    return ", ".join(shown)


def _planned(graph: Graph, plan: Plan) -> dict[str, str]:
    """Map nodes to the groups that the plan puts them in."""
    if plan.recompute == "none":
        return {}
    if isinstance(plan.recompute, str):
        modules = set(plan.units)
        suffix = PRODUCTS_KEPT if plan.recompute == "selective" else ""
    else:
        modules, suffix = _matching(graph, plan.recompute), ""
    groups = {}
    for name, path in node_modules(graph.nodes).items():
        prefixes = accumulate(path.split("."), lambda parent, piece: f"{parent}.{piece}")
        outermost = next((prefix for prefix in prefixes if prefix in modules), None)
        if outermost is not None:
            groups[name] = outermost + suffix
    return groups


def _matching(graph: Graph, globs: Sequence[str]) -> set[str]:
    paths = [path for path in graph.module_classes if path]
    for glob in globs:
        if not any(fnmatchcase(path, glob) for path in paths):
            raise PlanError(
                f"recompute {glob!r} matches none of the model's {len(paths)} modules"
                f"{did_you_mean(glob, paths)}",
                where="recompute",
            )
    return {path for path in paths if any(fnmatchcase(path, glob) for glob in globs)}


def _within(planned: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the plan's groups without the nodes of checkpoints that extend beyond one group."""
    overlapped: dict[str, set[str | None]] = {}
    for name, group in own.items():
        overlapped.setdefault(group, set()).add(planned.get(name))
    inside = {own for own, plans in overlapped.items() if len(plans) == 1 and None not in plans}
    return {n: g for n, g in planned.items() if n not in own or own[n] in inside}


def _useful(graph: Graph, groups: Mapping[str, str]) -> dict[str, str]:
    """Return the groups without nodes that must not be recomputed and groups that save nothing."""
    carries = gradient_carriers(graph)
    once = _unrepeatable(graph)
    members: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.name in groups and node.name not in once:
            members.setdefault(groups[node.name], []).append(node)
    useful: dict[str, str] = {}
    for group, nodes in members.items():
        trained = any(n.grad_enabled and carries.intersection(n.outputs) for n in nodes)
        only_loss = len(nodes) == 1 and graph.loss in nodes[0].outputs
        if trained and not only_loss:
            useful |= {node.name: group for node in nodes}
    return useful


def _unrepeatable(graph: Graph) -> set[str]:
    """Return the ancestors of the loss that read a buffer which the step changes.

    Recomputing them in backward would read the new content of the buffer. Counters of batches do
    not reach the loss, and batch norm's results do not depend on the running statistics.
    """
    changed = {b.value for b in graph.buffers if b.mutation}
    relevant = {*graph.sends, *([graph.loss] if graph.loss else [])}
    for node in reversed(graph.nodes):
        if relevant.intersection(node.outputs):
            relevant |= set(node.inputs)
    return {
        node.name
        for node in graph.nodes
        if changed.intersection(node.inputs)
        and relevant.intersection(node.outputs)
        and not node.op.startswith(STATISTICS)
    }


def node_modules(nodes: Sequence[Node]) -> dict[str, str]:
    """Map each node to its module, or to its block if the module lies outside the block."""
    modules = {}
    for node, block in zip(nodes, node_blocks(nodes), strict=True):
        inside = block is None or f"{node.module}.".startswith(f"{block}.")
        modules[node.name] = node.module if inside else block or ""
    return modules


# ---------------------------------------------------------------- deferred weight gradients
# Operator -> its runtime function, the position of the weight, the maximum number of arguments.
_PRODUCTS = {
    "aten.linear.default": ("rt.linear", 1, 3),
    "aten.addmm.default": ("rt.addmm", 2, 3),
    "aten.matmul.default": ("rt.matmul", 1, 2),
    "aten.mm.default": ("rt.matmul", 1, 2),
    "aten.embedding.default": ("rt.embedding", 0, 3),
    **{f"aten.conv{n}d.default": ("rt.conv", 1, 7) for n in (1, 2, 3)},
}


def deferred(call: LocalCall, weight_dims: Mapping[str, int]) -> LocalCall:
    """Return a product with a weight as a call whose weight gradient can be computed later.

    `weight_dims` has the number of dims of every parameter. Other calls are returned unchanged.
    """
    function, position, max_args = _PRODUCTS.get(call.fn, ("", len(call.args), 0))
    weight = call.args[position] if position < len(call.args) else None
    if not isinstance(weight, Ref) or weight.name not in weight_dims:
        return call
    if call.kwargs or len(call.args) > max_args:
        return call
    if function != "rt.conv":
        return LocalCall(function, call.args)
    padded_args: list[Any] = [*call.args, *[None] * (max_args - len(call.args))]
    x, _, bias, stride, padding, dilation, groups = padded_args
    if isinstance(padding, str):
        return call
    num_spatial = weight_dims[weight.name] - 2
    pairs = ((stride, 1), (padding, 0), (dilation, 1))
    sizes = [_spread(size, default, num_spatial) for size, default in pairs]
    groups = 1 if groups is None else groups
    return LocalCall(function, (x, weight, bias, *sizes, False, (0,) * num_spatial, groups))


def _spread(sizes: Any, default: int, num_dims: int) -> tuple[int, ...]:
    """Return one number for every spatial dim."""
    if sizes is None or isinstance(sizes, int):
        return (default if sizes is None else sizes,) * num_dims
    return tuple(sizes) if len(sizes) == num_dims else tuple(sizes) * num_dims
