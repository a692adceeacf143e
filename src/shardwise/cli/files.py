"""Plans of files, with errors that name the file and what to type.

Enters: the path that was typed. Leaves: a `Plan`; errors about it have its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from shardwise.plans import Plan

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
