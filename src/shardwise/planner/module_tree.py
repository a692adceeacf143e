"""The model as a tree of modules: layouts, bytes and seconds of each, and their source lines.

Numbered modules side by side (`layers.0`, `layers.1`) are one row if they and all modules below
have the same classes, nodes, parameters and figures. Figures are those of one rank for a step;
where a module is in several stages, the sum over a rank of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.dtypes import dtype_name
from shardwise.ir.blocks import is_number
from shardwise.messages.program import format_ranks
from shardwise.planner.step_details import SimulatedStep
from shardwise.plans import Plan
from shardwise.plans.search_result import MODULE_FIGURES as FIGURES
from shardwise.plans.search_result import ModuleTree
from shardwise.simulation.workload import Floats, LocalParameter

DIGITS = 12
NODE_DIGITS = 7
SAME = 1e-6  # relative difference up to which figures are equal
NOTHING = 1e-12


class Texts:
    """Texts by number."""

    def __init__(self) -> None:
        self.number: dict[Any, int] = {}

    def __call__(self, text: Any) -> int:
        return self.number.setdefault(text, len(self.number))


def module_tree(step: SimulatedStep, plan: Plan) -> ModuleTree:
    """Return the folded tree of the plan's modules."""
    return _Tree(step, plan).folded()


