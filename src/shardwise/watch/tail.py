"""The lines of a file that grows: each call gives those that are new.

Enters: a file of JSON lines that another process writes. Leaves: rows. The last line may be half
written: it is left for later. A file that became shorter, or another one of the same name (a
resumed run leaves out the steps that it does again), is read from its beginning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import WatchError

__all__ = ["Tail"]

CHUNK = 1 << 20
LONGEST_LINE = 1 << 20
HEAD = 256  # bytes by which a file is known again


class Tail:
    """Follows one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0  # lines that are no rows
        self._identity: tuple[int, bytes] | None = None
        self._offset = self._lines = 0

    def restarted(self) -> bool:
        """Whether the file is another one now, or was cut: what was read no longer counts."""
        if self._identity is None:
            return False
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                inode, head = self._identity
                same = found.st_ino == inode and found.st_size >= self._offset
                if same and file.read(len(head)) == head:
                    return False
        except OSError:
            return self._forget()
        return self._forget()

    def _forget(self) -> bool:
        self._identity, self._offset, self._lines, self.damaged = None, 0, 0, 0
        return True

    def rows(self) -> Iterator[dict[str, Any]]:
        """New rows, as far as their lines are complete."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        except OSError as error:
            raise WatchError(f"cannot be read: {error.strerror}", where=str(self.path)) from None
        with file:
            head = file.read(HEAD)
            if self._identity is None or len(self._identity[1]) < HEAD:
                self._identity = (os.fstat(file.fileno()).st_ino, head)
            file.seek(self._offset)
            for line in self._complete(file):
                row = self._row(line)
                if row is not None:
                    yield row

    def _complete(self, file: Any) -> Iterator[bytes]:
        rest = b""
        while piece := file.read(CHUNK):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LONGEST_LINE:
                raise self._foreign(f"line {self._lines + len(lines) + 1} does not end")
            for line in lines:
                self._offset += len(line) + 1
                self._lines += 1
                if line.strip():
                    yield line

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """Return a row, or nothing for a line that a crash cut off; a file without any row is
        another.
        """
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and _is_step(row.get("step")):
            return row
        if self._lines == self.damaged + 1:
            raise self._foreign(f"line {self._lines} is no JSON object with a step")
        self.damaged += 1
        return None

    def _foreign(self, reason: str) -> WatchError:
        return WatchError(
            f"holds no figures of a training: {reason}",
            where=str(self.path),
            hint="the folder of a run: shardwise train CONFIG.yaml writes runs/CONFIG",
        )


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
