"""`{command-line}`: the options of every verb of `shardwise`, from the program itself.

Render the typer application as a section for each verb, with its help and options.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from shardwise.cli import app


class CommandLine(SphinxDirective):
    """All verbs in the order of `shardwise --help`."""

    def run(self) -> list[nodes.Node]:
        command = typer.main.get_command(app)
        text: list[str] = []
        for name, verb in verbs(command, "shardwise"):
            text += [f"## {name}", "", *(verb.help or "").splitlines(), ""]
            text += ["```text", usage(name, verb), "```", "", *options(verb), ""]
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands below a group, with their full names."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def usage(name: str, verb: Any) -> str:
    """`shardwise plan [OPTIONS] MODULE.py:FUNCTION`."""
    return " ".join([name, *verb.collect_usage_pieces(typer.Context(verb))])


def options(verb: Any) -> list[str]:
    """Return a table of the options, if there are any."""
    records = [
        option.get_help_record(typer.Context(verb))
        for option in verb.params
        if option.param_type_name == "option"
    ]
    rows = [f"| `{one_line(names)}` | {one_line(text)} |" for names, text in filter(None, records)]
    return ["| option | |", "|---|---|", *rows] if rows else []


def one_line(text: str) -> str:
    """Fit for a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
