"""A config from a YAML file, from keyword arguments and from `--set a.b=c`, checked.

Enters: text or Python values. Leaves: a `TrainConfig`, or a `ConfigError` that names the file, the
key, what was found and what is wanted. YAML is read as data: a tag that would make an object is
refused, and nothing of a file is evaluated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Union

import yaml

from shardwise.errors import ConfigError, did_you_mean
from shardwise.files import compose_yaml, read_text
from shardwise.training.config import SHORT_FORMS, Least, TrainConfig

__all__ = ["config_from", "load_config", "parse_yaml", "with_overrides"]

MAX_BYTES = 1 << 20  # of a config
MAX_VALUES = 20_000  # in one, with every alias written out
PLAIN = (str, bool, int, float, Mapping, list, tuple, type(None))
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where values come from: a file with the lines of its keys, or a call."""

    name: str
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def at(self, key: str) -> str:
        line = self.lines.get(key)
        place = self.name if line is None else f"{self.name}:{line}"
        return f"{place} ({key})" if key else place


CALL = Origin("sw.Trainer")


def load_config(path: str | Path, overrides: Sequence[str] = (), **changes: Any) -> TrainConfig:
    """The config of a file; `overrides` are texts `a.b=c`, `changes` values for fields."""
    path = Path(path)
    hint = "shardwise train config.yaml"
    text = read_text(path, ConfigError, what="config", hint=hint, max_bytes=MAX_BYTES)
    data, lines = parse_yaml(text, str(path))
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path} holds {_shown(data)}, not fields", hint="model: model.py:make")
    values = {**data, **{name: value for name, value in changes.items() if value is not None}}
    return config_from(with_overrides(values, overrides), Origin(str(path), lines))


def config_from(values: Mapping[str, Any], origin: Origin = CALL) -> TrainConfig:
    """The config of keyword arguments."""
    found: TrainConfig = _Reader(origin).read(TrainConfig, values, "")
    return found


