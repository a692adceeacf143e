"""Every error a user can meet.

ShardwiseError
├── CaptureError      the model cannot be captured as a graph
├── LossError         the loss cannot be found in the model's output
├── ClusterError      a cluster or mesh is malformed (also a ValueError)
├── RuleError         a sharding rule is malformed, or a split it does not allow was asked for
├── PlanError         a plan file or a plan's decision is wrong
│   └── PlanMismatch  the plan was made for another model or cluster
├── WeightsError      initial weights are missing, not numbers, or of another model
├── InfeasiblePlan    no plan satisfies what was asked (for example: no dim to split)
├── ProgramError      a lowered program breaks its own rules (a fault of ours, or of a hand edit)
├── VerifyError       the check itself could not run (a difference is a Certificate, not an error)
├── BatchError        a batch the program cannot take, or batches that differ between ranks
├── OptimizerError    an optimizer that would be wrong on shards
├── ConfigError       a training's settings are wrong: a file, a key or a value of one
├── TrainingError     training cannot go on: the loss is no number, data ended or changed
├── CheckpointError   a checkpoint is damaged, incomplete or for another model, or cannot be written
├── TraceError        a recorded trace is damaged, or not of this plan
├── WatchError        a run's folder cannot be watched
├── RankError         ranks disagree, are missing, or died
│   └── LinkError     a message between two ranks did not come; it names them
└── LaunchError       a node cannot be reached, or cannot start its ranks

A message has numbers, the place (user's file:line or parameter name) and a hint one can type.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

__all__ = [
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "InfeasiblePlan",
    "LaunchError",
    "LinkError",
    "LossError",
    "OptimizerError",
    "PlanError",
    "PlanMismatch",
    "ProgramError",
    "RankError",
    "RuleError",
    "ShardwiseError",
    "TraceError",
    "TrainingError",
    "VerifyError",
    "WatchError",
    "WeightsError",
    "did_you_mean",
]


class ShardwiseError(Exception):
    """The root of all of Shardwise's errors: a message, where it arose, and what to try."""

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        message = shown(message)
        where, hint = where and shown(where), hint and shown(hint)
        self.message, self.where, self.hint = message, where, hint
        lines = [message]
        if where:
            lines.append(f"  at: {where}")
        if hint:
            lines.append(f"  try: {hint}")
        super().__init__("\n".join(lines))


class CaptureError(ShardwiseError):
    """The model cannot be captured as a graph."""


class LossError(ShardwiseError):
    """The loss cannot be found in the model's output."""


class ClusterError(ShardwiseError, ValueError):
    """A cluster or mesh is malformed; `part` leads to the field of a cluster file."""

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        part: tuple[str | int, ...] = (),
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.part = part


class RuleError(ShardwiseError):
    """A sharding rule is malformed, or a split that it does not allow was asked for."""


class PlanError(ShardwiseError):
    """A plan file or a decision in it is wrong."""


class PlanMismatch(PlanError):
    """The plan was made for another model or another cluster."""


class WeightsError(ShardwiseError):
    """Initial weights are missing, not numbers, or of another model."""


class InfeasiblePlan(ShardwiseError):
    """No plan satisfies what was asked; `report` has the figures, where a search found some."""

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        report: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.report: Mapping[str, Any] = report or {}


class ProgramError(ShardwiseError):
    """A lowered program breaks its own rules."""


class VerifyError(ShardwiseError):
    """The check could not run."""


class BatchError(ShardwiseError):
    """A batch that the program cannot take, or that differs between ranks."""


class OptimizerError(ShardwiseError):
    """An optimizer that would be wrong on shards."""


class CheckpointError(ShardwiseError):
    """A checkpoint is damaged, incomplete or for another model, or cannot be written."""


class TraceError(ShardwiseError):
    """A recorded trace is damaged, or not of this plan."""


class WatchError(ShardwiseError):
    """A run's folder cannot be watched: it is not there, or holds no run."""


class LaunchError(ShardwiseError):
    """A node cannot be reached, or cannot start its ranks."""


class RankError(ShardwiseError):
    """Ranks disagree, are missing, or died."""


class LinkError(RankError):
    """A message did not come: `edges` are (sender, receiver), the lost ones."""

    def __init__(
        self,
        message: str,
        *,
        edges: Iterable[tuple[int, int]],
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.edges = tuple(edges)
        named = ", ".join(f"edge {sender} -> {receiver}" for sender, receiver in self.edges)
        super().__init__(message, where=f"{named}; {where}" if where else named, hint=hint)


class ConfigError(ShardwiseError, ValueError):
    """A training's settings are wrong: a file, a key or a value of one."""


class TrainingError(ShardwiseError):
    """Training cannot go on: the loss is no number, or data ended or changed."""


_MAX_MESSAGE = 10_000  # characters


def shown(text: str) -> str:
    r"""Return a text as it may be printed: without control characters, and of a bounded length.

    Messages quote files and names, which must not move a terminal's cursor or fill a log.

    >>> shown("plan \x1b[2J")
    'plan \\x1b[2J'
    """
    if len(text) > _MAX_MESSAGE:
        half = _MAX_MESSAGE // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


_Error = TypeVar("_Error", bound=ShardwiseError)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'layout'?` or an empty string.

    >>> did_you_mean("layuot", ["layout", "mesh"])
    "; did you mean 'layout'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def failed(
    kind: type[_Error], what: str, error: Exception, hint: str = "shardwise --debug …"
) -> _Error:
    """The error for a user's own code that raised one: `what` failed, at its line."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
    message = f"{what} failed with {type(error).__name__}: {error}"
    return kind(message, where=where, hint=f"{hint} shows the traceback")
