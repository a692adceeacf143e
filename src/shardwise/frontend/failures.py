"""Turns what went wrong while tracing into a `CaptureError` at the user's line.

Enters: an exception from `torch.export`. Leaves: the error to raise, with the usual cure.
"""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

from shardwise.errors import CaptureError, ShardwiseError
from shardwise.frontend.provenance import Frame, is_user_code


class Cure(NamedTuple):
    """A way to recognize a cause, its reason, and what to do about it."""

    pattern: str
    reason: str
    hint: str


_BRANCH = "use torch.where(condition, a, b), or decide with a Python value of the configuration"
_MOE = 'for Mixture-of-Experts of transformers: config._experts_implementation = "batched_mm"; '
_CURES = (
    Cure(
        r"nonzero|masked_select|unique|\.bincount|repeat_interleave\.Tensor",
        "the result's shape depends on the data",
        _MOE + "otherwise keep full-size tensors and mask with torch.where",
    ),
    Cure(
        r"Could not guard on data-dependent|GuardOnDataDependent|DataDependentOutput"
        r"|_local_scalar_dense|aten\.item|is_nonzero|aten\.equal|tolist",
        "Python code depends on a tensor's value (if, item(), int(), range over data)",
        _BRANCH + "; " + _MOE.rstrip("; "),
    ),
    Cure(
        r"data-dependent|DynamicOutputShape|unbacked|Unbacked",
        "the result's shape depends on the data",
        _MOE + "otherwise keep full-size tensors and mask with torch.where",
    ),
    Cure(
        r"\.numpy\(\)|numpy|data_ptr|Cannot access data pointer",
        "forward leaves PyTorch (numpy, a raw pointer)",
        "use torch operations, or wrap the code in torch.library.custom_op",
    ),
    Cure(
        r"were assigned during export",
        "forward assigns a tensor attribute that is kept for the next step",
        'self.register_buffer("name", tensor) makes it part of the state',
    ),
    Cure(
        r"no fake impl|fake impl|not implemented for.*[Mm]eta|Meta.*backend",
        "an operator has no shape function",
        "register one with torch.library.register_fake",
    ),
)


def capture_error(error: BaseException, model_name: str) -> ShardwiseError:
    """The error to raise from `error`: our own as it is (with a place), others explained."""
    own = _own(error)
    frame = _user_frame(error)
    place = str(frame) if frame is not None else None
    if own is not None:
        if own.where is None and place:
            return type(own)(own.message, where=place, hint=own.hint)
        return own
    text = f"{type(error).__name__}: {error}"
    for cure in _CURES:
        if re.search(cure.pattern, text):
            reason = f"{model_name} cannot be captured: {cure.reason}"
            return CaptureError(f"{reason}\n  because: {_first(text)}", where=place, hint=cure.hint)
    return CaptureError(
        f"{model_name} cannot be captured\n  because: {_first(text)}",
        where=place,
        hint="check that model(**batch) runs, also where torch.compiler.is_compiling() is true",
    )


def describe_failure(error: BaseException) -> tuple[str | None, str]:
    """The user's line that an error came from, if there is one, and its first words."""
    frame = _user_frame(error)
    return None if frame is None else str(frame), _first(f"{type(error).__name__}: {error}")


def _own(error: BaseException | None) -> ShardwiseError | None:
    """Our own error, also when torch wrapped it."""
    while error is not None:
        if isinstance(error, ShardwiseError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _user_frame(error: BaseException | None) -> Frame | None:
    """The innermost user frame of the exception or of one it was raised from."""
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
    """The first lines that say something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    short = " ".join(lines[:2])
    return short if len(short) <= 240 else short[:237] + "..."
