"""Find the parameters of experts: stacks of one matrix for each expert."""

from collections.abc import Mapping, Sequence

from shardwise.cluster import Mesh
from shardwise.errors import InfeasiblePlan
from shardwise.ir import Graph
from shardwise.ir.operators import op_name
from shardwise.plans import ParameterEntry
from shardwise.shares import num_ranks

EXPERTS_AXIS = "ep"
_STACKED = {"grouped_linear": (1, 3), "bmm": (0, 1), "baddbmm": (1, 2)}  # operands by expert
_KEEP_FIRST_DIM = {"transpose", "permute", "to", "_to_copy", "clone", "contiguous", "alias"}


def expert_parameters(graph: Graph) -> dict[str, int]:
    """Map the value of every parameter with a matrix for each expert to the number of experts."""
    sources = {p.value: p.value for p in graph.parameters if len(graph.values[p.value].shape) > 1}
    experts: dict[str, int] = {}
    for node in graph.nodes:
        op = op_name(node)
        if op in _KEEP_FIRST_DIM and node.inputs[0] in sources:
            source = sources[node.inputs[0]]
            if graph.values[node.outputs[0]].shape[0] == graph.values[source].shape[0]:
                sources[node.outputs[0]] = source
        for position in _STACKED.get(op, ()):
            name = node.inputs[position] if position < len(node.inputs) else ""
            if name in sources:
                experts[sources[name]] = graph.values[sources[name]].shape[0]
    return {value: count for value, count in experts.items() if count > 1}


def expert_entries(graph: Graph, meshes: Sequence[Mesh], plan: str) -> Mapping[str, ParameterEntry]:
    """Return entries that divide the experts over the ranks along `ep`, if there are any."""
    ep = max(num_ranks(dict(mesh.axes).get(EXPERTS_AXIS, 1)) for mesh in meshes)
    if ep == 1:
        return {}
    experts = expert_parameters(graph)
    if not experts:
        raise InfeasiblePlan(
            f"{plan}: ep={ep}, but {graph.name} has no stacked parameters of experts",
            hint="ep=1, or one parameter [experts, ...] for all experts",
        )
    names = {p.value: p.name for p in graph.parameters}
    return {names[value]: ParameterEntry(layout={EXPERTS_AXIS: "0"}) for value in experts}
