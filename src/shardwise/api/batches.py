"""Adapt a plan to batches other than the first one, and check the indices in a batch.

Parameters are stored once, for the first batch. Later batches may lack inputs, have new ones, or
have a single row.
"""

import contextlib
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise import runtime as rt
from shardwise.api.compile import PipelineProgram, Program, batch_dim, compile
from shardwise.errors import BatchError, InfeasiblePlan, PlanError
from shardwise.ir import Graph, node_keys
from shardwise.ir.operators import index_ranges, interpret, is_random, op_name
from shardwise.plans import Plan
from shardwise.plans.plan import known_choices
from shardwise.program.microbatches import restrict

MAX_SEARCHED = 2  # sizes whose layouts are searched, of graphs that differ in sizes alone
MAX_CHAIN = 12  # operators between the batch and an index; longer chains cost more than they save


def plan_for_graph(graph: Graph, plan: Plan) -> Plan:
    """Return the plan without entries for inputs and nodes that this batch does not have."""
    names = [source.name for source in graph.inputs]
    inputs = {g: d for g, d in plan.inputs.items() if any(fnmatchcase(n, g) for n in names)}
    fitting = plan.with_(inputs=inputs, nodes=known_choices(plan.nodes, graph))
    if plan.splits_time and isinstance(plan.schedule, str) and _is_tiny(graph, fitting):
        return fitting.with_(num_microbatches=1)
    return fitting


def _is_tiny(graph: Graph, plan: Plan) -> bool:
    """Return whether the batch has a single row or no elements, and is one micro-batch."""
    for source in graph.inputs:
        shape = graph.values[source.value].shape
        dim = batch_dim(source.name, plan, shape)
        if dim is not None and (shape[dim] < 2 or 0 in shape):
            return True
    return False


def plan_for_first(graph: Graph, plan: Plan, model: nn.Module) -> Plan:
    """Return the plan for the first batch, which may lack inputs that the plan was made for.

    An entry is dropped if it names an argument of the model's forward, or a node that some module
    of the model may have; a misspelt name stays, so that `Plan.check` reports it.
    """
    fitting = plan_for_graph(graph, plan)
    arguments = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in arguments}
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in arguments)
    inputs = {
        glob: dim
        for glob, dim in plan.inputs.items()
        if glob in fitting.inputs or not (any_name or glob.partition(".")[0] in names)
    }
    modules = [path for path, _ in model.named_modules()]

    def may_exist(key: str) -> bool:  # in some batch: `blocks.*.linear_0`
        path, _, name = key.rpartition(".")
        operator = re.fullmatch(r"(\w+?)(?:_(?:\d+|\*))?", name)
        if operator is None or not hasattr(torch.ops.aten, operator[1]):
            return False
        return any(fnmatchcase(module, path) for module in modules)

    keys = set(node_keys(graph).values()) if plan.stages else set()
    for index, stage in enumerate(plan.stages[1:], start=1):
        if stage.first not in keys and may_exist(stage.first):
            raise PlanError(
                f"this batch does not run {stage.first!r}, where a stage begins",
                where=f"stages[{index}]",
                hint="call sw.parallelize with a batch that has every optional input, or begin the "
                "stage at a node that runs for every batch",
            )
    nodes = {k: c for k, c in plan.nodes.items() if k in fitting.nodes or not may_exist(k)}
    return fitting.with_(inputs=inputs, nodes=nodes)


class StagePlacement:
    """Place the stages of a pipeline in the graphs of later batches.

    A batch without an optional input lacks a branch, which changes the keys of later nodes. A stage
    begins where the plan says, if every parameter then stays on its stage of the first batch, and
    otherwise right before the first of its own parameters.
    """

    def __init__(self, program: Program | PipelineProgram) -> None:
        self._origins: dict[str, str] = {}  # by key of a node in the first batch
        users: defaultdict[str, set[int]] = defaultdict(set)  # stages by parameter
        if isinstance(program, PipelineProgram):
            graph = program.lowered.graph
            keys = node_keys(graph)
            self._origins = {keys[node.name]: node.origin for node in graph.nodes}
            for stage in program.lowered.stages:
                part = stage.program.graph
                used = {name for node in part.nodes for name in node.inputs}
                for parameter in part.parameters:
                    if parameter.value in used:
                        users[parameter.name].add(stage.index)
        self._stages = {name: min(stages) for name, stages in users.items() if len(stages) == 1}

    def apply(self, graph: Graph, plan: Plan) -> Plan:
        """Return the plan with the first node of every stage in this graph."""
        if len(plan.stages) < 2:
            return plan
        parameters = {p.value: p.name for p in graph.parameters if p.name in self._stages}
        uses = [  # the position of a node, and the stage of a parameter that it uses
            (position, self._stages[parameters[name]])
            for position, node in enumerate(graph.nodes)
            for name in node.inputs
            if name in parameters
        ]
        keys = list(node_keys(graph).values())
        latest = [len(keys)] * (len(plan.stages) + 1)
        for index in reversed(range(1, len(plan.stages))):
            first_use = min((p for p, stage in uses if stage >= index), default=len(keys))
            latest[index] = min(first_use, latest[index + 1] - 1)
        stages, begin = [plan.stages[0]], 0
        for index, stage in enumerate(plan.stages[1:], start=1):
            earliest = max([begin, *(p for p, used_stage in uses if used_stage < index)]) + 1
            if earliest > latest[index]:
                raise BatchError(
                    f"this batch leaves pipeline stage {index} nothing to compute: the stage "
                    f"begins at {stage.first!r}",
                    where=self._origins.get(stage.first, f"stages[{index}]"),
                    hint="begin the stage at a node that runs for every batch (`stages` of the "
                    "plan), or use fewer stages",
                )
            planned = keys.index(stage.first) if stage.first in keys else -1
            begin = planned if earliest <= planned <= latest[index] else latest[index]
            stages.append(replace(stage, first=keys[begin]))
        return plan.with_(stages=tuple(stages))


