"""Everything that errors and pages tell people to type exists: names, verbs and options."""

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
WORDS = ("as", "import", "program")  # that follow the project's name in sentences


@functools.cache
def commands() -> dict[str, set[str]]:
    """The options of every verb."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, set[str]]]:
        yield name, {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for each, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {each}".strip())

    found = dict(walk(typer.main.get_command(app), ""))
    return {name: options | found[""] | {"--help"} for name, options in found.items()}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every string of a module, with `…` where a value is filled in; docstrings, too."""
    tree = ast.parse(path.read_text("utf-8"))
    inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            yield node.lineno, str(node.value)


def missing_name(path: str) -> bool:
    """Whether the public API has no such name; attributes of values are not followed."""
    first, *rest = path.split(".")
    if first not in sw.__all__:
        return True
    found = getattr(sw, first)
    for each in rest:
        if not hasattr(found, each):
            return not hasattr(type(found), each) and not _is_field(found, each)
        found = getattr(found, each)
    return False


def _is_field(kind: Any, name: str) -> bool:
    return name in getattr(kind, "__dataclass_fields__", {})


def wrong(text: str) -> Iterator[str]:
    for match in NAME.finditer(text):
        if missing_name(match[1]):
            yield f"sw.{match[1]}"
    for verb, second, rest in VERB.findall(text):
        both = f"{verb} {second}".strip()
        name = both if both in commands() else verb
        if name not in commands():
            if verb not in WORDS:
                yield f"shardwise {verb}"
            continue
        own = rest.partition(" -- ")[0].partition("torchrun")[0]
        known = commands()[name] | FOREIGN
        yield from (f"shardwise {name} {o}" for o in OPTION.findall(own) if o not in known)


def hints(path: Path) -> Iterator[tuple[int, str]]:
    """The texts of `hint=`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "hint":
            for part in ast.walk(node.value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def test_what_code_tells_people_to_type_exists() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in SOURCES
        for line, text in texts(path)
        for what in wrong(text)
    ]
    assert found == []


def test_what_pages_tell_people_to_type_exists() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {what}"
        for path in PAGES
        if "decisions" not in path.parts  # which are of their time
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        for what in wrong(line)
    ]
    assert found == []


def test_options_in_hints_are_of_some_verb() -> None:
    every = set().union(*commands().values()) | FOREIGN
    found = [
        f"{path.relative_to(ROOT)}:{line}: {option}"
        for path in SOURCES
        for line, text in hints(path)
        for option in OPTION.findall(text)
        if option not in every
    ]
    assert found == []


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
def test_what_does_not_exist_is_found(text: str, missing: list[str]) -> None:
    assert list(wrong(text)) == missing
