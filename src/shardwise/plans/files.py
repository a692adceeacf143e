"""The text of a plan's file: decisions for people, a line each; details of reports in few lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from shardwise.errors import PlanError, did_you_mean


def plan_file_text(data: Mapping[str, Any]) -> str:
    """Return the file; `details`, the last of `search`, which is the last of all, has long lines.

    >>> print(plan_file_text({"name": "a", "search": {"gap": 0, "details": {"links": [1, 2]}}}))
    {
      "name": "a",
      "search": {
        "gap": 0,
        "details": {
          "links": [1,2]
        }
      }
    }
    <BLANKLINE>
    """
    search = dict(data.get("search") or {})
    details = search.pop("details", None)
    if not details or not search:
        return json.dumps(data, indent=2) + "\n"
    rest = {key: value for key, value in data.items() if key != "search"}
    text = json.dumps({**rest, "search": search}, indent=2)
    lines = [f"      {json.dumps(key)}: {_line(value)}" for key, value in details.items()]
    inside = ",\n".join(lines)
    before = text.removesuffix("\n  }\n}")  # the braces of `search` and of all
    return f'{before},\n    "details": {{\n{inside}\n    }}\n  }}\n}}\n'


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


# Plan files: the fields of their objects, checked and frozen.


MAX_NAME = 500  # characters
ENTRY_FIELDS: dict[str, type | tuple[type, ...]] = {"layout": dict, "zero": int}


def read_fields(
    data: Any, known: Mapping[str, Any], where: str, required: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the object's fields, each known and of its type, lists as tuples."""
    if not isinstance(data, dict):
        raise PlanError(f"expected an object, found {type(data).__name__}", where=where)
    for key, value in data.items():
        if key not in known:
            raise PlanError(f"unknown field {key!r}{did_you_mean(key, known)}", where=where)
        wanted = known[key] if isinstance(known[key], tuple) else (known[key],)
        if type(value) not in wanted:
            names = " or ".join(kind.__name__ for kind in wanted)
            raise PlanError(
                f"field {key!r} should be {names}, found {shortened(value)}", where=where
            )
    missing = [key for key in required if key not in data]
    if missing:
        raise PlanError(f"field {missing[0]!r} is missing", where=where)
    return {key: _frozen(value) for key, value in data.items()}


def shortened(value: Any) -> str:
    """Return a value of a file for a message: never longer than a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def json_value(value: Any) -> Any:
    """Return a field's value as JSON has it."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    return [json_value(item) for item in value] if isinstance(value, tuple | list) else value


def json_types(hint: Any) -> tuple[type, ...]:
    """Return the types of JSON values that a field with this type hint may have.

    >>> json_types(str | tuple[str, ...])
    (<class 'str'>, <class 'list'>)
    """
    if isinstance(hint, UnionType):
        return tuple(kind for part in get_args(hint) for kind in json_types(part))
    if hint in (str, int, bool, float):
        return (hint,)
    if hint is NoneType:
        return ()
    return (list,) if get_origin(hint) is tuple else (dict,)


def check_items(fields: Mapping[str, Any], where: str, text_lists: Iterable[str]) -> None:
    """What the lists and objects of a plan hold: text, dims of inputs, choices of nodes."""
    for key in ("name", "model", "fingerprint"):
        text = fields[key]
        if not text.isprintable() or len(text) > MAX_NAME:
            raise PlanError(
                f"{key} {text[:80]!r} is not a line of up to {MAX_NAME} characters", where=where
            )
    for row in fields.get("schedule", ()):
        listed = isinstance(row, tuple) and all(isinstance(action, str) for action in row)
        if not listed and not isinstance(fields["schedule"], str):
            raise PlanError(
                f"schedule should be a name or lists of actions, found {shortened(row)}",
                where=where,
                hint='"1f1b", or [["0F0", "0B0"]]: a list for each group of ranks',
            )
    for key in text_lists:
        for item in fields.get(key, ()):
            if not isinstance(item, str):
                raise PlanError(
                    f"{key} should be a list of text, found {shortened(item)}", where=where
                )
    for name, dim in fields.get("inputs", {}).items():
        if dim is not None and type(dim) is not int:
            raise PlanError(
                f"inputs[{name!r}] should be a dim or null, found {shortened(dim)}", where=where
            )
    for node, choices in fields.get("nodes", {}).items():
        texts = choices.values() if isinstance(choices, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise PlanError(
                f"nodes[{node!r}] should map mesh axes to choices, found {shortened(choices)}",
                where=where,
                hint='{"tp": "cut n"}; shardwise explain lists the choices',
            )
