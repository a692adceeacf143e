"""A YAML text as values that know where they stand.

Enters: text (JSON is YAML, too). Leaves: `Entry`s; asking one for a number, a text, a list or known
keys gives it, or a `ClusterError` with the file, the line, the place and what to type. Numbers are
read as decimals, so that a unit in a field's name costs no digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import NoReturn

import yaml

from shardwise.cluster.names import MOST
from shardwise.errors import ClusterError, did_you_mean
from shardwise.files import compose_yaml

MAX_VALUES = 500_000  # in a cluster file
SMALLEST, LARGEST = 1e-20, 1e20  # of numbers in their unit: no machine is beyond

_INFINITE = ("inf", ".inf")
_NOT_FINITE = ("inf", "infinity", "nan")

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Entry:
    """A part of the file: a scalar, a list or a mapping."""

    node: yaml.Node
    path: str
    file: str

    @property
    def where(self) -> str:
        return self.about(None)

    def about(self, what: str | None) -> str:
        """This place, with what is there."""
        line = self.node.start_mark.line + 1
        told = ", ".join(filter(None, (self.path, what)))
        return f"{self.file}:{line}" + (f" ({told})" if told else "")

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.node, yaml.MappingNode)

    @property
    def is_list(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    @property
    def is_null(self) -> bool:
        return self.node.tag == "tag:yaml.org,2002:null"

    def fail(self, message: str, hint: str | None = None) -> NoReturn:
        """Raise an error that names this place."""
        raise ClusterError(message, where=self.where, hint=hint)

    def pairs(self) -> dict[str, Entry]:
        """A mapping of free keys."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"expected fields, not {_shown(self.node)}", hint="name: value")
        found: dict[str, Entry] = {}
        for key, value in self.node.value:
            name = str(key.value)
            if name in found:
                Entry(key, self.path, self.file).fail(f"field {name!r} is given twice")
            found[name] = Entry(value, f"{self.path}.{name}".lstrip("."), self.file)
        return found

    def fields(self, known: Sequence[str], required: Sequence[str] = ()) -> dict[str, Entry]:
        """A mapping with only `known` keys, and all `required` ones."""
        if not self.is_mapping:
            self.fail(f"expected {', '.join(known)}, not {_shown(self.node)}")
        found = self.pairs()
        for name, entry in found.items():
            if name not in known:
                entry.fail(f"unknown field {name!r}{did_you_mean(name, known)}", ", ".join(known))
        for name in required:
            if name not in found:
                self.fail(f"field {name!r} is missing", hint=f"{name}: …")
            if found[name].is_null:
                found[name].fail(f"field {name!r} is empty", hint=f"{name}: …")
        return {name: entry for name, entry in found.items() if not entry.is_null}

    def at(self, part: Sequence[str | int]) -> Entry:
        """The entry that keys and places in lists lead to."""
        found = self
        for key in part:
            found = found.pairs()[key] if isinstance(key, str) else found.items()[key]
        return found

    def items(self) -> list[Entry]:
        """The elements of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"expected a list, not {_shown(self.node)}", hint="[…]")
        return [
            Entry(item, f"{self.path}[{i}]", self.file) for i, item in enumerate(self.node.value)
        ]

    def text(self) -> str:
        """A scalar as it is written."""
        if not isinstance(self.node, yaml.ScalarNode):
            self.fail(f"expected a text, not {_shown(self.node)}")
        return str(self.node.value)

    def texts(self) -> tuple[str, ...]:
        """One text or a list of them."""
        return tuple(e.text() for e in self.items()) if self.is_list else (self.text(),)

    def number(self, unit: str = "1", *, zero: bool = False, infinite: bool = False) -> float:
        """A number above 0, or of at least 0, times the unit; "inf" where nothing may limit."""
        if infinite and isinstance(self.node, yaml.ScalarNode) and self.node.value in _INFINITE:
            return math.inf
        no_limit = "inf, for what limits nothing" if infinite else None
        return float(self._decimal("number", "1.5", zero=zero, beyond=no_limit) * Decimal(unit))

    def whole(self, *, zero: bool = False, unit: str = "1") -> int:
        """A whole number, once it is in its unit."""
        if unit != "1":
            return round(self.number(unit, zero=zero))
        value = self._decimal("whole number", "8", zero=zero)
        name = self.path.rpartition(".")[2]
        if value != int(value):
            self.fail(f"{name} is {self.text()!r}, must be a whole number", hint=f"{name}: 8")
        if value > MOST:
            self.fail(f"{name} is {self.text()!r}, more than {MOST:,}", hint=f"{name}: 8")
        return int(value)

    def _decimal(
        self, kind: str, example: str, *, zero: bool, beyond: str | None = None
    ) -> Decimal:
        """A number in its unit; `example` is one to type, `beyond` what to type for more."""
        name = self.path.rpartition(".")[2]
        bound = "of at least 0" if zero else "above 0"
        hint = f"{name}: {example}"
        if not isinstance(self.node, yaml.ScalarNode):
            self.fail(f"{name} is {_shown(self.node)}, must be a {kind} {bound}", hint=hint)
        text = self.node.value
        try:
            value = Decimal(text)
        except InvalidOperation:
            value = Decimal(-1)
        if text.lower().lstrip("+-.") in _NOT_FINITE:
            self.fail(f"{name} is {text!r}, must be a finite number {bound}", hint=hint)
        if not value.is_finite() or value < 0 or (value == 0 and not zero):
            self.fail(f"{name} is {text!r}, must be a {kind} {bound}", hint=hint)
        if value and not SMALLEST <= float(value) <= LARGEST:
            hint = beyond or hint
            self.fail(f"{name} is {text!r}, not between {SMALLEST:g} and {LARGEST:g}", hint=hint)
        return value


def parse(text: str, file: str) -> Entry:
    """The whole text as one entry."""
    node = compose_yaml(text, ClusterError, where=file, loader=_Loader, max_values=MAX_VALUES)
    if node is None:
        raise ClusterError("the file is empty", where=file, hint="shardwise profile -o FILE")
    return Entry(node, "", file)


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "fields"
    return "a list" if isinstance(node, yaml.SequenceNode) else repr(node.value)
