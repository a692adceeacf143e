"""Turns what went wrong while tracing into a `CaptureError` at the user's line.

Enters: an exception from `torch.export`. Leaves: the error to raise, with the usual cure.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from shardwise.errors import CaptureError, ShardwiseError
from shardwise.frontend.cures import cure_for
from shardwise.frontend.provenance import Frame, is_user_code

_GENERAL = "check that model(**batch) runs, also where torch.compiler.is_compiling() is true"


def capture_error(error: BaseException, model_name: str) -> ShardwiseError:
    """Return the error to raise from `error`: our own as it is (with a place), others explained."""
    own = _own(error)
    frame = _user_frame(error)
    place = str(frame) if frame is not None else None
    if own is not None:
        if own.where is None and place:
            return type(own)(own.message, where=place, hint=own.hint)
        return own
    text = f"{type(error).__name__}: {error}"
    line = frame.text if frame is not None else ""
    cure = cure_for(text, line, experts=_in_experts(error))
    reason = f": {cure.reason}" if cure is not None else ""
    return CaptureError(
        f"{model_name} cannot be captured{reason}\n  because: {_first(text)}",
        where=place,
        hint=cure.hint if cure is not None else _GENERAL,
    )


@contextlib.contextmanager
def explained(model_name: str) -> Iterator[None]:
    """Turn any error that is not ours into a `CaptureError` at the user's line."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise capture_error(error, model_name) from error


def describe_failure(error: BaseException) -> tuple[str | None, str]:
    """Return the user's line that an error came from, if there is one, and its first words."""
    frame = _user_frame(error)
    return None if frame is None else str(frame), _first(f"{type(error).__name__}: {error}")


def _in_experts(error: BaseException | None) -> bool:
    """Return whether code of transformers that chooses experts has failed."""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            code = f"{frame.name} {frame.line}".lower()
            if "/transformers/" in frame.filename and ("expert" in code or "moe" in code):
                return True
        error = error.__cause__ or error.__context__
    return False


def _own(error: BaseException | None) -> ShardwiseError | None:
    """Our own error, also when torch wrapped it."""
    while error is not None:
        if isinstance(error, ShardwiseError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _user_frame(error: BaseException | None) -> Frame | None:
    """Return the innermost user frame of the exception or of one it was raised from."""
    found: Frame | None = None
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        users = [f for f in frames if is_user_code(f.filename)]
        if users:
            last = users[-1]
            found = Frame(last.filename, last.lineno or 0, last.name, (last.line or "").strip())
        error = error.__cause__ or error.__context__
    return found


def _first(text: str) -> str:
    """Return the first lines that say something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    short = " ".join(lines[:2])
    return short if len(short) <= 240 else short[:237] + "..."