class _Tree:
    """Positions and parameters placed in modules, then folded."""

    def __init__(self, step: SimulatedStep, plan: Plan) -> None:
        self.step, self.plan = step, plan
        self.layouts, self.ops, self.sources = Texts(), Texts(), Texts()
        self.columns = self._columns()
        self.root = Module(step.graph.name, "", step.graph.name)
        self.choices = [self._choices(group) for group in range(len(step.setting.groups))]
        self.nodes: dict[int, tuple[int, int, int]] = {}  # position -> op, layout, source
        self.parameters: dict[int, dict[str, Any]] = {}

    def folded(self) -> ModuleTree:
        self._place_nodes()
        self._place_parameters()
        self._place_messages()
        kinds = {
            at: tuple(str(p[k]) for k in ("name", "shape", "dtype", "layout", "zero"))
            for at, p in self.parameters.items()
        }
        rows = Folder(self.nodes, kinds).rows(self.root)
        return ModuleTree(
            rows=self._rows(rows),
            parameters=self._parameter_rows(rows),
            nodes=self._node_columns(rows),
            layouts=tuple(self.layouts.number),
            ops=tuple(self.ops.number),
            sources=tuple(self.sources.number),
        )

    def _columns(self) -> dict[str, Floats]:
        """Seconds of a step and kept bytes of a micro-batch, at every position."""
        found, times = self.step.columns, self.step.setting.num_microbatches
        return {
            "forward_s": found["forward"] * times,
            "backward_s": found["backward"] * times,
            "communication_s": (found["forward_talk"] + found["backward_talk"]) * times,
            "activation_bytes": found["saved"],
        }

    def _choices(self, group: int) -> list[int]:
        """The layout of every node of the small graph, on the mesh of a group."""
        works, names = self.step.works_of(group), self.step.setting.groups[group].mesh.names
        shown = [a for a in works.assignments if a.axis in names]
        return [
            self.layouts(", ".join(f"{a.axis}: {a.nodes[node.name].choice}" for a in shown))
            for node in self.step.fold.graph.nodes
        ]

    # ------------------------------------------------------------ what is where

    def _place_nodes(self) -> None:
        step, small = self.step, self.step.fold.graph.nodes
        placement, stage_of = step.setting.placement, step.stage_of.tolist()
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
            source = self.sources((node.source, node.source_text)) if node.source else -1
            layout = self.choices[placement[stage]][number]
            self.nodes[at] = (self.ops(node.op), layout, source)

    def _place_parameters(self) -> None:
        graph, step = self.step.graph, self.step
        uses = self._uses()
        held = [{p.name: p for p in layers.work.parameters} for layers in step.layers]
        for number, parameter in enumerate(graph.parameters):
            kind = graph.values[parameter.value]
            stage, small = uses.get(parameter.value, (0, ""))
            entry = self.plan.entry(parameter.name)
            mine = held[stage].get(small)
            elements = mine.numel if mine is not None else kind.numel
            home, _, name = parameter.name.rpartition(".")
            local = elements * kind.dtype.itemsize / self._sharers(mine, stage, entry.zero)
            cuts = {a: cut for a, cut in entry.layout.items() if cut != "whole"}
            self.parameters[number] = {
                "name": name,
                "shape": tuple(kind.shape),
                "dtype": dtype_name(kind.dtype),
                "layout": self.layouts(", ".join(f"{a}: cut {c}" for a, c in cuts.items())),
                "zero": entry.zero or 0,
                "trained": parameter.requires_grad,
                "bytes": kind.num_bytes,
                "local_bytes": _short(local),
            }
            module = self.root.at(home)
            module.parameters.append(number)
            module.stages.add(stage)
            # as `explain` counts them: those that are trained, before ZeRO shares them out
            trained = elements if parameter.requires_grad else 0
            for figure, value in (
                ("parameters", trained),
                ("model_parameters", kind.numel),
                ("parameter_bytes", local),
            ):
                module.own[FIGURES.index(figure)] += value

    def _uses(self) -> dict[str, tuple[int, str]]:
        """Of every parameter's value: the stage that first uses it, and what stands for it."""
        graph, fold = self.step.graph, self.step.fold
        names = {p.value: p.name for p in fold.graph.parameters}
        wanted = {p.value for p in graph.parameters}
        stage_of = self.step.stage_of.tolist()
        inputs = [node.inputs for node in fold.graph.nodes]
        found: dict[str, tuple[int, str]] = {}
        for at, (node, number) in enumerate(zip(graph.nodes, fold.order, strict=True)):
            if number < 0 or not any(name in names for name in inputs[number]):
                continue
            for value, other in zip(node.inputs, inputs[number], strict=True):
                if value in wanted and other in names:
                    found.setdefault(value, (stage_of[at], names[other]))
        return found

    def _sharers(self, held: LocalParameter | None, stage: int, zero: int | None) -> int:
        """The ranks that share a parameter's memory: with zero 3, those that sum its gradient."""
        if held is None or zero != 3 or not held.sync:
            return 1
        group = self.step.setting.groups[self.step.setting.placement[stage]]
        return int(group.along(held.sync).shape[-1])

    def _place_messages(self) -> None:
        """Messages of parameters and gradients, by unit; what is of no module is the root's."""
        times = self.step.setting.num_microbatches
        sync, forward, backward = map(FIGURES.index, ("sync_s", "forward_s", "backward_s"))
        for stage in self.step.estimate.stages:
            self.root.own[sync] += stage.update_gather + stage.root_gather
            for unit in stage.units:
                module = self.root.at(unit.name)
                module.own[sync] += 2 * unit.gather * times + unit.reduce
                if unit.first == unit.end:  # what goes to host memory and back
                    module.own[forward] += unit.forward * times
                    module.own[backward] += unit.backward * times

    # ------------------------------------------------------------ to data

    def _rows(self, rows: list[Row]) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {
            "parent": tuple(-1 if row.parent is None else row.parent for row in rows),
            "name": tuple(row.name for row in rows),
            "path": tuple(row.module.path for row in rows),
            "kind": tuple(row.module.kind for row in rows),
            "count": tuple(row.count for row in rows),
            "stages": tuple(tuple(sorted(row.stages)) for row in rows),
            "layout": tuple(self._layout(row) for row in rows),
        }
        for at, figure in enumerate(FIGURES):
            found[figure] = tuple(_short(float(row.figures[at])) for row in rows)
        return found

    def _layout(self, row: Row) -> int:
        """Of the node that takes longest; -1 for a module without nodes of its own."""
        spent = self.columns["forward_s"] + self.columns["backward_s"]
        at = max(row.module.nodes, key=lambda node: spent[node], default=None)
        return -1 if at is None else self.nodes[at][1]

    def _parameter_rows(self, rows: list[Row]) -> tuple[tuple[Any, ...], ...]:
        return tuple(
            (number, *self.parameters[at].values())
            for number, row in enumerate(rows)
            for at in row.module.parameters
        )

    def _node_columns(self, rows: list[Row]) -> dict[str, tuple[Any, ...]]:
        pairs = [(number, at) for number, row in enumerate(rows) for at in row.module.nodes]
        places = self.step.fold.places
        found: dict[str, tuple[Any, ...]] = {
            "module": tuple(number for number, _ in pairs),
            "name": tuple(places[at].rpartition(".")[2] for _, at in pairs),
        }
        for index, column in enumerate(("op", "layout", "source")):
            found[column] = tuple(self.nodes[at][index] for _, at in pairs)
        for column, values in self.columns.items():
            shown = values[[at for _, at in pairs]].tolist() if pairs else []
            found[column] = tuple(_short(value, NODE_DIGITS) for value in shown)
        return found


