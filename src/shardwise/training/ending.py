"""How a rank ends after an error: the message is printed once, and without a traceback.

All ranks usually meet the same error. Rank 0 prints it; another rank prints its own only if rank 0
has met none, or another one. A rank that leaves the message to rank 0 waits until rank 0 has
ended: torchrun kills all others as soon as one has failed, and the message would be lost.

torchrun prints a report of its own, with the stack of its own process. It takes the cause from a
file for each rank, which gets the message.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from types import TracebackType

from shardwise.errors import RankError, ShardwiseError
from shardwise.runtime.failures import has_ended, report_of

__all__ = ["print_errors_once", "tell"]

WAIT_S = 2.0  # for rank 0 to meet the same error
STAY_S = 5.0  # for rank 0 to end after it has met the same error
_POLL_S = 0.05


def tell(error: ShardwiseError) -> None:
    """Print an error that ends this process, unless rank 0 prints it."""
    text, rank = f"{type(error).__name__}: {error}", int(os.environ.get("RANK", "0"))
    record(text)
    if rank == 0:
        _say(text)
    elif not _rank_0_tells(error, text.partition("\n")[0]):
        _say(f"rank {rank}: {text}")


def record(text: str) -> None:
    """Write the message where torchrun's report takes the cause of a failure from."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)


def print_errors_once() -> None:
    """In a script that torchrun has started, print Shardwise's errors without a traceback.

    `python -X dev` keeps the tracebacks.
    """
    before = sys.excepthook
    if "RANK" not in os.environ or sys.flags.dev_mode or getattr(before, "tells_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ShardwiseError):
            tell(error)
        elif isinstance(error, KeyboardInterrupt):
            if os.environ["RANK"] == "0":
                _say("interrupted")
        else:
            before(kind, error, trace)

    hook.tells_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _rank_0_tells(error: ShardwiseError, first_line: str) -> bool:
    """Wait for rank 0 to report this error; if it does, until it has ended."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        report = report_of(0)
        # All ranks name one cause for a rank that is lost, whatever each of them saw.
        if report is not None and (isinstance(error, RankError) or report == first_line):
            deadline = time.monotonic() + STAY_S
            while time.monotonic() < deadline and not has_ended(0):
                time.sleep(_POLL_S)
            return True
        time.sleep(_POLL_S)
    return False
