"""What nodes print, line by line, each with the node's name.

Enters: bytes as they arrive. Leaves: whole lines on this process's streams; lines of different
nodes never mix. A progress bar that rewrites its line becomes a line now and then.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

COLOURS = (36, 33, 35, 32, 34, 31)
KEPT_LINES = 20
LONGEST_BYTES = 1 << 20  # a longer line is broken
REDRAWN_EVERY_S = 1.0


class Lines:
    """Cuts a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = 0.0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete with `data`."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        found = [_seen(line) for line in whole]
        if b"\r" in self._rest and time.monotonic() - self._shown_at > REDRAWN_EVERY_S:
            drawn, _, self._rest = self._rest.rpartition(b"\r")
            self._shown_at = time.monotonic()
            found += [_seen(drawn)] if drawn.strip() else []
        if len(self._rest) > LONGEST_BYTES:
            found.append(_seen(self._rest))
            self._rest = b""
        return found

    def end(self) -> list[str]:
        """What is left without an end of line."""
        rest, self._rest = self._rest, b""
        return [_seen(rest)] if rest.strip() else []


def _seen(line: bytes) -> str:
    """What a terminal would show: what follows the last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Printer:
    """Writes lines with the names of their nodes, and remembers the last ones of each."""

    def __init__(self, nodes: Sequence[str], out: TextIO, err: TextIO) -> None:
        self._streams = (out, err)
        width = max(map(len, nodes))
        self._prefixes = tuple(_prefixes(nodes, width, _has_colour(s)) for s in self._streams)
        self._last: dict[str, deque[str]] = {node: deque(maxlen=KEPT_LINES) for node in nodes}

    def write(self, node: str, lines: Sequence[str], *, to_err: bool) -> None:
        """Print whole lines of one node."""
        if not lines:
            return
        self._last[node].extend(lines)
        stream, prefix = self._streams[to_err], self._prefixes[to_err][node]
        stream.write("".join(f"{prefix}{line}\n" for line in lines))
        stream.flush()

    def say(self, text: str) -> None:
        """A word of the launcher itself."""
        self._streams[1].write(f"shardwise: {text}\n")
        self._streams[1].flush()

    def last(self, node: str) -> tuple[str, ...]:
        """Return the last lines of a node."""
        return tuple(self._last[node])


def _prefixes(nodes: Sequence[str], width: int, colour: bool) -> dict[str, str]:
    if not colour:
        return {node: f"[{node}]{' ' * (width - len(node))} " for node in nodes}
    return {
        node: f"\x1b[{COLOURS[i % len(COLOURS)]}m[{node}]\x1b[0m{' ' * (width - len(node))} "
        for i, node in enumerate(nodes)
    }


def _has_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")
