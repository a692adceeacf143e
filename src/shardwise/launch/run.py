"""Start every node, print their output, and stop all of them on a failure or a signal."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TextIO

from shardwise.cluster import Cluster
from shardwise.launch.check import SSH_FAILED, check_nodes, explain_ssh
from shardwise.launch.hosts import (
    DEFAULTS,
    Environment,
    Host,
    NodeCommand,
    Settings,
    cluster_hosts,
    node_commands,
)
from shardwise.launch.node import (
    HEARTBEAT,
    HEARTBEAT_INTERVAL_S,
    KILL,
    SIGNAL_STATUS,
    STOP,
    exit_status,
)
from shardwise.processes import handled_signals

COLOURS = (36, 33, 35, 32, 34, 31)
LAST_LINES = 20  # of a failed node, shown again
MAX_LINE_BYTES = 1 << 20  # a longer line is broken
REDRAW_INTERVAL_S = 1.0
POLL_S = 0.1
SETTLE_S = 1.0  # when nodes fail together, the cause may be reported after its consequence
LATE_S = 5.0  # beyond a node's own grace period, before its ssh is killed
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
    """Check all nodes, start them, and return their exit code when all have ended."""
    hosts = cluster_hosts(cluster, ssh_program=ssh_program, environment=environment)
    printer = Printer([host.name for host in hosts], out or sys.stdout, err or sys.stderr)
    port = cluster.port if port is None else port
    port, warnings = check_nodes(hosts, argv, port, settings.timeout_s)
    for warning in warnings:
        printer.say(f"warning: {warning}")
    commands = node_commands(hosts, argv, port=port, settings=settings)
    return Job(hosts, commands, printer, settings.grace_s).run()


# ------------------------------------------------------------ output
class Lines:
    """Split a stream of bytes into lines; a progress bar that redraws its line is thinned out."""

    def __init__(self) -> None:
        self._partial = b""
        self._redrawn_at = 0.0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        *complete, self._partial = (self._partial + data).split(b"\n")
        lines = [_visible(line) for line in complete]
        if b"\r" in self._partial and time.monotonic() - self._redrawn_at > REDRAW_INTERVAL_S:
            drawn, _, self._partial = self._partial.rpartition(b"\r")
            self._redrawn_at = time.monotonic()
            lines += [_visible(drawn)] if drawn.strip() else []
        if len(self._partial) > MAX_LINE_BYTES:
            lines.append(_visible(self._partial))
            self._partial = b""
        return lines

    def end(self) -> list[str]:
        """Return the last line if it has no line break."""
        partial, self._partial = self._partial, b""
        return [_visible(partial)] if partial.strip() else []


def _visible(line: bytes) -> str:
    """Return what a terminal would show: the text after the last carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")


class Printer:
    """Print lines with the names of their nodes, and keep the last ones of each node."""

    def __init__(self, nodes: Sequence[str], out: TextIO, err: TextIO) -> None:
        self._streams = (out, err)
        self._prefixes = tuple(_prefixes(nodes, stream) for stream in self._streams)
        self._last: dict[str, deque[str]] = {node: deque(maxlen=LAST_LINES) for node in nodes}

    def write(self, node: str, lines: Sequence[str], *, to_err: bool) -> None:
        """Print complete lines of one node."""
        if not lines:
            return
        self._last[node].extend(lines)
        stream, prefix = self._streams[to_err], self._prefixes[to_err][node]
        stream.write("".join(f"{prefix}{line}\n" for line in lines))
        stream.flush()

    def say(self, text: str) -> None:
        """Print a message of the launcher itself."""
        self._streams[1].write(f"shardwise: {text}\n")
        self._streams[1].flush()

    def last(self, node: str) -> tuple[str, ...]:
        """Return the last lines of a node."""
        return tuple(self._last[node])


def _prefixes(nodes: Sequence[str], stream: TextIO) -> dict[str, str]:
    width = max(map(len, nodes))
    coloured = stream.isatty() and not os.environ.get("NO_COLOR")
    prefixes = {}
    for i, node in enumerate(nodes):
        name = f"\x1b[{COLOURS[i % len(COLOURS)]}m[{node}]\x1b[0m" if coloured else f"[{node}]"
        prefixes[node] = f"{name}{' ' * (width - len(node))} "
    return prefixes


