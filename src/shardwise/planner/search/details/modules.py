"""The model as a tree of modules: layouts, bytes and seconds of each, and where in the user's code.

Enters: a simulated step and its plan. Leaves: data for a plan's file: equal modules once, columns
of figures, texts by number. Figures are those of one rank for a step; where a module is in several
stages, the sum over a rank of each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.dtypes import dtype_name
from shardwise.planner.search.details.subject import Subject
from shardwise.planner.search.details.tree import FIGURES, Folder, Module, Row
from shardwise.plans import Plan
from shardwise.simulation.work import Floats, Held

DIGITS = 12
FEW = 7  # digits of a node's figures


class Texts:
    """Texts by number."""

    def __init__(self) -> None:
        self.number: dict[Any, int] = {}

    def __call__(self, text: Any) -> int:
        return self.number.setdefault(text, len(self.number))


def module_tree(subject: Subject, plan: Plan) -> dict[str, Any]:
    """`modules` of a plan's details."""
    return _Tree(subject, plan).to_json()


class _Tree:
    """Positions and parameters placed in modules, then folded."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self.subject, self.plan = subject, plan
        self.layouts, self.ops, self.sources = Texts(), Texts(), Texts()
        self.columns = self._columns()
        self.root = Module(subject.graph.name, "", subject.graph.name)
        self.choices = [self._choices(group) for group in range(len(subject.setting.groups))]
        self.nodes: dict[int, tuple[int, int, int]] = {}  # position -> op, layout, source
        self.parameters: dict[int, dict[str, Any]] = {}

    def to_json(self) -> dict[str, Any]:
        self._place_nodes()
        self._place_parameters()
        self._place_messages()
        kinds = {
            at: tuple(str(p[k]) for k in ("name", "shape", "dtype", "layout", "zero"))
            for at, p in self.parameters.items()
        }
        rows = Folder(self.nodes, kinds).rows(self.root)
        return {
            "rows": self._rows(rows),
            "parameters": self._parameter_rows(rows),
            "nodes": self._node_columns(rows),
            "layouts": list(self.layouts.number),
            "ops": list(self.ops.number),
            "sources": [list(pair) for pair in self.sources.number],
        }

    def _columns(self) -> dict[str, Floats]:
        """Seconds of a step and kept bytes of a micro-batch, at every position."""
        found, times = self.subject.columns, self.subject.setting.num_microbatches
        return {
            "forward_s": found["forward"] * times,
            "backward_s": found["backward"] * times,
            "communication_s": (found["forward_talk"] + found["backward_talk"]) * times,
            "activation_bytes": found["saved"],
        }

    def _choices(self, group: int) -> list[int]:
        """The layout of every node of the small graph, on the mesh of a group."""
        works, names = self.subject.works_of(group), self.subject.setting.groups[group].mesh.names
        shown = [a for a in works.assignments if a.axis in names]
        return [
            self.layouts(", ".join(f"{a.axis}: {a.nodes[node.name].choice}" for a in shown))
            for node in self.subject.fold.graph.nodes
        ]

    # ------------------------------------------------------------ what is where

    def _place_nodes(self) -> None:
        subject, small = self.subject, self.subject.fold.graph.nodes
        placement, stage_of = subject.setting.placement, subject.stage_of.tolist()
        order = [FIGURES.index(name) for name in self.columns]
        table = np.stack(list(self.columns.values()), axis=1)
        modules: dict[str, Module] = {}
        for at, (place, number) in enumerate(
            zip(subject.fold.places, subject.fold.order, strict=True)
        ):
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
        graph, subject = self.subject.graph, self.subject
        uses = self._uses()
        held = [{p.name: p for p in layers.work.parameters} for layers in subject.layers]
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
                "shape": list(kind.shape),
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
        graph, fold = self.subject.graph, self.subject.fold
        names = {p.value: p.name for p in fold.graph.parameters}
        wanted = {p.value for p in graph.parameters}
        stage_of = self.subject.stage_of.tolist()
        inputs = [node.inputs for node in fold.graph.nodes]
        found: dict[str, tuple[int, str]] = {}
        for at, (node, number) in enumerate(zip(graph.nodes, fold.order, strict=True)):
            if number < 0 or not any(name in names for name in inputs[number]):
                continue
            for value, other in zip(node.inputs, inputs[number], strict=True):
                if value in wanted and other in names:
                    found.setdefault(value, (stage_of[at], names[other]))
        return found

    def _sharers(self, held: Held | None, stage: int, zero: int | None) -> int:
        """The ranks that share a parameter's memory: with zero 3, those that sum its gradient."""
        if held is None or zero != 3 or not held.sync:
            return 1
        group = self.subject.setting.groups[self.subject.setting.placement[stage]]
        return int(group.along(held.sync).shape[-1])

    def _place_messages(self) -> None:
        """Messages of parameters and gradients, by unit; what is of no module is the root's."""
        times = self.subject.setting.num_microbatches
        sync, forward, backward = map(FIGURES.index, ("sync_s", "forward_s", "backward_s"))
        for stage in self.subject.estimate.stages:
            self.root.own[sync] += stage.update_gather + stage.root_gather
            for unit in stage.units:
                module = self.root.at(unit.name)
                module.own[sync] += 2 * unit.gather * times + unit.reduce
                if unit.first == unit.end:  # what goes to host memory and back
                    module.own[forward] += unit.forward * times
                    module.own[backward] += unit.backward * times

    # ------------------------------------------------------------ to data

    def _rows(self, rows: list[Row]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {
            "parent": [-1 if row.parent is None else row.parent for row in rows],
            "name": [row.name for row in rows],
            "path": [row.module.path for row in rows],
            "kind": [row.module.kind for row in rows],
            "count": [row.count for row in rows],
            "stages": [sorted(row.stages) for row in rows],
            "layout": [self._layout(row) for row in rows],
        }
        for at, figure in enumerate(FIGURES):
            found[figure] = [_short(float(row.figures[at])) for row in rows]
        return found

    def _layout(self, row: Row) -> int:
        """Of the node that takes longest; -1 for a module without nodes of its own."""
        spent = self.columns["forward_s"] + self.columns["backward_s"]
        at = max(row.module.nodes, key=lambda node: spent[node], default=None)
        return -1 if at is None else self.nodes[at][1]

    def _parameter_rows(self, rows: list[Row]) -> list[list[Any]]:
        return [
            [number, *self.parameters[at].values()]
            for number, row in enumerate(rows)
            for at in row.module.parameters
        ]

    def _node_columns(self, rows: list[Row]) -> dict[str, list[Any]]:
        pairs = [(number, at) for number, row in enumerate(rows) for at in row.module.nodes]
        places = self.subject.fold.places
        found: dict[str, list[Any]] = {
            "module": [number for number, _ in pairs],
            "name": [places[at].rpartition(".")[2] for _, at in pairs],
        }
        for index, column in enumerate(("op", "layout", "source")):
            found[column] = [self.nodes[at][index] for _, at in pairs]
        for column, values in self.columns.items():
            shown = values[[at for _, at in pairs]].tolist() if pairs else []
            found[column] = [_short(value, FEW) for value in shown]
        return found


def _short(value: float, digits: int = DIGITS) -> float | int:
    """Fewer digits, and whole numbers without a point."""
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() else found


def parameter_fields() -> tuple[str, ...]:
    """What a row of `parameters` holds."""
    return (
        "module", "name", "shape", "dtype", "layout", "zero", "trained", "bytes", "local_bytes",
    )  # fmt: skip
