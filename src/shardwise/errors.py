"""The errors that Shardwise raises for users.

ShardwiseError
├── CaptureError      the model cannot be captured as a graph
├── LossError         the loss cannot be found in the model's output
├── ClusterError      a cluster or mesh is malformed (also a ValueError)
├── RuleError         a sharding rule is malformed, or does not allow a requested split
├── PlanError         a plan file or a plan's decision is wrong
│   └── PlanMismatch  the plan was made for another model or cluster
├── WeightsError      initial weights are missing, not numeric, or from another model
├── InfeasiblePlan    no plan satisfies the request (for example, no dim can be split)
├── ProgramError      a lowered program is inconsistent (a bug, or an edit by hand)
├── VerifyError       the check itself could not run (a difference is a Certificate, not an error)
├── BatchError        the program cannot take a batch, or batches differ between ranks
├── OptimizerError    an optimizer would be wrong on shards
├── ConfigError       training settings are wrong: a file, a key or a value
├── TrainingError     training cannot continue: loss not finite, or data ran out or changed
├── CheckpointError   a checkpoint is corrupt, incomplete, from another model, or not writable
├── TraceError        a recorded trace is corrupt, or from another plan
├── WatchError        a run's folder cannot be watched
├── RankError         ranks disagree, are missing, or died
│   └── LinkError     a message between two named ranks did not arrive
└── LaunchError       a node cannot be reached, or cannot start its ranks

A message has the numbers, the place (the user's file:line or a parameter name) and what to try.
"""

import contextlib
import difflib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar


class ShardwiseError(Exception):
    """The base class of all errors: a message, the place, and what to try."""

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.message = shown(message)
        self.where, self.hint = where and shown(where), hint and shown(hint)
        lines = [self.message]
        lines += [f"  at: {self.where}"] if where else []
        lines += [f"  try: {self.hint}"] if hint else []
        super().__init__("\n".join(lines))


ErrorKind = type[ShardwiseError]  # an argument of functions that raise their caller's errors


class CaptureError(ShardwiseError):
    """The model cannot be captured as a graph."""


class LossError(ShardwiseError):
    """The loss cannot be found in the model's output."""


class ClusterError(ShardwiseError, ValueError):
    """A cluster or mesh is malformed; `part` is the path of the field in a cluster file."""

    def __init__(
        self, message: str, *, part: tuple[str | int, ...] = (), **place: str | None
    ) -> None:
        super().__init__(message, **place)
        self.part = part


class RuleError(ShardwiseError):
    """A sharding rule is malformed, or does not allow a requested split."""


class PlanError(ShardwiseError):
    """A plan file or a decision in it is wrong."""


class PlanMismatch(PlanError):
    """The plan was made for another model or another cluster."""


class WeightsError(ShardwiseError):
    """Initial weights are missing, not numeric, or from another model."""


class InfeasiblePlan(ShardwiseError):
    """No plan satisfies the request; `report` has the figures of a search, if there was one."""

    def __init__(
        self, message: str, *, report: Mapping[str, Any] | None = None, **place: str | None
    ) -> None:
        super().__init__(message, **place)
        self.report: Mapping[str, Any] = report or {}


class ProgramError(ShardwiseError):
    """A lowered program is inconsistent."""


class VerifyError(ShardwiseError):
    """The check could not run."""


class BatchError(ShardwiseError):
    """The program cannot take a batch, or batches differ between ranks."""


class OptimizerError(ShardwiseError):
    """An optimizer would be wrong on shards."""


class CheckpointError(ShardwiseError):
    """A checkpoint is corrupt, incomplete, from another model, or not writable."""


class TraceError(ShardwiseError):
    """A recorded trace is corrupt, or from another plan."""


class WatchError(ShardwiseError):
    """A run's folder cannot be watched: it does not exist, or has no run."""


class LaunchError(ShardwiseError):
    """A node cannot be reached, or cannot start its ranks."""


class RankError(ShardwiseError):
    """Ranks disagree, are missing, or died."""


class LinkError(RankError):
    """A message did not arrive: `edges` are the affected pairs (sender, receiver)."""

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
    """Training settings are wrong: a file, a key or a value."""


class TrainingError(ShardwiseError):
    """Training cannot continue: the loss is not finite, or the data ran out or changed."""


_MAX_MESSAGE = 10_000  # characters


def shown(text: str) -> str:
    r"""Escape control characters in a text and limit its length.

    Messages quote files and names, which must not control the terminal or flood a log.

    >>> shown("plan \x1b[2J")
    'plan \\x1b[2J'
    """
    if len(text) > _MAX_MESSAGE:
        half = _MAX_MESSAGE // 2
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters … {text[-half:]}"
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


@contextlib.contextmanager
def explaining(explain: Callable[[Exception], ShardwiseError]) -> Iterator[None]:
    """Raise `explain(error)` in place of an exception that is not ours."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise explain(error) from error


_Error = TypeVar("_Error", bound=ShardwiseError)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word, or return an empty string.

    >>> did_you_mean("layuot", ["layout", "mesh"])
    "; did you mean 'layout'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def failed(
    kind: type[_Error], what: str, error: Exception, hint: str = "shardwise --debug …"
) -> _Error:
    """Return an error that names the line at which `what`, the user's code, failed."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
    message = f"{what} failed with {type(error).__name__}: {error}"
    return kind(message, where=where, hint=f"{hint} shows the traceback")