# ------------------------------------------------------------ processes
@dataclass(slots=True, kw_only=True)
class Running:
    """The running command of one node."""

    host: Host
    process: subprocess.Popen[bytes]
    open_pipes: int = 2
    ended_at: float | None = None
    failed: bool = False

    @property
    def code(self) -> int:
        return exit_status(self.process.returncode)

    def send(self, message: bytes) -> None:
        """Send a message to the node's guard, which may be gone."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(message)
            self.process.stdin.flush()


@dataclass(slots=True)
class Job:
    """All nodes of one launch."""

    hosts: Sequence[Host]
    commands: Sequence[NodeCommand]
    printer: Printer
    grace_s: float
    running: list[Running] = field(default_factory=list)
    interrupts: list[int] = field(default_factory=list)
    stopped_at: float | None = None
    heartbeat_at: float = 0.0

    def run(self) -> int:
        """Run all nodes until they end; no process is left behind, whatever happens."""

        def collect(number: int, frame: FrameType | None) -> None:
            self.interrupts.append(number)

        with handled_signals(SIGNALS, collect), selectors.DefaultSelector() as selector:
            try:
                self._start(selector)
                self._watch(selector)
            except BrokenPipeError:  # the reader of our output is gone
                return SIGNAL_STATUS + signal.SIGPIPE
            finally:
                self._end()
        return self._verdict()

    def _start(self, selector: selectors.BaseSelector) -> None:
        for host, command in zip(self.hosts, self.commands, strict=True):
            pipe = subprocess.PIPE
            process = subprocess.Popen(  # its own session: Ctrl-C reaches only the launcher
                command.argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
            node = Running(host=host, process=process)
            self.running.append(node)
            for stream, to_err in ((process.stdout, False), (process.stderr, True)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, (node, Lines(), to_err))

    def _watch(self, selector: selectors.BaseSelector) -> None:
        failed_at: float | None = None
        while not all(self._is_over(node) for node in self.running):
            self._send_heartbeats()
            for key, _ in selector.select(POLL_S):
                self._read(selector, key)
            for node in self.running:
                if node.ended_at is None and node.process.poll() is not None:
                    node.ended_at = time.monotonic()
                    node.failed = node.code != 0 and self.stopped_at is None
            if failed_at is None and any(node.failed for node in self.running):
                failed_at = time.monotonic()
            self._stop_if_needed(failed_at)
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
        self.printer.write(node.host.name, lines.feed(data), to_err=to_err)
        if not data or last:
            self.printer.write(node.host.name, lines.end(), to_err=to_err)
            selector.unregister(key.fileobj)
            node.open_pipes -= 1

    def _is_over(self, node: Running) -> bool:
        if node.ended_at is None:
            return False
        return node.open_pipes == 0 or time.monotonic() - node.ended_at > DRAIN_S

    def _send_heartbeats(self) -> None:
        now = time.monotonic()
        if now - self.heartbeat_at >= HEARTBEAT_INTERVAL_S:
            self.heartbeat_at = now
            for node in self.running:
                node.send(HEARTBEAT)

    def _stop_if_needed(self, failed_at: float | None) -> None:
        """Stop all nodes after a failure or a signal; kill those that do not end in time."""
        now = time.monotonic()
        if self.stopped_at is None:
            if self.interrupts:
                name = signal.Signals(self.interrupts[0]).name
                self.printer.say(
                    f"{name}: stopping {len(self.running)} nodes; repeat it to kill them"
                )
                self._stop(now)
            elif failed_at is not None and now - failed_at > SETTLE_S:
                self._stop(now)
            return
        if len(self.interrupts) > 1:
            for node in self.running:
                node.send(KILL)
            del self.interrupts[1:]
        if now - self.stopped_at > self.grace_s + LATE_S:
            self._kill()

    def _stop(self, now: float) -> None:
        self.stopped_at = now
        for node in self.running:
            node.send(STOP)

    def _kill(self) -> None:
        for node in self.running:
            if node.process.poll() is None:
                node.process.kill()

    def _end(self) -> None:
        """Close all pipes, wait, and kill what remains: a guard stops when its input ends."""
        for node in self.running:
            for stream in (node.process.stdin, node.process.stdout, node.process.stderr):
                assert stream is not None
                with contextlib.suppress(OSError):
                    stream.close()
        end = time.monotonic() + self.grace_s + LATE_S
        for node in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.1, end - time.monotonic()))
        self._kill()

    def _verdict(self) -> int:
        failed = [node for node in self.running if node.failed]
        if failed:
            return self._report_failure(failed)
        if self.interrupts:
            self.printer.say("all nodes have stopped")
            return SIGNAL_STATUS + self.interrupts[0]
        return 0

    def _report_failure(self, failed: Sequence[Running]) -> int:
        """Name the node that failed first; return its exit code.

        Nodes that failed with code 1 come last: it is usually that of ranks that lost a peer.
        """
        first = min(failed, key=lambda node: (node.code == 1, node.ended_at or 0.0))
        name = first.host.name
        lines = self.printer.last(name)
        reason = f"failed with exit code {first.code}"
        if first.host.ssh is not None and first.code == SSH_FAILED:
            reason = f"was lost: {explain_ssh(first.host, ' '.join(lines[-1:])).message}"
        if len(self.running) == 1:
            self.printer.say(f"node {name} {reason}")
            return first.code
        other = [
            f"{node.host.name} (exit code {node.code})" for node in failed if node is not first
        ]
        also = f"; also {', '.join(other)}" if other else ""
        self.printer.say(f"node {name} {reason}{also}; all nodes have stopped. Its last lines:")
        for line in lines:
            self.printer.say(f"  {line}")
        return first.code
