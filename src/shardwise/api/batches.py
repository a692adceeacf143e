"""Programs for other batches than the first one, over the same stored parameters.

Parameters are stored once, for the first batch; later batches may lack inputs, have new ones, or
have a single row. Indices in a batch are checked before a step begins.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from shardwise import runtime as rt
from shardwise.api.compile import PipelineProgram, Program, compile
from shardwise.errors import BatchError, InfeasiblePlan, PlanError
from shardwise.ir import Graph, Node, Ref, node_keys
from shardwise.ir.interpret import interpret, is_random
from shardwise.ir.schema import bind, indexed_dim, op_name
from shardwise.plans import Plan
from shardwise.plans.plan import ParameterEntry, known_choices
from shardwise.program.microbatches import restrict
from shardwise.program.program import Storage
from shardwise.sharding.placements import Shard, format_placement

MAX_SEARCHED = 2  # sizes whose layouts are searched, of graphs that differ in sizes alone
MAX_CHAIN = 12  # operators between the batch and an index; longer chains cost more than they save
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")


def plan_for_graph(graph: Graph, plan: Plan) -> Plan:
    """Return the plan without entries for inputs and nodes that this batch does not have."""
    names = [source.name for source in graph.inputs]
    inputs = {g: d for g, d in plan.inputs.items() if any(fnmatchcase(n, g) for n in names)}
    fitting = plan.with_(inputs=inputs, nodes=known_choices(plan.nodes, graph))
    if plan.splits_time and isinstance(plan.schedule, str) and _is_tiny(graph, fitting):
        return fitting.with_(num_microbatches=1)
    return fitting


class StagePlacement:
    """Where pipeline stages begin in the graphs of later batches.

    An optional branch comes and goes, and the keys of later nodes with it. A stage begins where the
    plan says if all parameters of the first batch stay on their stages there, and otherwise right
    before the first of its own parameters.
    """

    def __init__(self, program: Program | PipelineProgram) -> None:
        self._origins: dict[str, str] = {}
        homes: defaultdict[str, set[int]] = defaultdict(set)
        if isinstance(program, PipelineProgram):
            graph = program.lowered.graph
            keys = node_keys(graph)
            self._origins = {keys[node.name]: node.origin for node in graph.nodes}
            for stage in program.lowered.stages:
                nodes = stage.program.graph.nodes
                used = {name for node in nodes for name in node.inputs}
                for parameter in stage.program.graph.parameters:
                    if parameter.value in used:
                        homes[parameter.name].add(stage.index)
        self._homes = {name: min(stages) for name, stages in homes.items() if len(stages) == 1}

    def apply(self, graph: Graph, plan: Plan) -> Plan:
        """Return the plan with the first node of every stage in this graph."""
        if len(plan.stages) < 2:
            return plan
        values = {p.value: p.name for p in graph.parameters}
        keys, uses = list(node_keys(graph).values()), []
        for at, node in enumerate(graph.nodes):
            names = {values[name] for name in node.inputs if name in values}
            uses += [(at, self._homes[name]) for name in names if name in self._homes]
        latest = [len(keys)] * (len(plan.stages) + 1)
        for index in reversed(range(1, len(plan.stages))):
            own = min((at for at, stage in uses if stage >= index), default=len(keys))
            latest[index] = min(own, latest[index + 1] - 1)
        stages, before = [plan.stages[0]], 0
        for index, stage in enumerate(plan.stages[1:], start=1):
            earliest = max([before, *(at for at, home in uses if home < index)]) + 1
            if earliest > latest[index]:
                raise BatchError(
                    f"this batch leaves pipeline stage {index} nothing to compute: the stage "
                    f"begins at {stage.first!r}",
                    where=self._origins.get(stage.first, f"stages[{index}]"),
                    hint="begin the stage at a node that runs for every batch (`stages` of the "
                    "plan), or use fewer stages",
                )
            at = keys.index(stage.first) if stage.first in keys else -1
            before = at if earliest <= at <= latest[index] else latest[index]
            stages.append(replace(stage, first=keys[before]))
        return plan.with_(stages=tuple(stages))


class LayoutsBySize:
    """Compiles graphs that differ in sizes alone, from the third on with the layouts of the first.

    Searching for layouts takes most of the time of a program for another length. The layouts of one
    length are valid for every other, and as fast for similar ones. The first two are searched for
    separately, so that their programs do not depend on which came first: data of one size with a
    smaller last batch resume bit by bit.
    """

    def __init__(self) -> None:
        self._choices: dict[Hashable, Mapping[str, Mapping[str, str]]] = {}
        self._searched: defaultdict[Hashable, set[tuple[int, ...]]] = defaultdict(set)

    def compile(self, graph: Graph, plan: Plan) -> Program | PipelineProgram:
        """Compile the graph, with the layouts of an earlier graph that differs in sizes alone."""
        sizes = tuple(size for i in graph.inputs for size in graph.values[i.value].shape)
        if plan.is_scheduled or min(sizes, default=0) < 2:  # a size of 1 may leave nothing to shard
            return compile(graph, plan)
        same_key = (tuple((node.name, node.op) for node in graph.nodes), _decisions(plan))
        if sizes not in self._searched[same_key] and len(self._searched[same_key]) >= MAX_SEARCHED:
            with contextlib.suppress(PlanError, InfeasiblePlan):
                return compile(graph, plan.with_(nodes={**self._choices[same_key], **plan.nodes}))
        program = compile(graph, plan)
        if isinstance(program, Program):
            self._choices.setdefault(same_key, program.choices)
            self._searched[same_key].add(sizes)
        return program


def _decisions(plan: Plan) -> Hashable:
    return tuple(plan.inputs.items()), repr(plan.parameters), plan.fingerprint


def _is_tiny(graph: Graph, plan: Plan) -> bool:
    """Return whether the batch has a single row or no elements, and is one micro-batch."""
    for source in graph.inputs:
        shape = graph.values[source.value].shape
        dims = [d for g, d in plan.inputs.items() if d is not None and fnmatchcase(source.name, g)]
        if dims and len(shape) > dims[-1] and (shape[dims[-1]] < 2 or 0 in shape):
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
    keys = set(node_keys(graph).values()) if plan.stages else set()
    for index, stage in enumerate(plan.stages[1:], start=1):
        if stage.first not in keys and _may_exist(stage.first, modules):
            raise PlanError(
                f"this batch does not run {stage.first!r}, where a stage begins",
                where=f"stages[{index}]",
                hint="call sw.parallelize with a batch that has every optional input, or begin the "
                "stage at a node that runs for every batch",
            )
    nodes = {
        key: choice
        for key, choice in plan.nodes.items()
        if key in fitting.nodes or not _may_exist(key, modules)
    }
    return fitting.with_(inputs=inputs, nodes=nodes)


def _may_exist(key: str, modules: Iterable[str]) -> bool:
    """Return whether some batch may give a module such a node, as in `blocks.*.linear_0`."""
    path, _, name = key.rpartition(".")
    operator = re.fullmatch(r"(\w+?)(?:_(?:\d+|\*))?", name)
    if operator is None or not hasattr(torch.ops.aten, operator[1]):
        return False
    return any(fnmatchcase(module, path) for module in modules)


def plan_for_others(
    plan: Plan, programs: Mapping[str, Program | PipelineProgram], homes: Mapping[str, str]
) -> Plan:
    """Return the plan with the layout of every parameter fixed to that of its first program.

    `homes` names for every parameter the step whose program decides how it is stored.
    """
    entries = {
        name: ParameterEntry(layout=layout)
        for step, program in programs.items()
        for name, layout in _layouts(program, plan).items()
        if homes[name] == step
    }
    return plan.with_(parameters={**plan.parameters, **entries})


def is_stored_as(program: Program | PipelineProgram, fixed: Plan) -> bool:
    """Return whether a program uses every parameter in the layout that `plan_for_others` fixed."""
    layouts = _layouts(program, fixed).items()
    return all(fixed.parameters[name].layout == layout for name, layout in layouts)


def _layouts(program: Program | PipelineProgram, plan: Plan) -> dict[str, dict[str, str]]:
    """Return the layout in which a program uses each parameter, in the notation of plans."""
    layouts: dict[str, dict[str, str]] = {}
    for storage in sorted(_storages(program), key=lambda s: s.borrowed):
        layout = {
            axis: format_placement(placement)
            for axis, placement in storage.layout.axes
            if plan.roles.get(axis) == "parameters" or isinstance(placement, Shard)
        }
        layouts[storage.name] = {**layout, **layouts.get(storage.name, {})}
    return layouts


def _storages(program: Program | PipelineProgram) -> Iterator[Storage]:
    if isinstance(program, Program):
        yield from program.lowered.rank_programs[0].parameters
        return
    for stage in program.lowered.stages:
        yield from stage.program.rank_programs[0].parameters


def stored_specs(
    specs: Sequence[rt.ParameterSpec], plan: Plan, axes: Mapping[str, int]
) -> list[rt.ParameterSpec]:
    """Return how parameters are stored for all programs, given the specs of the first.

    A parameter that the first batch does not use, or uses equally on every rank (one row), is still
    partitioned over the batch axes if the plan says so.
    """
    batch = tuple(a for a, size in axes.items() if size > 1 and plan.roles.get(a) == "batch")
    stored = []
    for spec in specs:
        zero = plan.entry(spec.name).zero or 0
        if zero and spec.requires_grad and not spec.sync and not spec.borrowed:
            sharded = {split.axis for split in spec.splits}
            sync = tuple(axis for axis in batch if axis not in sharded)
            spec = replace(spec, sync=sync, zero=zero if sync else 0)
        stored.append(spec)
    return stored


def same_storage(
    store: rt.ParameterStore, specs: Sequence[rt.ParameterSpec], used: Collection[str]
) -> None:
    """Raise unless a program uses parameters in the layout in which they are stored."""
    stored = {e.spec.name: e.spec for e in store.entries}
    for spec in specs:
        known = stored.get(spec.name)
        if known is None and spec.name in used:
            raise BatchError(
                f"this batch uses {spec.name} on a pipeline stage that does not store it: "
                "the first batch did not use it there",
                where=spec.name,
                hint="call sw.parallelize with a batch that has every optional input",
            )
        if known is not None and (known.splits, known.shape) != (spec.splits, spec.shape):
            raise BatchError(
                f"this batch needs {spec.name} of shape {spec.shape} sharded as {spec.splits}; it "
                f"is stored with shape {known.shape}, sharded as {known.splits}",
                where=spec.name,
                hint=f"fix its layout in the plan: parameters[{spec.name!r}]",
            )


# ------------------------------------------------------------ token ids, labels, other indices

# Every rank has the full batch and finds the same mistake, so that all raise together and none is
# left waiting in a collective; the operators of a rank would only see its rows. Indices that are
# not computed from integers of the batch alone are checked by the operators that use them.


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexUse:
    """A value that is used as an index: its valid range, its user and its sources."""

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


class BatchIndices:
    """Checks the integers of full batches that a graph uses as indices."""

    def __init__(self, graph: Graph) -> None:
        uses: dict[tuple[str, int, int, int | None], IndexUse] = {}
        for use in _uses(graph):
            uses.setdefault((use.value, use.low, use.size, use.ignored), use)
        self.uses = tuple(uses.values())
        self.part = restrict(graph, tuple({use.value: None for use in self.uses}))

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise a `BatchError` if an index in the batch's tensors is out of range."""
        if not self.uses:
            return
        with torch.no_grad():
            values = interpret(self.part, {}, {}, inputs)
            for use in self.uses:
                use.check(values[use.value])