class LayoutsBySize:
    """Compile graphs that differ only in sizes, from the third on with the layouts of the first.

    Most of the time of compiling for another length goes into the search for layouts. The layouts
    of one length are valid for every other, and as fast for similar ones. The first two are
    searched separately, so that their programs do not depend on which came first: data of one size
    with a smaller last batch resume bit by bit.
    """

    def __init__(self) -> None:
        self._choices: dict[Hashable, Mapping[str, Mapping[str, str]]] = {}
        self._searched: defaultdict[Hashable, set[tuple[int, ...]]] = defaultdict(set)

    def compile(self, graph: Graph, plan: Plan) -> Program | PipelineProgram:
        """Compile the graph, with the layouts of an earlier graph that differs only in sizes."""
        sizes = tuple(size for i in graph.inputs for size in graph.values[i.value].shape)
        if plan.is_scheduled or min(sizes, default=0) < 2:  # a size of 1 may leave nothing to shard
            return compile(graph, plan)
        nodes = tuple((node.name, node.op) for node in graph.nodes)
        key = (nodes, tuple(plan.inputs.items()), repr(plan.parameters), plan.fingerprint)
        if sizes not in self._searched[key] and len(self._searched[key]) >= MAX_SEARCHED:
            with contextlib.suppress(PlanError, InfeasiblePlan):
                return compile(graph, plan.with_(nodes={**self._choices[key], **plan.nodes}))
        program = compile(graph, plan)
        if isinstance(program, Program):
            self._choices.setdefault(key, program.choices)
            self._searched[key].add(sizes)
        return program


# ------------------------------------------------------------ token ids, labels, other indices
# Every rank checks the full batch and finds the same mistake, so that all raise together and none
# is left waiting in a collective; the operators of a rank would see only its rows. Indices that are
# not computed from integers of the batch alone are checked by the operators that use them.


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexUse:
    """A value that is used as an index: its valid range, the operator, and its sources."""

    value: str
    low: int
    size: int
    ignored: int | None
    operator: str
    origin: str
    sources: tuple[str, ...]  # inputs of the batch

    def check(self, indices: Tensor) -> None:
        """Raise a `BatchError` if an index is out of range."""
        names = " and ".join(self.sources)
        try:
            rt.require_in_range(
                indices,
                self.size,
                f"{self.operator} of {names}",
                low=self.low,
                ignored=self.ignored,
            )
        except BatchError as error:
            raise BatchError(
                error.message, where=f"{names}, used in {self.origin}", hint=error.hint
            ) from None


def index_check(graph: Graph) -> Callable[[Mapping[str, Tensor]], None]:
    """Return a check of full batches, which raises if an index that the graph uses is wrong."""
    uses: dict[tuple[str, int, int, int | None], IndexUse] = {}
    for use in _uses(graph):
        uses.setdefault((use.value, use.low, use.size, use.ignored), use)
    part = restrict(graph, tuple({use.value: None for use in uses.values()}))

    def check(inputs: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            values = interpret(part, {}, {}, inputs) if uses else {}
            for use in uses.values():
                use.check(values[use.value])

    return check


def _uses(graph: Graph) -> Iterator[IndexUse]:
    """Yield the uses of indices that are computed from the batch alone, in a few operators."""
    producers = graph.producers
    inputs = {i.value: i.name for i in graph.inputs}
    constants = {c.value for c in graph.constants}
    for node in graph.nodes:
        for value, low, size, ignored in index_ranges(graph, node):
            sources: list[str] = []
            pending, nodes = [value], 0
            while pending and nodes <= MAX_CHAIN:
                name = pending.pop()
                producer = producers.get(name)
                if graph.values[name].dtype.is_floating_point:
                    break
                if name in inputs:
                    sources.append(inputs[name])
                elif producer is not None and not is_random(producer):
                    nodes += 1
                    pending += producer.inputs
                elif name not in constants:
                    break
            else:
                if sources and nodes <= MAX_CHAIN:
                    yield IndexUse(
                        value=value,
                        low=low,
                        size=size,
                        ignored=ignored,
                        operator=op_name(node),
                        origin=node.origin,
                        sources=tuple(sorted(set(sources))),
                    )
