"""From an error inside emitted code to the line of the user's model that the code came from."""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Iterator

from shardwise.emit.load import FILENAME
from shardwise.errors import BatchError

_ORIGIN = re.compile(r"^\s*# (?P<place>.+ \(\S+:\d+\))\s*$")
_OUT_OF_RANGE = re.compile(r"out of (range|bounds)", re.IGNORECASE)


@contextlib.contextmanager
def naming_places() -> Iterator[None]:
    """Give errors about indices in emitted code the place in the model that they arose from."""
    try:
        yield
    except BatchError as error:
        place = None if error.where else origin(error)
        if place is None:
            raise
        raise BatchError(error.message, where=place, hint=error.hint) from error
    except (IndexError, RuntimeError) as error:
        place = origin(error) if _OUT_OF_RANGE.search(str(error)) else None
        if place is None:
            raise
        first = str(error).partition("\n")[0]
        raise BatchError(
            f"an index of the batch is out of range: {first}",
            where=place,
            hint="compare the batch with the size of what it indexes",
        ) from error


def origin(error: BaseException) -> str | None:
    """Return the place in the model of the emitted line that raised: `head (model.py:41)`.

    Emitted code carries it in the last comment above the line.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(FILENAME) or frame.lineno is None:
            continue
        lines = linecache.getlines(frame.filename)[: frame.lineno]
        for line in reversed(lines):
            if found := _ORIGIN.match(line):
                return re.sub(r"\s+", " ", found["place"])
            if line.lstrip().startswith("def "):
                break
    return None
