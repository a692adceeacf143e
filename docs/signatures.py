"""Writes `reference/signatures.md`: the whole public API as plain Markdown, readable on GitHub.

python docs/signatures.py
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import typer

import shardwise as sw
from shardwise.cli import app
from shardwise.training import config as training_config

PAGE = Path(__file__).parent / "reference" / "signatures.md"
HEAD = """\
# Signatures

Every public name with its parameters, written by `python docs/signatures.py`. The other pages of
this reference explain them. `import shardwise as sw`.
"""
CONFIGS = (
    "TrainConfig",
    "DataConfig",
    "EvaluationConfig",
    "EarlyStopConfig",
    "CheckpointConfig",
    "OptimizerConfig",
    "GroupConfig",
    "LrScheduleConfig",
    "PlanConfig",
    "EmaConfig",
    "TraceConfig",
    "LogConfig",
)
MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])|\btyping\.")
OBJECT = r"<.* at 0x[0-9a-f]+>|<class [^>]*>"  # a default that has no text of its own
WIDTH = 100


def write() -> str:
    """Return the page's text."""
    functions = [n for n in sw.__all__ if inspect.isfunction(getattr(sw, n))]
    classes = [n for n in sw.__all__ if inspect.isclass(getattr(sw, n))]
    parts = [HEAD]
    parts += ["## Functions", *(_function(f"sw.{n}", getattr(sw, n)) for n in functions)]
    parts += ["## Strategies"]
    parts += [
        _function(f"sw.strategies.{n}", getattr(sw.strategies, n))
        for n in (*sw.strategies.strategy_names(), "make_plan")
    ]
    names = ("choose", "tune", "solve")
    parts += ["## Collectives"]
    parts += [_function(f"sw.collectives.{n}", getattr(sw.collectives, n)) for n in names]
    parts += ["## Classes", *(_class(f"sw.{n}", getattr(sw, n)) for n in classes)]
    parts += ["## Types", "In `sw.types`."]
    kinds = [n for n in sw.types.__all__ if inspect.isclass(getattr(sw.types, n))]
    parts += [_class(f"sw.types.{n}", getattr(sw.types, n)) for n in kinds]
    parts += ["## Fields of `sw.Trainer` and of config files"]
    parts += [_fields(name, getattr(training_config, name)) for name in CONFIGS]
    parts += ["## Command line", *_commands(typer.main.get_command(app), "shardwise")]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _function(name: str, function: Callable[..., Any]) -> str:
    return f"### `{name}`\n\n```python3\n{_signature(name, function)}\n```\n\n{_doc(function)}"


def _class(name: str, kind: type) -> str:
    lines = [f"### `{name}`", _doc(kind)]
    if dataclasses.is_dataclass(kind):
        fields = [f"{f.name}: {_short(f.type)}{_default(f)}" for f in dataclasses.fields(kind)]
        lines += ["```python3", *fields, "```"]
    elif "__init__" in vars(kind) and not inspect.isabstract(kind):
        lines += ["```python3", _signature(name, kind), "```"]
    bases = [base for base in kind.__mro__[:0:-1] if base.__name__[0] == "_"]  # private: shown here
    members = {each: value for base in (*bases, kind) for each, value in vars(base).items()}
    methods = [_method(each, value) for each, value in members.items() if each[0] != "_"]
    rows = [method for method in methods if method]
    body = "\n".join(lines[2:])
    table = "\n".join(["| | |", "|---|---|", *rows]) if rows else ""
    return "\n\n".join(part for part in (lines[0], lines[1], body, table) if part)


def _method(name: str, value: Any) -> str:
    function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    if isinstance(value, property):
        return f"| `{name}` | {_first_line(value.fget)} |"
    if not inspect.isfunction(function):
        return ""
    shown = _signature(name, function, wide=True).removeprefix("def ").replace("|", "\\|")
    shown = re.sub(r"\((?:self|cls)(?:, )?", "(", shown, count=1)
    return f"| `{shown}` | {_first_line(function)} |"


def _signature(name: str, function: Any, wide: bool = False) -> str:
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=_named(p.annotation)) for p in signature.parameters.values()]
    result = _named(signature.return_annotation)
    made = signature.replace(parameters=parameters, return_annotation=result)
    text = re.sub(OBJECT, "...", str(made))
    word = "" if inspect.isclass(function) else "def "
    line = f"{word}{name}{text}".replace("'", '"')
    line = re.sub(r'(: |-> |= )"([^"]*)"(?=[,)= ]|$)', _unquoted, line)
    if wide or len(line) <= WIDTH:
        return line
    pieces = [_parameter(p) for p in parameters]
    stars = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    if stars and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        pieces.insert(stars[0], "*")
    end = "" if result is inspect.Signature.empty else f" -> {result}"
    return "\n".join([f"{word}{name}(", *(f"    {piece}," for piece in pieces), f"){end}"])


def _unquoted(match: re.Match[str]) -> str:
    return match[0] if match[1] == "= " else f"{match[1]}{match[2]}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation}"
    if parameter.default is not parameter.empty:
        shown = re.sub(OBJECT, "...", repr(parameter.default)).replace("'", '"')
        text += f" = {shown}"
    return text


def _named(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    return _short(annotation)


def _plain(annotation: Any) -> Any:
    """Return a type without the metadata of `Annotated`, also inside of others."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(annotation.__origin__)
    arguments = getattr(annotation, "__args__", ())
    if not isinstance(arguments, tuple) or typing.get_origin(annotation) in (Callable, Literal):
        return annotation
    plain = tuple(_plain(argument) for argument in arguments)
    if plain == arguments:
        return annotation
    if isinstance(annotation, types.UnionType):
        return functools.reduce(operator.or_, plain)
    return annotation.__origin__[plain]


def _short(annotation: Any) -> str:
    is_text = isinstance(annotation, str)
    text = annotation if is_text else inspect.formatannotation(_plain(annotation))
    text = re.sub(r"Union\[(\w+), (Literal\[[^]]*\])\]", r"\1 | \2", text)
    return MODULES.sub("", text).replace("NoneType", "None").replace("'", '"')


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f" = {field.default!r}".replace("'", '"')
    return " = ..." if field.default_factory is not dataclasses.MISSING else ""


def _fields(name: str, kind: Any) -> str:
    hints = typing.get_type_hints(kind)
    lines = [f"{f.name}: {_short(hints[f.name])}{_default(f)}" for f in dataclasses.fields(kind)]
    return f"### `{name}`\n\n{_doc(kind)}\n\n```python3\n" + "\n".join(lines) + "\n```"


def _commands(command: Any, name: str) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner:
        rows = [_option(parameter) for parameter in command.params]
        text = (command.help or "").partition("\n")[0]
        yield f"### `{name}`\n\n{text}\n\n| | |\n|---|---|\n" + "\n".join(rows)
    for each in inner.values():
        yield from _commands(each, f"{name} {each.name}")


def _option(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name}`"
    text = getattr(parameter, "help", None) or ""
    return "| {} | {} |".format(*(each.replace("|", "\\|") for each in (names, text)))


def _doc(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    return re.sub(r"^>>> .*?(?=\n\n|\Z)", "", text, flags=re.S | re.M).strip()


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(write(), "utf-8")
