"""Read YAML and JSON into frozen dataclasses, and write dataclasses back.

The types of a dataclass describe a format: nested dataclasses, `Mapping[str, X]`, `tuple[X, ...]`,
`Literal`, `X | None`, and `Annotated` with the constraints of this module. `Reader` checks every
value against its type and reports a mistake with the file, the line, the field and its valid
values; `Writer` is its inverse. `check_fields` applies the same constraints to objects that were
created in Python. `shardwise.files` opens and parses files, and limits their size and nesting.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar, Union

from shardwise.errors import ErrorKind, ShardwiseError, did_you_mean
from shardwise.files import MAX_VALUES, compose_yaml

if typing.TYPE_CHECKING:
    import yaml

T = TypeVar("T")
KeyPath: TypeAlias = tuple[str | int, ...]
Hook: TypeAlias = Callable[[Any, Any, KeyPath], Any]  # reader, value, path -> value
_Read: TypeAlias = Callable[[Any, KeyPath], Any]

SMALLEST, LARGEST = 1e-20, 1e20  # limits of decimals, beyond all physical figures
MAX_KEY = 1_000  # characters of a key; matching a glob takes time quadratic in its length
_PLAIN = (str, bool, int, float, Mapping, list, tuple, type(None))
_NAMES = {str: "text", bool: "true or false"}
_IDENTIFIER = re.compile(r"[\w-]+")


# ------------------------------------------------------------ constraints of fields
@dataclass(frozen=True, slots=True)
class Range:
    """A number between `low` (excluded if `above`) and `high`, finite by default."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    infinite: bool = False

    def __contains__(self, value: float) -> bool:
        if not (self.infinite or math.isfinite(value)):
            return False
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        low, high = (f"{bound:,.12g}" for bound in (self.low, self.high))
        lower = f" above {low}" if self.above else f" of at least {low}"
        if self.high == math.inf:
            return "" if self.low == -math.inf else lower
        return f"{lower} and at most {high}" if self.above else f" between {low} and {high}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several texts; `what` names them in errors instead of the field."""

    values: tuple[str, ...]
    what: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """A text that matches a regular expression in full; `what` describes it in errors."""

    pattern: str
    what: str