def _short(value: float, digits: int = DIGITS) -> float | int:
    """Fewer digits, and whole numbers without a point."""
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() else found


@dataclass(slots=True)
class Module:
    """A module, with what is its own; children are added by `at`."""

    name: str
    path: str
    kind: str = ""
    own: Floats = field(default_factory=lambda: np.zeros(len(FIGURES)))
    nodes: list[int] = field(default_factory=list)  # positions
    parameters: list[int] = field(default_factory=list)
    stages: set[int] = field(default_factory=set)
    children: dict[str, Module] = field(default_factory=dict)

    def at(self, path: str) -> Module:
        """The module of a dotted path, made where there is none."""
        here = self
        for name in path.split(".") if path else ():
            below = f"{here.path}.{name}" if here.path else name
            here = here.children.setdefault(name, Module(name, below))
        return here


@dataclass(slots=True)
class Row:
    """A module of the folded tree."""

    module: Module
    parent: int | None
    name: str
    count: int
    figures: Floats  # of one, with all below it
    stages: set[int]  # of all that it stands for


@dataclass(slots=True)
class _Folded:
    module: Module
    kind: int  # equal numbers: equal in everything but figures
    figures: Floats
    stages: set[int]
    names: list[str]
    children: list[_Folded]


class Folder:
    """Folds one tree; `kinds` says of nodes and parameters which are equal."""

    def __init__(self, nodes: Mapping[int, object], parameters: Mapping[int, object]) -> None:
        self.nodes, self.parameters = nodes, parameters
        self.known: dict[object, int] = {}

    def rows(self, root: Module) -> list[Row]:
        """The folded tree in preorder, the root first."""
        return list(_preorder(self._fold(root), None, []))

    def _fold(self, module: Module) -> _Folded:
        children: list[_Folded] = []
        alike: dict[int, list[_Folded]] = {}
        for child in map(self._fold, module.children.values()):
            known = alike.setdefault(child.kind, []) if is_number(child.module.name) else []
            first = next((other for other in known if _same(other, child)), None)
            if first is None:
                children.append(child)
                known.append(child)
            else:
                first.names += child.names
                _merge_stages(first, child)
        signature = (
            module.kind,
            tuple(self.nodes[at] for at in module.nodes),
            tuple(self.parameters[at] for at in module.parameters),
            tuple((tuple(c.names), c.kind) for c in children),
        )
        return _Folded(
            module=module,
            kind=self.known.setdefault(signature, len(self.known)),
            figures=module.own + sum(c.figures * len(c.names) for c in children),
            stages=module.stages.union(*(c.stages for c in children)),
            names=[module.name],
            children=children,
        )


def _same(one: _Folded, other: _Folded) -> bool:
    return np.allclose(one.figures, other.figures, rtol=SAME, atol=NOTHING) and all(
        map(_same, one.children, other.children)
    )


def _merge_stages(one: _Folded, other: _Folded) -> None:
    one.stages |= other.stages
    for mine, its in zip(one.children, other.children, strict=True):
        _merge_stages(mine, its)


def _preorder(folded: _Folded, parent: int | None, before: list[None]) -> Iterator[Row]:
    number = len(before)
    before.append(None)
    names = folded.names
    several = len(names) > 1
    yield Row(
        module=folded.module,
        parent=parent,
        name=format_ranks(tuple(map(int, names))) if several else names[0],
        count=len(names),
        figures=folded.figures,
        stages=folded.stages,
    )
    for child in folded.children:
        yield from _preorder(child, number, before)
