"""Modules as a tree in which equal ones are there once.

Enters: modules with their own figures. Leaves: `Row`s in preorder: figures with those of children,
and how many equal modules a row stands for. Numbered modules side by side (`layers.0`, `layers.1`)
are equal if they and all below them have the same classes, nodes, parameters and figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwise.messages.ranks import format_ranks
from shardwise.simulation.work import Floats

FIGURES = (
    "forward_s",
    "backward_s",
    "communication_s",
    "sync_s",
    "parameters",
    "model_parameters",
    "parameter_bytes",
    "activation_bytes",
)
SAME = 1e-6  # relative difference up to which figures are equal
NOTHING = 1e-12


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
            known = alike.setdefault(child.kind, []) if _is_number(child.module.name) else []
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


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


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
