"""Names, verbs and options that errors and pages tell people to type exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import shardwise as sw
from shardwise.cli import app

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "shardwise").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAME = re.compile(r"(?<![\w./-])sw\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
VERB = re.compile(r"(?<![\w.\"/-])shardwise ([a-z]+)(?: ([a-z]+))?\b([^\n`;]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# Options of other programs: torchrun, docker, pip.
FOREIGN = {
    "--nproc-per-node",
    "--nnodes",
    "--master-port",
    "--master-addr",
    "--no-python",
    "--standalone",
    "--rdzv-endpoint",
    "--ipc",
    "--shm-size",
    "--gpus",
    "--rm",
    "--upgrade",
    "--node-rank",
}
WORDS = ("as", "import", "program")  # follow the project's name in sentences


@functools.cache
def commands() -> dict[str, set[str]]:
    """Return the options of every verb."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
        yield name, {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for verb, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {verb}".strip())

    options = dict(walk(typer.main.get_command(app), ""))
    return {name: own | options[""] | {"--help"} for name, own in options.items()}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every string of a module, including docstrings, with `…` for inserted values."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            yield node.lineno, str(node.value)


def missing_name(path: str) -> bool:
    """Return whether the public API lacks a name; attributes of values are not followed."""
    first, *attributes = path.split(".")
    if first not in sw.__all__:
        return True
    value = getattr(sw, first)
    for name in attributes:
        if not hasattr(value, name):
            return not hasattr(type(value), name) and not _is_field(value, name)
        value = getattr(value, name)
    return False


def _is_field(kind: Any, name: str) -> bool:
    return name in getattr(kind, "__dataclass_fields__", {})


def mistakes(text: str) -> Iterator[str]:
    """Yield the names, verbs and options in a text that do not exist."""
    for match in NAME.finditer(text):
        if missing_name(match[1]):
            yield f"sw.{match[1]}"
    for verb, second, arguments in VERB.findall(text):
        both = f"{verb} {second}".strip()
        name = both if both in commands() else verb
        if name not in commands():
            if verb not in WORDS:
                yield f"shardwise {verb}"
            continue
        own = arguments.partition(" -- ")[0].partition("torchrun")[0]
        options = commands()[name] | FOREIGN
        yield from (f"shardwise {name} {o}" for o in OPTION.findall(own) if o not in options)


def hints(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of `hint=`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def test_names_verbs_and_options_in_code_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {mistake}"
        for path in SOURCES
        for line, text in texts(path)
        for mistake in mistakes(text)
    ]
    assert wrong == []


def test_names_verbs_and_options_on_pages_exist() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {mistake}"
        for path in PAGES
        if "decisions" not in path.parts  # decisions describe the past
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        for mistake in mistakes(line)
    ]
    assert wrong == []


def test_options_in_hints_exist() -> None:
    options = set().union(*commands().values()) | FOREIGN
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {option}"
        for path in SOURCES
        for line, text in hints(path)
        for option in OPTION.findall(text)
        if option not in options
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("sw.strategies.auto(graph)", ["sw.strategies.auto"]),
        ("sw.strategies.ddp(graph, cluster)", []),
        ("shardwise plna model.py:make", ["shardwise plna"]),
        ("shardwise plan m.py:make --clutser c.yaml", ["shardwise plan --clutser"]),
        ("shardwise collective solve c.yaml -o f", []),
    ],
)
def test_mistakes_are_detected(text: str, missing: list[str]) -> None:
    assert list(mistakes(text)) == missing
