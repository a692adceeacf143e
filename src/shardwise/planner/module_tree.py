"""The model as a tree of modules, with the layouts, bytes, seconds and source lines of each.

Numbered siblings (`layers.0`, `layers.1`) are one row if they and all modules below them have the
same classes, nodes, parameters and figures. Figures are for one step on one rank; those of a module
in several stages are summed over one rank of each stage.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.arrays import Floats
from shardwise.collectives.messages.program import format_ranks
from shardwise.dtypes import dtype_name
from shardwise.ir.blocks import is_number
from shardwise.planner.step_details import SimulatedStep
from shardwise.plans import Plan
from shardwise.plans.search_result import MODULE_FIGURES as FIGURES
from shardwise.plans.search_result import ModuleTree
from shardwise.sharding.placements import REPLICATED
from shardwise.simulation.workload import LocalParameter

DIGITS = 12
NODE_DIGITS = 7
SAME = 1e-6  # relative tolerance of equal figures
NOTHING = 1e-12


def numbering() -> defaultdict[Any, int]:
    """Return a dict that numbers distinct keys in the order of their first use."""
    numbers = defaultdict[Any, int]()
    numbers.default_factory = numbers.__len__
    return numbers


class PlanModules:
    """Assign positions and parameters to modules, then fold equal modules."""

    def __init__(self, step: SimulatedStep, plan: Plan) -> None:
        self.step, self.plan = step, plan
        self.layouts, self.ops, self.sources = numbering(), numbering(), numbering()
        self.columns = self._columns()
        self.root = Module(step.graph.name, "", step.graph.name)
        self.choices = [self._choices(group) for group in range(len(step.execution.groups))]
        self.nodes: dict[int, tuple[int, int, int]] = {}  # position -> op, layout, source
        # All parameters of the graph, as in `PARAMETER_COLUMNS` but without their modules.
        self.parameters: list[tuple[Any, ...]] = []

    def folded(self) -> ModuleTree:
        """Return the folded tree of the plan's modules."""
        self._place_nodes()
        self._place_parameters()
        self._place_messages()
        rows = Folder(self.nodes, [row[:5] for row in self.parameters]).rows(self.root)
        return ModuleTree(
            rows=self._rows(rows),
            parameters=tuple(
                (number, *self.parameters[at])
                for number, row in enumerate(rows)
                for at in row.module.parameters
            ),
            nodes=self._node_columns(rows),
            layouts=tuple(self.layouts),
            ops=tuple(self.ops),
            sources=tuple(self.sources),
        )

    def _columns(self) -> dict[str, Floats]:
        """Return the seconds of a step and the saved bytes of a micro-batch at every position."""
        columns, count = self.step.columns, self.step.execution.num_microbatches
        return {
            "forward_s": columns["forward"] * count,
            "backward_s": columns["backward"] * count,
            "communication_s": (columns["forward_comm"] + columns["backward_comm"]) * count,
            "activation_bytes": columns["saved"],
        }

    def _choices(self, group: int) -> list[int]:
        """Return the layout of every node of the small graph, on the mesh of a group."""
        names = self.step.execution.groups[group].mesh.names
        shown = [a for a in self.step.workload_of(group).assignments if a.axis in names]
        return [
            self.layouts[", ".join(f"{a.axis}: {a.nodes[node.name].choice}" for a in shown)]
            for node in self.step.fold.graph.nodes
        ]

    # ------------------------------------------------------------ assigning to modules
    def _place_nodes(self) -> None:
        step, small = self.step, self.step.fold.graph.nodes
        placement, stage_of = step.execution.placement, step.stage_of.tolist()
        order = [FIGURES.index(name) for name in self.columns]
        table = np.stack(list(self.columns.values()), axis=1)
        modules: dict[str, Module] = {}
        for at, (place, number) in enumerate(zip(step.fold.places, step.fold.order, strict=True)):
            if number < 0:
                continue
            path = place.rpartition(".")[0]
            if path not in modules:
                modules[path] = self.root.at(path)
            module, node, stage = modules[path], small[number], stage_of[at]
            module.kind = module.kind or node.module_class
            module.nodes.append(at)
            module.stages.add(stage)
            module.own[order] += table[at]
            source = self.sources[node.source, node.source_text] if node.source else -1
            layout = self.choices[placement[stage]][number]
            self.nodes[at] = (self.ops[node.op], layout, source)

    def _place_parameters(self) -> None:
        graph, step = self.step.graph, self.step
        uses, stage_of = step.fold.parameter_uses(graph), step.stage_of.tolist()
        local_parameters = [{p.name: p for p in layers.work.parameters} for layers in step.layers]
        for number, parameter in enumerate(graph.parameters):
            kind = graph.values[parameter.value]
            position, representative = uses.get(parameter.value, (0, ""))
            stage = stage_of[position]
            entry = self.plan.entry(parameter.name)
            stored = local_parameters[stage].get(representative)
            elements = stored.numel if stored is not None else kind.numel
            home, _, name = parameter.name.rpartition(".")
            local = elements * kind.dtype.itemsize / self._sharers(stored, stage, entry.zero)
            shards = {a: text for a, text in entry.layout.items() if text != REPLICATED}
            layout = self.layouts[", ".join(f"{a}: shard {c}" for a, c in shards.items())]
            level, trained = entry.zero or 0, parameter.requires_grad
            row = (name, tuple(kind.shape), dtype_name(kind.dtype), layout, level, trained)
            self.parameters.append((*row, kind.num_bytes, _short(local)))
            module = self.root.at(home)
            module.parameters.append(number)
            module.stages.add(stage)
            # `explain` counts trained parameters, before ZeRO shards them
            for figure, value in (
                ("parameters", elements if trained else 0),
                ("model_parameters", kind.numel),
                ("parameter_bytes", local),
            ):
                module.own[FIGURES.index(figure)] += value

    def _sharers(self, stored: LocalParameter | None, stage: int, zero: int | None) -> int:
        """Return the number of ranks that shard a parameter's memory (zero 3)."""
        if stored is None or zero != 3 or not stored.sync:
            return 1
        group = self.step.execution.groups[self.step.execution.placement[stage]]
        return int(group.along(stored.sync).shape[-1])

    def _place_messages(self) -> None:
        """Add the messages of parameters and gradients to their units, or else to the root."""
        count = self.step.execution.num_microbatches
        sync, forward, backward = map(FIGURES.index, ("sync_s", "forward_s", "backward_s"))
        for stage in self.step.estimate.stages:
            self.root.own[sync] += stage.update_gather + stage.root_gather
            for unit in stage.units:
                module = self.root.at(unit.name)
                module.own[sync] += 2 * unit.gather * count + unit.reduce
                if unit.first == unit.end:  # transfers to host memory and back
                    module.own[forward] += unit.forward * count
                    module.own[backward] += unit.backward * count

    # ------------------------------------------------------------ to data
    def _rows(self, rows: list[Row]) -> dict[str, tuple[Any, ...]]:
        columns: dict[str, tuple[Any, ...]] = {
            "parent": tuple(row.parent for row in rows),
            "name": tuple(row.name for row in rows),
            "path": tuple(row.module.path for row in rows),
            "kind": tuple(row.module.kind for row in rows),
            "count": tuple(row.count for row in rows),
            "stages": tuple(tuple(sorted(row.stages)) for row in rows),
            "layout": tuple(self._layout(row) for row in rows),
        }
        for at, figure in enumerate(FIGURES):
            columns[figure] = tuple(_short(float(row.figures[at])) for row in rows)
        return columns

    def _layout(self, row: Row) -> int:
        """Return the layout of the node that takes longest; -1 for a module without nodes."""
        spent = self.columns["forward_s"] + self.columns["backward_s"]
        at = max(row.module.nodes, key=lambda node: spent[node], default=None)
        return -1 if at is None else self.nodes[at][1]

    def _node_columns(self, rows: list[Row]) -> dict[str, tuple[Any, ...]]:
        pairs = [(number, at) for number, row in enumerate(rows) for at in row.module.nodes]
        places = self.step.fold.places
        columns: dict[str, tuple[Any, ...]] = {
            "module": tuple(number for number, _ in pairs),
            "name": tuple(places[at].rpartition(".")[2] for _, at in pairs),
        }
        for index, column in enumerate(("op", "layout", "source")):
            columns[column] = tuple(self.nodes[at][index] for _, at in pairs)
        for column, values in self.columns.items():
            shown = values[[at for _, at in pairs]].tolist() if pairs else []
            columns[column] = tuple(_short(value, NODE_DIGITS) for value in shown)
        return columns