@dataclass(frozen=True, slots=True)
class Stored:
    """How files store a field, where that differs from Python: its name and unit.

    A field that equals its default is omitted from files unless `always` is set. A `finite` field
    may be infinite in Python but not in files; a `hidden` field is not in files. A tuple of one
    item is written without its list if `single`.
    """

    name: str = ""
    unit: str = "1"
    always: bool = False
    finite: bool = False
    hidden: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """A value that files store as another type, by default text; `read` raises if it is invalid."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value
    kind: Any = str


ONE_OR_MORE = object()  # a tuple that may be written as its only item
AS_MAPPING = object()  # a tuple of pairs that is written as a mapping
Several: TypeAlias = Annotated[tuple[T, ...], ONE_OR_MORE]


def check_fields(value: Any, error: ErrorKind, where: str | None = None) -> None:
    """Raise `error` if a field of a dataclass violates its `Range` or `OneOf`."""
    for name, kind, marker, part in _constraints(typing.cast(Any, type(value))):
        field = getattr(value, name)
        pairs = field.items() if isinstance(field, Mapping) else field
        items = [field] if part is None else [pair[part] for pair in pairs]
        for item in items:
            if item is None:
                continue  # an optional field
            if isinstance(marker, OneOf) and item not in marker.values:
                message, hint = _unknown(item, marker, name)
                raise error(message, where=where, hint=hint)
            if isinstance(marker, Range) and not _is_number(item, kind, marker):
                raise error(_wrong_number(name, repr(item), kind, marker, item), where=where)


# ------------------------------------------------------------ YAML with lines
def parse_yaml(
    text: str, error: ErrorKind, *, where: str, max_values: int = MAX_VALUES, typed: bool = True
) -> tuple[Any, dict[KeyPath, int]]:
    """Return the value of a YAML text and the line of every key.

    Scalars become Python values, or remain text if not `typed`, which preserves all digits of
    numbers. Tags that would build objects are refused.
    """
    loader = _typed_loader() if typed else _loader()
    root = compose_yaml(text, error, where=where, loader=loader, max_values=max_values)
    lines: dict[KeyPath, int] = {}
    if root is None:
        return None, lines
    plain = _walk(root, (), lines, error, where)
    if not typed:
        return plain, lines
    try:
        return loader("").construct_document(root), lines
    except Exception as problem:  # PyYAML raises arbitrary errors for tags such as !!int "x"
        mark = getattr(problem, "problem_mark", None)
        place = where if mark is None else f"{where}:{mark.line + 1}"
        reason = getattr(problem, "problem", None) or f"{type(problem).__name__}: {problem}"
        raise error(f"not plain YAML: {reason}", where=place) from None


def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def _typed_loader() -> Any:
    """Return a loader that reads 1e-3 as a number, as in YAML 1.2; in YAML 1.1 it is text."""
    loader: Any = type("Loader", (_loader(),), {})
    number = re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return loader


def _walk(
    node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], error: ErrorKind, where: str
) -> Any:
    """Return the values below a node with scalars as text, and record the line of every path."""
    import yaml

    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_walk(v, (*path, i), lines, error, where) for i, v in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return None if node.tag == "tag:yaml.org,2002:null" else str(node.value)
    values: dict[str, Any] = {}
    for key, value in node.value:
        name, inner = str(key.value), (*path, str(key.value))
        if name in values:
            place = f"{where}:{key.start_mark.line + 1} ({_shown_path(inner)})"
            raise error(f"duplicate field {name!r}", where=place)
        lines[inner] = key.start_mark.line + 1
        values[name] = _walk(value, inner, lines, error, where)
    return values


# ------------------------------------------------------------ reading
class Reader:
    """Read values as the types of a format; report every mistake as an `error` with its place.

    `name` is the file and `lines` the lines of its keys. With `decimals`, scalars are the texts of
    `parse_yaml(typed=False)`, null means an absent field, and units are applied exactly. `hooks`
    are functions that read types with a special form in files. In a `call`, the values are
    arguments, which may be objects where files have names. `hint` is the hint of errors without
    one.
    """

    def __init__(
        self,
        error: ErrorKind,
        name: str,
        lines: Mapping[KeyPath, int] | None = None,
        *,
        decimals: bool = False,
        call: bool = False,
        hooks: Mapping[Any, Hook] | None = None,
        hint: str | None = None,
    ) -> None:
        self.error, self.name, self.lines = error, name, lines or {}
        self.decimals, self.call, self._hooks = decimals, call, hooks or {}
        self._hint = hint
        self._readers: dict[Any, _Read] = {}

    def at(self, path: KeyPath, about: str | None = None) -> str:
        """Return the place of a value: `cluster.yaml:7 (nodes[0].name)`."""
        line = self.lines.get(path)
        place = self.name if line is None else f"{self.name}:{line}"
        inside = ", ".join(filter(None, (_shown_path(path), about)))
        return f"{place} ({inside})" if inside else place

    def fail(self, message: str, path: KeyPath, hint: str | None = None) -> NoReturn:
        """Raise an error about the value at `path`."""
        raise self.error(message, where=self.at(path), hint=hint or self._hint)

    def read(self, kind: Any, value: Any, path: KeyPath = ()) -> Any:
        """Read a value as a type."""
        if kind not in self._readers:
            self._readers[kind] = self._reader(kind)
        return self._readers[kind](value, path)

    def fields(
        self, kind: Any, value: Any, path: KeyPath = (), *, required: bool | None = None
    ) -> dict[str, Any]:
        """Return the values of the fields of a dataclass by their names in Python.

        By default, fields without a default are required; `required` applies to all fields.
        """
        fields = _fields_of(kind)
        if not isinstance(value, Mapping):
            hint = f"the fields are {', '.join(fields)}"
            self.fail(f"{_name(path)} is {_shown(value)}, must be a mapping", path, hint)
        result: dict[str, Any] = {}
        for name, item in value.items():
            if name not in fields:
                self._unknown_field(kind, str(name), path)
            if item is None and self.decimals:
                continue
            result[fields[name].python] = self.read(fields[name].kind, item, (*path, name))
        for name, field in fields.items():
            absent = field.python not in result or (
                result[field.python] is None and not field.optional
            )
            if absent and (field.required if required is None else required):
                reason = "empty" if name in value and self.decimals else "missing"
                place = (*path, name) if reason == "empty" else path
                self.fail(f"field {name!r} is {reason}", place, hint=f"{name}: …")
        return result

    def construct(self, make: Callable[..., T], path: KeyPath, /, *args: Any, **values: Any) -> T:
        """Call `make`, and raise its errors as this reader's class of error with the place."""
        try:
            return make(*args, **values)
        except ShardwiseError as problem:
            # A check of the full object names the part that it is about.
            part = getattr(problem, "part", ())
            place = self.at((*path, *part), None if path else problem.where)
            hint = problem.hint or self._hint
            raise self.error(problem.message, where=place, hint=hint) from None

    # ------------------------------------------------------------ readers of types
    def _reader(self, kind: Any) -> _Read:
        if kind in self._hooks:
            return functools.partial(self._hooks[kind], self)
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return lambda value, path: value
        if origin is Annotated:
            return self._annotated(args[0], args[1:])
        if origin in (Union, types.UnionType):
            return self._union(args)
        if origin is tuple and args[-1] is not Ellipsis:
            return functools.partial(self._fixed, args)
        if origin is tuple:
            return functools.partial(self._items, args[0])
        if origin is Literal:
            return functools.partial(self._one_of, OneOf(args))
        if origin is not None:
            return functools.partial(self._mapping, *args)
        if dataclasses.is_dataclass(kind):
            return functools.partial(self._object, kind)
        if kind in (int, float):
            return functools.partial(self._number, kind, Range(), Stored())
        return functools.partial(self._plain, kind)

    def _annotated(self, kind: Any, markers: tuple[Any, ...]) -> _Read:
        limits = next((m for m in markers if isinstance(m, Range)), Range())
        stored = next((m for m in markers if isinstance(m, Stored)), Stored())
        texts = next((m for m in markers if isinstance(m, OneOf | Match)), None)
        form = next((m for m in markers if isinstance(m, Form)), None)
        if form is not None:
            return functools.partial(self._form, form)
        if kind is Any and not isinstance(markers[0], Stored):
            return functools.partial(self._object_or, markers[0])
        if ONE_OR_MORE in markers:
            return functools.partial(self._one_or_more, typing.get_args(kind)[0])
        if AS_MAPPING in markers:
            return functools.partial(self._pairs, *typing.get_args(typing.get_args(kind)[0]))
        if kind in (int, float):
            return functools.partial(self._number, kind, limits, stored)
        if isinstance(texts, OneOf):
            return functools.partial(self._one_of, texts)
        if isinstance(texts, Match):
            return functools.partial(self._match, texts)
        optional = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        if typing.get_origin(kind) in (Union, types.UnionType) and len(optional) == 1:
            read = self._annotated(optional[0], markers)
            return lambda value, path: None if value is None else read(value, path)
        return functools.partial(self.read, kind)

    def _form(self, form: Form, value: Any, path: KeyPath) -> Any:
        plain = self.read(form.kind, value, path)
        try:
            return self.construct(form.read, path, plain)
        except self.error:
            raise
        except (ValueError, OverflowError) as problem:
            self.fail(f"{_name(path)} is {_shown(value)}: {problem}", path)

    def _union(self, args: tuple[Any, ...]) -> _Read:
        """Read `X | None`, or a text or number that may also be a list."""
        kinds = [kind for kind in args if kind is not type(None)]
        lists = [kind for kind in kinds if typing.get_origin(kind) is tuple]
        scalars = [kind for kind in kinds if kind not in lists]

        def read(value: Any, path: KeyPath) -> Any:
            if value is None and len(kinds) < len(args):
                return None
            listed = isinstance(value, list | tuple) if scalars else True
            return self.read((lists if lists and listed else scalars)[0], value, path)

        return read

    def _object_or(self, kind: Any, value: Any, path: KeyPath) -> Any:
        """Read a plain value as `kind`; return any other object unchanged."""
        plain = isinstance(value, _PLAIN) and value is not None
        if self.call and isinstance(value, list | tuple):
            plain = False  # a list of samples, for example
        return self.read(kind, value, path) if plain else value

    def _items(self, kind: Any, value: Any, path: KeyPath) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            self.fail(f"{_name(path)} is {_shown(value)}, must be a list", path, hint="[…]")
        return tuple(self.read(kind, item, (*path, i)) for i, item in enumerate(value))

    def _one_or_more(self, kind: Any, value: Any, path: KeyPath) -> tuple[Any, ...]:
        if value is None:
            return ()
        if isinstance(value, list | tuple):
            return self._items(kind, value, path)
        return (self.read(kind, value, path),)

    def _fixed(self, kinds: tuple[Any, ...], value: Any, path: KeyPath) -> tuple[Any, ...]:
        items = self._items(Any, value, path)
        if len(items) != len(kinds):
            self.fail(f"{_name(path)} has {len(items)} items, must have {len(kinds)}", path)
        pairs = enumerate(zip(kinds, items, strict=True))
        return tuple(self.read(kind, item, (*path, i)) for i, (kind, item) in pairs)

    def _mapping(self, keys: Any, kind: Any, value: Any, path: KeyPath) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            hint = "name: value" if self.decimals or self.lines else None
            self.fail(f"{_name(path)} is {_shown(value)}, must be a mapping", path, hint)
        result = {}
        for name, item in value.items():
            if not isinstance(name, str):
                self.fail(f"{_name(path)} has the key {_shown(name)}, must be text", path)
            if len(name) > MAX_KEY:
                self.fail(f"{_name(path)} has a key of {len(name)} characters", path)
            inner = (*path, name)
            result[self.read(keys, name, inner)] = self.read(kind, item, inner)
        return result

    def _pairs(self, keys: Any, kind: Any, value: Any, path: KeyPath) -> tuple[Any, ...]:
        return tuple(self._mapping(keys, kind, value, path).items())

    def _object(self, kind: Any, value: Any, path: KeyPath) -> Any:
        if isinstance(value, kind):
            return value
        short = getattr(kind, "SHORT_FORM", None)
        if short is not None and not isinstance(value, Mapping):
            value = {short: value}
        return self.construct(kind, path, **self.fields(kind, value, path))

    def _one_of(self, allowed: OneOf, value: Any, path: KeyPath) -> Any:
        if value is False and "off" in allowed.values:  # YAML 1.1 reads off as false
            value = "off"
        if not isinstance(value, str | int) or value not in allowed.values:
            message, hint = _unknown(value, allowed, _name(path))
            self.fail(message, path, hint)
        return value

    def _match(self, match: Match, value: Any, path: KeyPath) -> str:
        text: str = self._plain(str, value, path)
        if not re.fullmatch(match.pattern, text):
            self.fail(f"{_name(path)} is {_shown(value)}, must be {match.what}", path)
        return text

    def _plain(self, kind: type, value: Any, path: KeyPath) -> Any:
        if kind is str and isinstance(value, Path):
            return str(value)
        if not isinstance(value, kind):
            expected = _NAMES.get(kind, kind.__name__)
            self.fail(f"{_name(path)} is {_shown(value)}, must be {expected}", path)
        return value

    def _number(
        self, kind: type, limits: Range, stored: Stored, value: Any, path: KeyPath
    ) -> int | float:
        if stored.finite and limits.infinite:
            limits = dataclasses.replace(limits, infinite=False)
        if self.decimals:
            return self._decimal(kind, limits, stored.unit, value, path)
        if not _is_number(value, kind, limits):
            self.fail(_wrong_number(_name(path), _shown(value), kind, limits, value), path)
        return int(value) if kind is int else float(value)

    def _decimal(
        self, kind: type, limits: Range, unit: str, value: Any, path: KeyPath
    ) -> int | float:
        """Return the number of a text, times its unit."""
        name, is_integer = _name(path), kind is int and unit == "1"
        hint = f"{name}: {8 if is_integer else 1.5}"
        text = value if isinstance(value, str) else ""
        if limits.infinite and text in ("inf", ".inf"):
            return math.inf
        try:
            number = Decimal(text)
        except InvalidOperation:
            finite = text.lower().lstrip("+-.") not in ("inf", "infinity", "nan")
            number = Decimal(0 if finite else "nan")
            text = "" if finite else text
        in_range = number == 0 or SMALLEST <= abs(float(number)) <= LARGEST
        if text and number.is_finite() and not in_range:
            hint = "inf, for no limit" if limits.infinite else hint
            self.fail(f"{name} is {value!r}, not between {SMALLEST:g} and {LARGEST:g}", path, hint)
        scaled = float(number * Decimal(unit))
        good = text and number.is_finite() and not (is_integer and number != int(number))
        if not good or scaled not in limits:
            problem = _wrong_number(
                name, _shown(value), int if is_integer else float, limits, scaled
            )
            self.fail(problem, path, hint)
        return round(scaled) if kind is int else scaled

    def _unknown_field(self, kind: Any, name: str, path: KeyPath) -> NoReturn:
        fields = _fields_of(kind)
        near, hint = did_you_mean(name, fields), ", ".join(fields)
        if not near and "args" in fields:
            owner, short = _shown_path(path), getattr(kind, "SHORT_FORM", "name")
            hint = f"{owner}.args.{name}, if it is an argument of {owner}.{short}"
        self.fail(f"unknown field {name!r}{near}", (*path, name), hint)