def _uses(graph: Graph) -> Iterator[IndexUse]:
    """Yield the uses of indices that are computed from the batch alone, in a few operators."""
    producers = graph.producers
    inputs = {i.value: i.name for i in graph.inputs}
    constants = {c.value for c in graph.constants}
    for node in graph.nodes:
        for value, low, size, ignored in _indices(graph, node):
            sources: list[str] = []
            pending, nodes = [value], 0
            while pending and nodes <= MAX_CHAIN:
                name = pending.pop()
                maker = producers.get(name)
                if graph.values[name].dtype.is_floating_point:
                    break
                if name in inputs:
                    sources.append(inputs[name])
                elif maker is not None and not is_random(maker):
                    nodes += 1
                    pending += maker.inputs
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


def _indices(graph: Graph, node: Node) -> Iterator[tuple[str, int, int, int | None]]:
    """Yield the values that a node uses as indices: name, minimum, table size, ignored index."""
    for name in dict.fromkeys(node.inputs):
        if graph.values[name].dtype in (torch.bool, torch.uint8):
            continue
        table = indexed_dim(node, name)
        if table is not None:
            shape = graph.values[table[0]].shape
            if shape:
                size = shape[table[1]]
                yield name, -size if op_name(node) == "index" else 0, size, None
    given = bind(node) if op_name(node) in (*_LOSSES, "one_hot") else {}
    if op_name(node) == "one_hot" and given.get("num_classes", -1) > 0:
        yield given["self"].name, 0, given["num_classes"], None
    elif op_name(node) in _LOSSES and isinstance(given["target"], Ref):
        target = given["target"].name
        if not graph.values[target].dtype.is_floating_point:
            scores = graph.values[given["self"].name].shape
            size = scores[1 if len(scores) > 1 else 0]
            yield target, 0, size, given.get("ignore_index", -100)