def _short(value: float, digits: int = DIGITS) -> float | int:
    """Return the number rounded to `digits` significant digits, as an integer if it is one."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


@dataclass(slots=True)
class Module:
    """A module with the nodes and parameters that are directly in it."""

    name: str
    path: str
    kind: str = ""
    own: Floats = field(default_factory=lambda: np.zeros(len(FIGURES)))
    nodes: list[int] = field(default_factory=list)  # positions
    parameters: list[int] = field(default_factory=list)
    stages: set[int] = field(default_factory=set)
    children: dict[str, Module] = field(default_factory=dict)

    def at(self, path: str) -> Module:
        """Return the module of a dotted path, creating missing ones."""
        module = self
        for name in path.split(".") if path else ():
            child = f"{module.path}.{name}" if module.path else name
            module = module.children.setdefault(name, Module(name, child))
        return module


@dataclass(slots=True)
class Row:
    """A row of the folded tree, for equal modules with these names."""

    module: Module
    kind: int  # modules with the same number are equal in everything but figures
    figures: Floats  # of one module, with all below it
    stages: set[int]  # of all these modules
    names: list[str]
    children: list[Row]
    parent: int = -1  # the number of its row

    @property
    def name(self) -> str:
        names = self.names
        return format_ranks(tuple(map(int, names))) if len(names) > 1 else names[0]

    @property
    def count(self) -> int:
        return len(self.names)


class Folder:
    """Fold one tree; nodes and parameters with equal keys are equal."""

    def __init__(self, nodes: Mapping[int, object], parameters: Sequence[object]) -> None:
        self.nodes, self.parameters = nodes, parameters
        self.kinds = numbering()

    def rows(self, root: Module) -> list[Row]:
        """Return the folded tree in preorder."""
        return list(_numbered(self._fold(root), itertools.count(), -1))

    def _fold(self, module: Module) -> Row:
        children: list[Row] = []
        by_kind: dict[int, list[Row]] = {}
        for child in map(self._fold, module.children.values()):
            similar = by_kind.setdefault(child.kind, []) if is_number(child.module.name) else []
            first = next((other for other in similar if _same(other, child)), None)
            if first is None:
                children.append(child)
                similar.append(child)
            else:
                first.names += child.names
                _merge_stages(first, child)
        signature = (
            module.kind,
            tuple(self.nodes[at] for at in module.nodes),
            tuple(self.parameters[at] for at in module.parameters),
            tuple((tuple(c.names), c.kind) for c in children),
        )
        return Row(
            module=module,
            kind=self.kinds[signature],
            figures=module.own + sum(c.figures * len(c.names) for c in children),
            stages=module.stages.union(*(c.stages for c in children)),
            names=[module.name],
            children=children,
        )


def _same(one: Row, other: Row) -> bool:
    return np.allclose(one.figures, other.figures, rtol=SAME, atol=NOTHING) and all(
        map(_same, one.children, other.children)
    )


def _merge_stages(one: Row, other: Row) -> None:
    one.stages |= other.stages
    for child, other_child in zip(one.children, other.children, strict=True):
        _merge_stages(child, other_child)


def _numbered(row: Row, numbers: Iterator[int], parent: int) -> Iterator[Row]:
    """Yield a row and all below it, in preorder."""
    number, row.parent = next(numbers), parent
    yield row
    for child in row.children:
        yield from _numbered(child, numbers, number)
