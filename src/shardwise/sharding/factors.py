"""Facts about a graph that hold for every plan: rules, factors of dims, where gradients flow.

Factorizations are refined across edges to a fixed point, so that a weight used only by `linear`
knows that a later `view` reads its rows as 3 x heads x 16. Factorizations without a common
refinement end the propagation; that edge redistributes.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from shardwise.errors import RuleError
from shardwise.ir import Graph, Node
from shardwise.scan import Scan
from shardwise.sharding import discovery, rules  # noqa: F401 - rules registers the table
from shardwise.sharding.candidates import Candidate, ShardAxis, axis_structures, candidates, compose
from shardwise.sharding.dims import Structure, refine, replace_section, unfactored
from shardwise.sharding.registry import require_operators, rule_for
from shardwise.sharding.rule import Call, Dim, NodeRule, Part, replicated_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Rules by node, structures of node axes and of value dims, values that carry a gradient."""

    rules: Mapping[str, NodeRule]
    calls: Mapping[str, Call]
    structures: Mapping[str, Mapping[str, Structure]]
    dims: Mapping[str, tuple[Structure, ...]]
    carries_grad: frozenset[str]

    def candidates(self, node: str) -> tuple[Candidate, ...]:
        """Return all candidates of a node, with the refined structures of its axes."""
        return candidates(self.rules[node], self.structures[node])

    def begins(self, node: str, candidate: Candidate) -> bool:
        """Return whether a candidate shards the batch though no operand is sharded."""
        choice = candidate.choice
        return isinstance(choice, ShardAxis) and self.rules[node].axes[choice.axis].begins


def analyze(graph: Graph) -> Facts:
    """Return the rules of all nodes and the fixed point of factorizations."""
    require_operators()
    calls = {node.name: Call.of(node, graph.values) for node in graph.nodes}
    table = {name: node_rule(graph, call) for name, call in calls.items()}
    solver = _Refiner(graph, table)
    solver.run()
    return Facts(
        rules=table,
        calls=calls,
        structures=solver.axes,
        dims={name: tuple(dims) for name, dims in solver.dims.items()},
        carries_grad=gradient_carriers(graph),
    )


def node_rule(graph: Graph, call: Call) -> NodeRule:
    """Return the registered rule, or the one that experiments show for an unknown operator."""
    try:
        rule = rule_for(call)
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(
            f"the rule of {call.node.op} failed: {error}", where=call.node.origin
        ) from error
    if rule is None:
        run = graph.functions.get(call.node.op)
        run = run.sample if isinstance(run, Scan) else run
        rule = discovery.discover(call, run.apply if run is not None else None)
    if len(rule.operands) != len(call.operands) or len(rule.results) != len(call.results):
        return replicated_rule(call, f"its rule describes {len(rule.operands)} operands")
    return rule


def gradient_carriers(graph: Graph) -> frozenset[str]:
    """Return the values through which a gradient reaches a parameter or an earlier stage."""
    received = (i.value for i in graph.inputs if i.kind == "received")
    carriers = {v for v in received if graph.values[v].dtype.is_floating_point}
    carriers |= {p.value for p in graph.parameters if p.requires_grad}
    for node in graph.nodes:
        if not node.grad_enabled or node.op.startswith("aten.detach."):
            continue
        if any(name in carriers for name in node.inputs):
            for name in node.outputs:
                dtype = graph.values[name].dtype
                if dtype.is_floating_point or dtype.is_complex:
                    carriers.add(name)
    return frozenset(carriers)


class _Refiner:
    """Refines to a fixed point, with a work list of nodes whose dims or axes changed."""

    def __init__(self, graph: Graph, table: Mapping[str, NodeRule]) -> None:
        self.table = table
        self.nodes = {node.name: node for node in graph.nodes}
        self.dims: dict[str, list[Structure]] = {
            name: [unfactored(size) for size in value.shape] for name, value in graph.values.items()
        }
        self.axes: dict[str, dict[str, Structure]] = {
            name: axis_structures(rule) for name, rule in table.items()
        }
        self.touching: dict[str, list[str]] = {}
        for node in graph.nodes:
            for value in dict.fromkeys((*node.inputs, *node.outputs)):
                self.touching.setdefault(value, []).append(node.name)
        self.queue: deque[str] = deque(self.nodes)
        self.queued = set(self.queue)

    def run(self) -> None:
        while self.queue:
            name = self.queue.popleft()
            self.queued.discard(name)
            while self._visit(self.nodes[name]):
                pass

    def _visit(self, node: Node) -> bool:
        """Unify a node's axes with its values' dims; return whether an axis changed."""
        rule, axes = self.table[node.name], self.axes[node.name]
        changed = False
        tensors = (
            *zip(node.inputs, rule.operands, strict=True),
            *zip(node.outputs, rule.results, strict=True),
        )
        for value, dims in tensors:
            for index, dim in enumerate(dims):
                if dim == ():
                    continue
                own = compose(dim, axes)
                refined = None if own is None else refine(self.dims[value][index], own)
                if refined is None:
                    continue
                if refined != self.dims[value][index]:
                    self.dims[value][index] = refined
                    for name in self.touching[value]:
                        if name != node.name and name not in self.queued:
                            self.queued.add(name)
                            self.queue.append(name)
                changed |= refined != own and _narrow(dim, refined, axes, rule)
        return changed


def _narrow(dim: Dim, structure: Structure, axes: dict[str, Structure], rule: NodeRule) -> bool:
    """Refine the axes of a dim by the dim's structure; return whether any changed."""
    if isinstance(dim, Part):
        new = {dim.axis: replace_section(axes[dim.axis], dim.start, dim.stop, structure)}
    elif len(dim) == 1:
        new = {dim[0]: structure}
    else:
        split = _divide(structure, [rule.axes[a].size for a in dim])
        new = dict(zip(dim, split, strict=True)) if split else {}
    changed = False
    for name, axis_structure in new.items():
        refined = refine(axes[name], axis_structure)
        if refined is not None and refined != axes[name]:
            axes[name] = refined
            changed = True
    return changed


def _divide(structure: Structure, sizes: list[int]) -> list[Structure] | None:
    """Distribute the factors of a product to axes of these sizes.

    >>> _divide(((3, 4, 16),), [12, 16])
    [((3, 4),), ((16,),)]
    """
    if len(structure) != 1:
        return None
    factors = list(structure[0])
    parts: list[Structure] = []
    for size in sizes:
        own: list[int] = []
        while factors and prod(own) < size:
            own.append(factors.pop(0))
        if prod(own) != size:
            return None
        parts.append((tuple(own),))
    return parts
