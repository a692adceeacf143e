"""Read plan files, print results and write files for the commands.

A command overwrites only files that it could have written itself: it recognizes an existing file by
marks at its beginning, and refuses one of another kind before any long work. Empty files, devices
and pipes may always be written.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from shardwise import files
from shardwise.errors import InfeasiblePlan, PlanError, ShardwiseError
from shardwise.formatting import NARROWEST

if TYPE_CHECKING:
    from shardwise.plans import Plan

FAILURE, INFEASIBLE = 1, 3  # exit codes; 2 is typer's for wrong usage
CODE = ("ranks.json", "plan.json")  # in every folder of generated code
HEAD_BYTES = 65536
PLAN_HINT = "shardwise plan MODULE.py:FUNCTION --cluster c.yaml -o {} writes a plan"
PERFETTO = "open it at https://ui.perfetto.dev"


def exit_code(error: ShardwiseError) -> int:
    """Return the exit code of a command that failed with this error."""
    return INFEASIBLE if isinstance(error, InfeasiblePlan) else FAILURE


# ------------------------------------------------------------ printing
def echo(value: object) -> None:
    """Print a dict or list as JSON, anything else as text that fits the terminal."""
    is_data = isinstance(value, dict | list)
    typer.echo(json.dumps(value, indent=2) if is_data else fit(str(value)))


def fit(text: str) -> str:
    """Wrap lines wider than the terminal with a deeper indent; leave text for a pipe unchanged."""
    width = shutil.get_terminal_size((0, 0)).columns
    if width < NARROWEST:
        return text
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        if len(line) <= width or line.lstrip().startswith("shardwise "):
            lines.append(line)  # commands stay on one line, so that they can be pasted
            continue
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
    return "\n".join(lines)


# ------------------------------------------------------------ plans
@contextmanager
def naming_plan(path: Path) -> Iterator[None]:
    """Add the plan file, and how to write one, to errors about a plan."""
    try:
        yield
    except PlanError as error:
        place = error.where or ""
        if str(path) not in f"{place} {error.message}":
            place = f"{path}: {place}" if place else str(path)
        hint = error.hint or PLAN_HINT.format("plan.json")
        if str(path) not in hint:
            hint = hint.replace("plan.json", str(path))
        raise type(error)(error.message, where=place or None, hint=hint) from error


def load_plan(path: Path) -> Plan:
    """Return the plan in a file."""
    from shardwise.plans import Plan

    with naming_plan(path):
        return Plan.load(path)


# ------------------------------------------------------------ files
@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of file: its name in messages, and alternative sets of marks at its beginning."""

    name: str
    marks: tuple[tuple[bytes, ...], ...]

    def matches(self, head: bytes) -> bool:
        """Return whether a file that begins with these bytes is of this kind."""
        return any(all(mark in head for mark in marks) for marks in self.marks)


KINDS = {
    "plan": Kind(name="a plan", marks=((b'"fingerprint"', b'"mesh"', b'"roles"'),)),
    "report": Kind(name="a report", marks=((b'<meta name="generator" content="Shardwise">',),)),
    "trace": Kind(name="a trace", marks=((b'"traceEvents"',), (b'"otherData"', b'"format"'))),
    "collective": Kind(
        name="a message program", marks=((b'"operation"', b'"num_ranks"', b'"numel"'),)
    ),
    "times": Kind(
        name="a table of measured times", marks=((b'"version"', b'"entries"', b'"programs"'),)
    ),
    "cluster": Kind(name="a cluster file", marks=((b"version:", b"devices:", b"kind:"),)),
    "predictions": Kind(name="a table of predictions", marks=((b"row_id,model,gpu",),)),
    "picture": Kind(name="a picture", marks=((b"<svg",),)),
    "job": Kind(
        name="a job file",
        marks=(
            (b"Submit with: sbatch", b"SHARDWISE_"),
            (b"kind: PyTorchJob",),
            (b"import ray", b"shardwise"),
        ),
    ),
    "program": Kind(name="an exported program", marks=((b"PK\x03\x04", b"archive_"),)),
}
_BY_SUFFIX = {
    ".py": "a Python file",
    ".yaml": "a YAML file",
    ".yml": "a YAML file",
    ".json": "a JSON file",
    ".md": "a text file",
    ".txt": "a text file",
    ".csv": "a table",
    ".safetensors": "a file of tensors",
    ".pt": "a file of tensors",
}


def write_output(path: Path, text: str, *, option: str = "-o") -> None:
    """Write a file atomically; errors suggest a value for `option`."""
    files.write_text(path, text, hint=_hint(path, option))


def writing(path: Path, *, option: str = "-o") -> AbstractContextManager[None]:
    """Turn operating system errors into an error about `path`."""
    return files.writing(path, hint=_hint(path, option))


def _hint(path: Path, option: str) -> str:
    folder = path / "FILE" if path.is_dir() else "with a writable folder"
    return f"{option} {folder}"


def require_own(path: Path | None, kind: str, *, option: str = "-o") -> None:
    """Refuse a path that holds a file of another kind, or that cannot be written."""
    if path is None:
        return
    files.require_writable(path, hint=_hint(path, option))
    if not path.is_file():
        return
    with writing(path, option=option), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head and not KINDS[kind].matches(head):
        _refuse(path, _describe(path, head), f"{KINDS[kind].name} would replace it", option)


def require_own_folder(path: Path) -> None:
    """Refuse a folder with anything but generated code."""
    if not path.is_dir():
        return
    names = sorted(file.name for file in path.iterdir())
    if names and not set(CODE) <= set(names):
        contents = f"a folder with {names[0]}" + (f" and {len(names) - 1} more" * bool(names[1:]))
        _refuse(path, contents, "generated code needs a separate folder", "-o")


def _describe(path: Path, head: bytes) -> str:
    by_suffix = _BY_SUFFIX.get(path.suffix.lower(), "a file that Shardwise did not write")
    return next((kind.name for kind in KINDS.values() if kind.matches(head)), by_suffix)


def _refuse(path: Path, what: str, why: str, option: str) -> NoReturn:
    raise ShardwiseError(
        f"refusing to overwrite {path}, {what}: {why}",
        where=f"{option} {path}",
        hint=f"another name for {option}, or remove {path} first",
    )