# ------------------------------------------------------------ writing
class Writer:
    """Write dataclasses as plain mappings, lists, texts and numbers: the inverse of `Reader`.

    `number` writes a number in its unit; `hooks`, or else a method `to_json`, write types with a
    special form in files.
    """

    def __init__(
        self,
        number: Callable[[Any, str], Any] = lambda value, unit: value,
        hooks: Mapping[type, Callable[[Any], Any]] | None = None,
    ) -> None:
        self._number, self._hooks = number, hooks or {}

    def write(self, value: Any, kind: Any = Any) -> Any:
        """Return the plain form of a value of a type."""
        hook = self._hooks.get(type(value)) or getattr(type(value), "to_json", None)
        if hook is not None:
            return hook(value)
        stored, markers = _stored(kind), _markers(kind)
        form = next((m for m in markers if isinstance(m, Form)), None)
        if form is not None:
            return form.write(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._number(value, stored.unit)
        if dataclasses.is_dataclass(value):
            return self.fields(value)
        args = typing.get_args(typing.get_args(kind)[0] if markers else _without_none(kind))
        if isinstance(value, Mapping) or AS_MAPPING in markers:
            pairs = value.items() if isinstance(value, Mapping) else value
            inner = typing.get_args(args[0])[1] if AS_MAPPING in markers else (*args, Any, Any)[1]
            return {name: self.write(item, inner) for name, item in pairs}
        if isinstance(value, tuple | list):
            kinds = args if args and args[-1] is not Ellipsis else (args or (Any,))[:1] * len(value)
            items = [
                self.write(item, item_kind) for item, item_kind in zip(value, kinds, strict=True)
            ]
            return items[0] if stored.single and len(items) == 1 else items
        return value

    def fields(self, value: Any) -> dict[str, Any]:
        """Return the fields of a dataclass by their names in files, without defaults."""
        result = {}
        for name, field in _fields_of(typing.cast(Any, type(value))).items():
            item = getattr(value, field.python)
            if field.required or field.always or item != field.default:
                result[name] = self.write(item, field.kind)
        return result


# ------------------------------------------------------------ inspecting types
@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A field of a dataclass in files."""

    python: str
    kind: Any
    required: bool
    optional: bool
    always: bool
    default: Any


@functools.cache
def _fields_of(kind: Any) -> dict[str, _Field]:
    """Return the fields of a dataclass by their names in files."""
    result = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        stored = _stored(hints[field.name])
        if stored.hidden:
            continue
        has_factory = field.default_factory is not dataclasses.MISSING
        result[stored.name or field.name] = _Field(
            python=field.name,
            kind=hints[field.name],
            required=field.default is dataclasses.MISSING and not has_factory,
            optional=_is_optional(hints[field.name]),
            always=stored.always,
            default=field.default_factory() if has_factory else field.default,  # type: ignore[operator]
        )
    return result


def _stored(kind: Any) -> Stored:
    return next((m for m in _markers(kind) if isinstance(m, Stored)), Stored())


def _markers(kind: Any) -> tuple[Any, ...]:
    """Return the markers of `Annotated[X, …]`, also inside `Annotated[X, …] | None`."""
    if typing.get_origin(kind) is Annotated:
        return typing.get_args(kind)[1:]
    if typing.get_origin(kind) in (Union, types.UnionType):
        return tuple(marker for arg in typing.get_args(kind) for marker in _markers(arg))
    return ()


def _without_none(kind: Any) -> Any:
    """Return `X` of `X | None`, and any other type unchanged."""
    members = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    is_union = typing.get_origin(kind) in (Union, types.UnionType)
    return members[0] if is_union and len(members) == 1 else kind


def _is_optional(kind: Any) -> bool:
    if typing.get_origin(kind) is Annotated:
        return _is_optional(typing.get_args(kind)[0])
    return type(None) in typing.get_args(kind) or kind is Any


@functools.cache
def _constraints(kind: Any) -> tuple[tuple[str, type, Range | OneOf, int | None], ...]:
    """Return the field, type, constraint and index in pairs of each check of `check_fields`."""
    result: list[tuple[str, type, Range | OneOf, int | None]] = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        args = typing.get_args(plain)
        parts: list[tuple[Any, int | None]] = [(hint, None)]
        if AS_MAPPING in _markers(hint):
            parts = [(inner, i) for i, inner in enumerate(typing.get_args(args[0]))]
        elif len(args) == 2 and typing.get_origin(plain) is typing.get_origin(Mapping[str, int]):
            parts = [(inner, i) for i, inner in enumerate(args)]
        for inner, part in parts:
            number = int if int in _flattened(inner) else float
            constraints = [m for m in _markers(inner) if isinstance(m, Range | OneOf)]
            result += [(name, number, marker, part) for marker in constraints]
    return tuple(result)


def _is_number(value: Any, kind: type, limits: Range) -> bool:
    expected = int if kind is int else int | float
    return isinstance(value, expected) and not isinstance(value, bool) and value in limits


def _flattened(kind: Any) -> tuple[Any, ...]:
    args = typing.get_args(kind)
    if typing.get_origin(kind) is Annotated:
        return _flattened(args[0]) or (args[0],)
    return tuple(inner for arg in args for inner in (_flattened(arg) or (arg,)))


# ------------------------------------------------------------ messages
def _unknown(value: Any, allowed: OneOf, name: str) -> tuple[str, str]:
    near = did_you_mean(str(value), map(str, allowed.values))
    shown = ", ".join(map(str, allowed.values[:12]))
    return f"unknown {allowed.what or name} {_shown(value)}{near}", shown


def _wrong_number(name: str, shown: str, kind: type, limits: Range, value: Any) -> str:
    infinite = isinstance(value, float) and not math.isfinite(value) and not limits.infinite
    expected = "a whole number" if kind is int else "a finite number" if infinite else "a number"
    return f"{name} is {shown}, must be {expected}{limits}"


def _name(path: KeyPath) -> str:
    """Return the last key of a path, with its indices."""
    if not path:
        return "the file"
    start = max((i for i, key in enumerate(path) if isinstance(key, str)), default=0)
    return _shown_path(path[start:])


def _shown_path(path: KeyPath) -> str:
    """Return a path as text.

    >>> _shown_path(("nodes", 0, "link", "all gather"))
    "nodes[0].link['all gather']"
    """
    text = ""
    for key in path:
        plain = isinstance(key, str) and _IDENTIFIER.fullmatch(key)
        text += f".{key}" if plain else f"[{key!r}]"
    return text.removeprefix(".")


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
