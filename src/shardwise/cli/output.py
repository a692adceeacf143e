"""Plans of files, with errors that name the file and what to type."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import PlanError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.plans import Plan

__all__ = ["CODE", "KINDS", "require_own", "require_own_folder"]


WRITES = "shardwise plan MODULE.py:FUNCTION --cluster c.yaml -o {} writes a plan"


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Errors of plans are of this file."""
    try:
        yield
    except PlanError as error:
        place = error.where or ""
        if str(path) not in f"{place} {error.message}":
            place = f"{path}: {place}" if place else str(path)
        hint = error.hint or WRITES.format("plan.json")
        if str(path) not in hint:
            hint = hint.replace("plan.json", str(path))
        raise type(error)(error.message, where=place or None, hint=hint) from error


def load_plan(path: Path) -> Plan:
    """The plan of a file."""
    from shardwise.plans import Plan

    with about(path):
        return Plan.load(path)


# What may be overwritten: a file or folder that the same verb wrote, and nothing else.
#
# A file is known by marks in its beginning; empty files, devices and pipes are free.


HEAD_BYTES = 65536
CODE = ("ranks.json", "plan.json")  # in every folder of generated code


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of file: its name in a sentence, and marks of which one set is in its beginning."""

    name: str
    marks: tuple[tuple[bytes, ...], ...]

    def is_kind_of(self, head: bytes) -> bool:
        """Return whether a file that begins so is one."""
        return any(all(mark in head for mark in marks) for marks in self.marks)


KINDS = {
    "plan": Kind(name="a plan", marks=((b'"fingerprint"', b'"mesh"', b'"roles"'),)),
    "report": Kind(name="a report", marks=((b'<meta name="generator" content="Shardwise">',),)),
    "trace": Kind(name="a trace", marks=((b'"traceEvents"',), (b'"otherData"', b'"format"'))),
    "collective": Kind(
        name="a program of messages", marks=((b'"operation"', b'"num_ranks"', b'"numel"'),)
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
    ".md": "a text",
    ".txt": "a text",
    ".csv": "a table",
    ".safetensors": "a file of tensors",
    ".pt": "a file of tensors",
}


def require_own(path: Path | None, kind: str, *, option: str = "-o") -> None:
    """Refuse a path at which a file of another kind is, or at which none can be written."""
    if path is None:
        return
    from shardwise.reports.sections import require_writable, writing

    require_writable(path, option=option)
    if not path.is_file():
        return
    with writing(path, option=option), path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head and not KINDS[kind].is_kind_of(head):
        _refuse(path, _described(path, head), f"{KINDS[kind].name} would replace it", option)


def require_own_folder(path: Path, *, option: str = "-o") -> None:
    """Refuse a folder for code that holds anything but code that was generated before."""
    if not path.is_dir():
        return
    names = sorted(each.name for each in path.iterdir())
    if names and not set(CODE) <= set(names):
        what = f"a folder with {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
        _refuse(path, what, "the generated code needs a folder of its own", option)


def _described(path: Path, head: bytes) -> str:
    for kind in KINDS.values():
        if kind.is_kind_of(head):
            return kind.name
    return _BY_SUFFIX.get(path.suffix.lower(), "a file that Shardwise did not write")


def _refuse(path: Path, what: str, why: str, option: str) -> None:
    raise ShardwiseError(
        f"{path} is {what}, which is not overwritten: {why}",
        where=f"{option} {path}",
        hint=f"another name for {option}, or remove {path} first",
    )