def parse_yaml(text: str, name: str) -> tuple[Any, dict[str, int]]:
    """What a text says, and the line of every key; numbers may be written 1e-3."""
    lines: dict[str, int] = {}
    root = compose_yaml(text, ConfigError, where=name, loader=_Loader, max_values=MAX_VALUES)
    if root is None:
        return None, lines
    _find_lines(root, "", lines, name)
    try:
        return _Loader("").construct_document(root), lines
    except Exception as error:  # PyYAML raises anything for tags such as !!int "x"
        mark = getattr(error, "problem_mark", None)
        where = name if mark is None else f"{name}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"not plain YAML: {problem}", where=where) from None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.1 takes 1e-3 for text; people and YAML 1.2 take it for a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _find_lines(node: yaml.Node, path: str, lines: dict[str, int], name: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            inner = f"{path}.{key.value}".lstrip(".")
            if inner in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"{key.value!r} is given twice", where=f"{name}:{line} ({inner})")
            seen.add(inner)
            lines[inner] = key.start_mark.line + 1
            _find_lines(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            _find_lines(value, f"{path}.{index}".lstrip("."), lines, name)


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The values with those of `a.b=c` in their places.

    >>> with_overrides({"optimizer": "SGD"}, ["optimizer.args.lr=1e-2"])
    {'optimizer': {'name': 'SGD', 'args': {'lr': 0.01}}}
    """
    found: Any = dict(values)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"{text!r} is not KEY=VALUE", hint="--set optimizer.args.lr=1e-3")
        found = _put(found, key.split("."), parse_yaml(value, f"--set {key}")[0], key)
    return typing.cast(dict[str, Any], found)


def _put(into: Any, keys: list[str], value: Any, whole: str) -> Any:
    if not keys:
        return value
    first, *rest = keys
    if isinstance(into, list | tuple):
        if not first.isdigit() or int(first) >= len(into):
            raise ConfigError(
                f"{first!r} is no place in a list of {len(into)}", where=f"--set {whole}"
            )
        items = list(into)
        items[int(first)] = _put(items[int(first)], rest, value, whole)
        return items
    if into is None:
        into = {}
    elif not isinstance(into, Mapping):
        into = {"name": into}  # the short form of what has a name
    return {**into, first: _put(into.get(first), rest, value, whole)}


class _Reader:
    """Reads values as the types of a tree of dataclasses."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin

    def fail(self, message: str, key: str, hint: str | None = None) -> NoReturn:
        raise ConfigError(message, where=self.origin.at(key), hint=hint)

    def read(self, kind: Any, value: Any, key: str) -> Any:
        """The value as a type; what it is and what is wanted, where it is not."""
        origin = typing.get_origin(kind)
        if kind is Any:
            return value
        if origin is Annotated:
            return self._annotated(kind, value, key)
        if origin in (Union, types.UnionType):
            return self._optional(kind, value, key)
        if origin is tuple:
            return self._several(typing.get_args(kind)[0], value, key)
        if origin is Literal:
            return self._one_of(typing.get_args(kind), value, key)
        if origin is not None:  # Mapping[str, …]
            inner = typing.get_args(kind)[1]
            found = self._mapping(value, key)
            return {name: self.read(inner, item, f"{key}.{name}") for name, item in found.items()}
        if dataclasses.is_dataclass(kind):
            return self._fields(kind, value, key)
        return self._plain(kind, value, key)

    def _annotated(self, kind: Any, value: Any, key: str) -> Any:
        inner, marker = typing.get_args(kind)
        if inner is Any:  # or an object
            known = isinstance(value, PLAIN) and value is not None
            if self.origin is CALL and isinstance(value, list | tuple):
                known = False  # a list of samples
            return self.read(marker, value, key) if known else value
        found = self.read(inner, value, key)
        if isinstance(marker, Least) and not found >= marker.value:
            self.fail(f"{value!r}, must be at least {marker.value:g}", key)
        return found

    def _optional(self, kind: Any, value: Any, key: str) -> Any:
        if value is None:
            return None
        (inner,) = (each for each in typing.get_args(kind) if each is not type(None))
        return self.read(inner, value, key)

    def _several(self, kind: Any, value: Any, key: str) -> tuple[Any, ...]:
        if value is None:
            return ()
        items = list(value) if isinstance(value, list | tuple) else [value]
        return tuple(self.read(kind, item, f"{key}.{i}") for i, item in enumerate(items))

    def _one_of(self, known: tuple[Any, ...], value: Any, key: str) -> Any:
        if value is False and "off" in known:  # YAML 1.1 takes off for false
            value = "off"
        if value not in known:
            near = did_you_mean(str(value), known)
            self.fail(f"{_shown(value)}{near}", key, hint=", ".join(known))
        return value

    def _mapping(self, value: Any, key: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.fail(f"found {_shown(value)}, wanted fields", key, hint="{lr: 1e-3}")
        for name in value:
            if not isinstance(name, str):
                self.fail(f"{name!r} is no name", key)
        return dict(value)

    def _plain(self, kind: type, value: Any, key: str) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if kind is float and (whole or isinstance(value, float)):
            if not math.isfinite(value):
                self.fail(f"{value!r} is not finite", key)
            return float(value)
        if kind is str and isinstance(value, Path):
            return str(value)
        if not isinstance(value, kind) or (kind is int and not whole):
            self.fail(f"found {_shown(value)}, wanted {WORDS[kind]}", key)
        return value

    def _fields(self, kind: Any, value: Any, key: str) -> Any:
        if isinstance(value, kind):
            return value
        short = SHORT_FORMS.get(kind)
        if short is not None and not isinstance(value, Mapping):
            value = {short: value}
        known = _hints(kind)
        if not isinstance(value, Mapping):
            self.fail(f"found {_shown(value)}, wanted fields", key, hint=", ".join(known))
        for name in value:
            if name not in known:
                self._unknown(str(name), known, key, short)
        found = {n: self.read(known[n], v, f"{key}.{n}".lstrip(".")) for n, v in value.items()}
        for each in dataclasses.fields(kind):
            needed = each.default is each.default_factory is dataclasses.MISSING
            if needed and found.get(each.name) is None:
                at = f"{key}.{each.name}".lstrip(".")
                raise ConfigError(f"{at} is missing", where=self.origin.at(key))
        return kind(**found)

    def _unknown(self, name: str, known: Mapping[str, Any], key: str, short: str | None) -> None:
        near = did_you_mean(name, known)
        hint = ", ".join(known)
        if not near and "args" in known:
            hint = f"{key}.args.{name}, if it is an argument of what {key}.{short} names"
        self.fail(f"no field {name!r}{near}", f"{key}.{name}".lstrip("."), hint=hint)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "fields"
    if isinstance(value, list | tuple):
        return "a list"
    return repr(value)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)
