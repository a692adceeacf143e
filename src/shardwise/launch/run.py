"""Starts every node, shows what they print, and stops all when one fails or someone asks."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, TextIO

from shardwise.cluster import Cluster
from shardwise.launch.check import SSH_FAILED, check_nodes, explain_ssh
from shardwise.launch.hosts import (
    DEFAULTS,
    Environment,
    NodeCommand,
    Place,
    Settings,
    node_commands,
    places,
)
from shardwise.launch.node import BEAT, BEAT_EVERY_S, KILL, STOP

# What nodes print, line by line, each with the node's name.
#
# A progress bar that rewrites its line becomes a line now and then.


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


POLL_S = 0.1
SETTLE_S = 1.0  # nodes that fail together: the cause may be reported after its consequence
LATE_S = 5.0  # beyond a node's own grace, before its ssh is killed
DRAIN_S = 1.0  # for output after the end: a shared ssh connection can keep a pipe open
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(
    cluster: Cluster,
    argv: Sequence[str],
    *,
    port: int | None = None,
    ssh_program: str | None = None,
    environment: Environment = (),
    settings: Settings = DEFAULTS,
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Check all nodes, start them, and stay until all have ended."""
    found = places(cluster, ssh_program=ssh_program, environment=environment)
    printer = Printer([p.name for p in found], out or sys.stdout, err or sys.stderr)
    asked = cluster.port if port is None else port
    checked = check_nodes(found, argv, asked, settings.timeout_s)
    for warning in checked.warnings:
        printer.say(f"warning: {warning}")
    commands = node_commands(found, argv, port=checked.port, settings=settings)
    return Job(found, commands, printer, settings.grace_s).run()


@dataclass(slots=True, kw_only=True)
class Running:
    """One node's command, under way."""

    place: Place
    process: subprocess.Popen[bytes]
    open_pipes: int = 2
    ended_at: float | None = None
    failed: bool = False

    @property
    def code(self) -> int:
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def tell(self, word: bytes) -> None:
        """Say something to the node's guard; it may be gone."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(word)
            self.process.stdin.flush()


@dataclass(slots=True)
class Job:
    """All nodes of one launch."""

    found: Sequence[Place]
    commands: Sequence[NodeCommand]
    printer: Printer
    grace_s: float
    running: list[Running] = field(default_factory=list)
    interrupts: list[int] = field(default_factory=list)
    stopped_at: float | None = None
    beat_at: float = 0.0

    def run(self) -> int:
        """From the first start to the last end; nothing is left, whatever happens."""
        with _signals(self.interrupts), selectors.DefaultSelector() as selector:
            try:
                self._start(selector)
                self._watch(selector)
            except BrokenPipeError:  # whoever read our output is gone
                return 128 + signal.SIGPIPE
            finally:
                self._end()
        return self._verdict()

    def _start(self, selector: selectors.BaseSelector) -> None:
        for place, command in zip(self.found, self.commands, strict=True):
            pipe = subprocess.PIPE
            process = subprocess.Popen(  # its own session: Ctrl-C reaches only the launcher
                command.argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
            node = Running(place=place, process=process)
            self.running.append(node)
            for stream, to_err in ((process.stdout, False), (process.stderr, True)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, (node, Lines(), to_err))

    def _watch(self, selector: selectors.BaseSelector) -> None:
        failed_at: float | None = None
        while not all(self._is_over(node) for node in self.running):
            now = time.monotonic()
            self._beat(now)
            for key, _ in selector.select(POLL_S):
                self._read(selector, key)
            for node in self.running:
                self._note_end(node)
            if failed_at is None and any(node.failed for node in self.running):
                failed_at = time.monotonic()
            self._obey(failed_at)
        for key in list(selector.get_map().values()):
            self._read(selector, key, last=True)

    def _read(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, last: bool = False
    ) -> None:
        node, lines, to_err = key.data
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            data = b""
            if not last:
                return
        self.printer.write(node.place.name, lines.feed(data), to_err=to_err)
        if not data or last:
            self.printer.write(node.place.name, lines.end(), to_err=to_err)
            selector.unregister(key.fileobj)
            node.open_pipes -= 1

    def _note_end(self, node: Running) -> None:
        if node.ended_at is None and node.process.poll() is not None:
            node.ended_at = time.monotonic()
            node.failed = node.code != 0 and self.stopped_at is None

    def _is_over(self, node: Running) -> bool:
        if node.ended_at is None:
            return False
        return node.open_pipes == 0 or time.monotonic() - node.ended_at > DRAIN_S

    def _beat(self, now: float) -> None:
        if now - self.beat_at >= BEAT_EVERY_S:
            self.beat_at = now
            for node in self.running:
                node.tell(BEAT)

    def _obey(self, failed_at: float | None) -> None:
        """Stop the others after a failure, all after a signal; kill what does not end."""
        now = time.monotonic()
        if self.stopped_at is None:
            if self.interrupts:
                name = signal.Signals(self.interrupts[0]).name
                self.printer.say(f"{name}: stopping {len(self.running)} nodes (again: at once)")
                self._stop(now)
            elif failed_at is not None and now - failed_at > SETTLE_S:
                self._stop(now)
            return
        if len(self.interrupts) > 1:
            for node in self.running:
                node.tell(KILL)
            del self.interrupts[1:]
        if now - self.stopped_at > self.grace_s + LATE_S:
            self._kill()

    def _stop(self, now: float) -> None:
        self.stopped_at = now
        for node in self.running:
            node.tell(STOP)

    def _kill(self) -> None:
        for node in self.running:
            if node.process.poll() is None:
                node.process.kill()

    def _end(self) -> None:
        """Leave no process of ours; the ends of their inputs stop the nodes."""
        for node in self.running:
            for stream in (node.process.stdin, node.process.stdout, node.process.stderr):
                _close(stream)
        end = time.monotonic() + self.grace_s + LATE_S
        for node in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.1, end - time.monotonic()))
        self._kill()

    def _verdict(self) -> int:
        failed = [node for node in self.running if node.failed]
        if failed:
            return self._blame(failed)
        if self.interrupts:
            self.printer.say("all nodes are stopped")
            return 128 + self.interrupts[0]
        return 0

    def _blame(self, failed: Sequence[Running]) -> int:
        """Name the node that failed; an exit code of 1 is often that of a rank that lost a peer."""
        first = min(failed, key=lambda node: (node.code == 1, node.ended_at or 0.0))
        name = first.place.name
        lines = self.printer.last(name)
        how = f"failed with exit code {first.code}"
        if first.place.ssh is not None and first.code == SSH_FAILED:
            how = f"was lost: {explain_ssh(first.place, ' '.join(lines[-1:])).message}"
        others = [f"{n.place.name} (exit code {n.code})" for n in failed if n is not first]
        also = f"; also {', '.join(others)}" if others else ""
        if len(self.running) == 1:
            self.printer.say(f"node {name} {how}")
            return first.code
        self.printer.say(f"node {name} {how}{also}; all nodes are stopped. Its last lines:")
        for line in lines:
            self.printer.say(f"  {line}")
        return first.code


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.close()


@contextlib.contextmanager
def _signals(caught: list[int]) -> Iterator[None]:
    """Collect the signals that ask for an end; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
