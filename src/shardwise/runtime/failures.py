"""Find the cause of a failed or stalled step, and name the same cause on every rank.

When a rank dies during a step, its peers get errors that do not name it, and their peers only see
those give up. All of them therefore use the store, which needs none of the broken connections:

- A rank that leaves a step by an exception publishes it.
- The first rank that knows a cause records it: its own exception, or ranks without a heartbeat.
  All ranks raise this cause, whatever each of them observed.

A rank that loses a connection waits until a cause is recorded or it has detected dead ranks itself,
for at most ten seconds and never longer than its timeout. If the store is lost, its host is gone:
rank 0, or torchrun's agent. Since rank 0 may merely have given up, it stays for up to three seconds
until the others know the cause.

A rank that waits in gloo for a living peer cannot be interrupted: it returns when the peer closes
the connection, or at the process group's own timeout. A rank that failed and lives on therefore
closes its connections if, after three seconds, another rank waits for it in the same step. Nor can
gloo be stopped from finishing its work when the interpreter exits: after a failure, a process that
is still exiting after five seconds is ended with exit status 1.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from shardwise.errors import LinkError, RankError
from shardwise.runtime.rendezvous import (
    DEAD_AFTER_S,
    ENDED,
    HEARTBEAT_S,
    Connection,
    Heartbeat,
    Liveness,
    first_line,
    lost_store,
    meet,
    name_ranks,
    naming_the_host,
    start_heartbeat,
)

if TYPE_CHECKING:
    from shardwise.runtime.nccl_watch import NcclWatch
    from shardwise.runtime.transport.process_group import ProcessGroupTransport

GRACE_S = 10.0
LINGER_S = 3.0
CLOSE_S = 3.0
EXIT_S = 5.0
POLL_S = 0.05

_COMMUNICATION = re.compile(
    r"gloo/|\bgloo\b.*(fail|time)|NCCL|Connection (closed|reset|refused)|Broken pipe"
    r"|Timed out waiting|timeout caused pair closure|Socket Timeout|recvValue|sendBytes",
    re.IGNORECASE,
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason why all ranks fail, and the ranks to look at."""

    text: str
    ranks: list[int]

    @staticmethod
    def decode(text: str | None) -> Cause | None:
        return None if text is None else Cause(*json.loads(text))

    def as_error(self, rank: int, observed: str) -> RankError:
        """Return the error that a rank raises, with what it observed itself."""
        hint = f"look at the log of rank {self.ranks[0]}" if self.ranks else None
        return RankError(self.text, where=f"rank {rank} saw: {observed}", hint=hint)


class FailureReports:
    """The reports that this rank and the others published of a failure, and its common cause."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.connection = Connection(GRACE_S)
        self.liveness = Liveness(self.connection)
        self.groups: dict[dist.ProcessGroup, None] = {}  # of NCCL, to be aborted
        self.watch: NcclWatch | None = None
        self._published, self._recorded = False, ""  # to withdraw if the user continues

    @property
    def last_cause(self) -> Cause | None:
        """The cause that the heartbeat has read, which is available without the store."""
        return Cause.decode(self.heartbeat.cause)

    def others(self) -> list[int]:
        return [rank for rank in range(self.world) if rank != self.rank]

    def report_of(self, rank: int) -> str | None:
        return self.connection.read(f"report/{rank}")

    def cause(self) -> Cause | None:
        return Cause.decode(self.connection.read("cause"))

    def publish(self, text: str) -> None:
        self._published = True
        self.connection.write(f"report/{self.rank}", text)

    def record(self, cause: Cause) -> Cause:
        """Record the cause unless there is one; return the one that is recorded now."""
        text = json.dumps([cause.text, cause.ranks])
        recorded = self.connection.write_first("cause", text)
        if recorded == text:
            self._recorded = text
        return Cause.decode(recorded) or cause

    def withdraw(self) -> None:
        """Continue after an error that the user has handled."""
        if not self._published:
            return
        with contextlib.suppress(RuntimeError):
            self.connection.write(f"report/{self.rank}", "")
            if self._recorded:
                self.connection.write_first("cause", "", expected=self._recorded)
        self._published, self._recorded = False, ""

    def linger(self, cause: Cause) -> None:
        """Keep the store, which rank 0 may host, until the others know the cause."""
        if self.rank != 0:
            return
        deadline = time.monotonic() + LINGER_S
        waiting = [rank for rank in self.others() if rank not in cause.ranks]
        with contextlib.suppress(RuntimeError):
            while waiting and time.monotonic() < deadline:
                waiting = [
                    r for r in waiting if not (self.report_of(r) or self.liveness.heartbeat(r)[1])
                ]
                time.sleep(POLL_S)


_reports: FailureReports | None = None  # of the default process group


def report_of(rank: int) -> str | None:
    """Return the failure that a rank has published, if the store still answers."""
    with contextlib.suppress(RuntimeError):
        return None if _reports is None else _reports.report_of(rank)
    return None


def has_ended(rank: int) -> bool:
    """Return whether a rank has exited normally, or the store no longer answers."""
    with contextlib.suppress(RuntimeError):
        return _reports is None or _reports.liveness.heartbeat(rank)[0] == ENDED
    return True


def _failure_reports() -> FailureReports | None:
    global _reports
    heartbeat = start_heartbeat()
    if heartbeat is None:
        return None
    if _reports is None or _reports.heartbeat is not heartbeat:
        with naming_the_host():
            _reports = FailureReports(heartbeat)
    return _reports


@contextlib.contextmanager
def naming_failures(
    timeout_s: float, transport: ProcessGroupTransport | None = None, verb: str = ""
) -> Iterator[None]:
    """Turn a failure of communication within the body into a `RankError` that names its cause.

    Any other exception is published, so that the other ranks name it and this rank, and raised
    unchanged. Finding the cause takes at most `timeout_s`. All ranks use this around the same work.
    With the `transport` that the body uses, other ranks do not wait for this one after a failure;
    over NCCL, `nccl_watch` also watches the device. With a `verb`, all ranks meet first.
    """
    reports = _failure_reports()
    if reports is None:
        yield
        return
    reports.withdraw()
    if transport is not None:
        reports.heartbeat.body = reports.heartbeat.body[0] + 1, verb
        transport.failure = None
    try:
        with _watching(reports, transport, timeout_s):
            if verb:
                meet(verb, timeout_s)
            yield
    except BaseException as error:
        _limit_exit_time()
        if transport is not None:
            transport.failure = error
            args = (reports, weakref.ref(transport), set(transport.groups), timeout_s)
            threading.Thread(target=_close_if_awaited, args=args, daemon=True).start()
        if not _is_communication(error):
            text = f"{type(error).__name__}: {first_line(error)}"
            with contextlib.suppress(RuntimeError):
                own = Cause(f"rank {reports.rank} failed: {text}", [reports.rank])
                cause = reports.record(own)
                reports.publish(text)
                if isinstance(error, Exception):
                    reports.linger(cause)
            raise
        try:
            reports.publish(first_line(error))
            observed = _wait_for_cause(reports, min(timeout_s, GRACE_S), first_line(error))
            cause = reports.record(observed)
            reports.linger(cause)
        except RuntimeError:
            cause = reports.last_cause or Cause(*lost_store())
        raise cause.as_error(reports.rank, first_line(error)) from error


def _close_if_awaited(
    reports: FailureReports,
    reference: weakref.ref[ProcessGroupTransport],
    groups: set[dist.ProcessGroup],
    timeout_s: float,
) -> None:
    """Close this rank's connections if another rank waits for it in the body that failed here.

    Only a weak reference is held: the parallel module may be deleted. Torch keeps its groups.
    """
    (number, _), end = reports.heartbeat.body, time.monotonic() + timeout_s
    with contextlib.suppress(RuntimeError, ValueError):  # groups may have been destroyed
        time.sleep(CLOSE_S)
        while reports.heartbeat.body[0] == number and time.monotonic() < end:
            waiting = [r for r in reports.others() if not reports.report_of(r)]
            if any(reports.liveness.body(r)[0] == number for r in waiting):
                if (transport := reference()) is not None:
                    transport.note_failure()
                close_groups(groups)
                return
            time.sleep(HEARTBEAT_S)


def close_groups(groups: set[dist.ProcessGroup]) -> None:
    """Close the connections of groups that nothing else refers to, except the default one."""
    while groups:
        if (group := groups.pop()) is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _watching(
    reports: FailureReports, transport: ProcessGroupTransport | None, timeout_s: float
) -> contextlib.AbstractContextManager[None]:
    """Watch a step whose groups are NCCL's."""
    groups = [] if transport is None else transport.groups
    if not groups or str(dist.get_backend(groups[0])) != "nccl":
        return contextlib.nullcontext()
    from shardwise.runtime.nccl_watch import NcclWatch, abort_groups, kernels_end

    reports.groups.update(dict.fromkeys(groups))
    if reports.watch is None:
        reports.watch = NcclWatch(reports, lambda: abort_groups(list(reports.groups)))
    return reports.watch.step(timeout_s, kernels_end)


def _is_communication(error: BaseException) -> bool:
    if isinstance(error, (dist.DistError, LinkError)):
        return True
    return type(error) is RuntimeError and bool(_COMMUNICATION.search(str(error)))


def _wait_for_cause(reports: FailureReports, grace: float, observed_error: str) -> Cause:
    """Wait for a recorded cause, for the detection of dead ranks, or for the end of `grace`."""
    begin = time.monotonic()
    dead_after = min(DEAD_AFTER_S, 0.8 * grace)
    liveness = Liveness(reports.connection)
    while True:
        cause = reports.cause()
        if cause is not None:
            return cause
        observed = {r: liveness.observe(r) for r in reports.others() if not reports.report_of(r)}
        stopped = {r: beats for r, (beats, still_s) in observed.items() if still_s >= dead_after}
        dead = [r for r, beats in stopped.items() if beats not in (None, ENDED)]
        if dead:
            return Cause(f"{name_ranks(dead)} died: no heartbeat for {dead_after:g} s", dead)
        ended = [r for r, beats in stopped.items() if beats == ENDED]
        if ended:
            return Cause(f"{name_ranks(ended)} ended before the step did", ended)
        if not observed or time.monotonic() - begin >= grace:
            break
        time.sleep(POLL_S)
    context, silent = f"rank {reports.rank} saw: {observed_error}", list(observed)
    unknown = [r for r, (beats, _) in observed.items() if beats is None]
    if unknown:
        return Cause(f"{name_ranks(unknown)} never began a step; {context}", unknown)
    if silent:
        late = f"{name_ranks(silent)} did not arrive in time (slow, or waiting for another)"
        return Cause(f"no rank died, but {late}; {context}", silent)
    return Cause(f"no rank died, but connections broke; {context}", [])


_exit_limited = False


def _limit_exit_time() -> None:
    """Arrange to end the process if gloo's threads delay the exit of the interpreter."""
    global _exit_limited
    if not _exit_limited:
        _exit_limited = True
        null = open(os.devnull, "w")  # noqa: SIM115  stays open until the process is gone
        atexit.register(faulthandler.dump_traceback_later, EXIT_S, exit=True, file=null)


def lift_exit_limit() -> None:
    """Allow this process to exit slowly again: training has continued after the failure."""
    global _exit_limited
    _exit_limited = False
    atexit.unregister(faulthandler.dump_traceback_later)


# The edge at which a program of messages is stuck

Edge = tuple[int, int]
STALL_GRACE_S = 2.0
_STALL_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The edge and number of the message that a rank waits for, and its progress.

    `sent` and `posted` count the messages that it has begun to send to and receive from each rank.
    """

    edge: Edge
    message: int = 0
    sent: Mapping[int, int]
    posted: Mapping[int, int]

    @staticmethod
    def from_json(text: str) -> Wait:
        fields = json.loads(text)
        sent, posted = ({int(p): n for p, n in fields[k].items()} for k in ("sent", "posted"))
        sender, receiver = fields["edge"]
        return Wait(edge=(sender, receiver), message=fields["message"], sent=sent, posted=posted)


class StallDetector:
    """Find the edge at which a collective is stuck, the same on all waiting ranks.

    A rank that gives up publishes the edge on which it waited. If this rank waits for rank 1, and
    rank 1 for rank 3, which publishes nothing, all name the edge between 3 and 1. If every rank has
    given up, ranks wait for each other in a circle and a link is dead: the one whose message was
    sent according to its sender, and did not arrive. `name` is unique, and the same on all ranks
    of a group.
    """

    def __init__(self, name: str, rank: int, num_ranks: int) -> None:
        self.rank, self.others = rank, [r for r in range(num_ranks) if r != rank]
        self._prefix = f"stall/{name}"
        self._connection = Connection(STALL_GRACE_S)

    def find_edge(
        self, wait: Wait, published: Callable[[], None], grace_s: float = STALL_GRACE_S
    ) -> Edge:
        """Return the edge at fault; call `published` when this rank's wait is in the store."""
        waits = {self.rank: wait}
        answers = _within(lambda: self._publish(wait), grace_s)
        published()
        deadline = time.monotonic() + grace_s
        while answers and len(waits) <= len(self.others) and time.monotonic() < deadline:
            others = _within(self._waits_of_others, deadline - time.monotonic() + _STALL_POLL_S)
            if others is None:
                break
            waits.update(others)
            time.sleep(_STALL_POLL_S)
        return follow(waits, self.rank)

    def _publish(self, wait: Wait) -> bool:
        self._connection.write(f"{self._prefix}/{self.rank}", json.dumps(asdict(wait)))
        return True

    def _waits_of_others(self) -> dict[int, Wait]:
        texts = {other: self._connection.read(f"{self._prefix}/{other}") for other in self.others}
        return {other: Wait.from_json(text) for other, text in texts.items() if text is not None}


def follow(waits: Mapping[int, Wait], rank: int) -> Edge:
    """Follow from each rank to the one it waits for; return the last edge, or a dead one."""
    path: list[int] = []
    while rank in waits and rank not in path:
        path.append(rank)
        rank = _other_end(waits[rank].edge, rank)
    if rank not in waits:
        return waits[path[-1]].edge
    circle = sorted(path[path.index(rank) :])
    dead = [waits[member].edge for member in circle if _is_in_flight(waits, member)]
    return dead[0] if dead else waits[circle[0]].edge


def _other_end(edge: Edge, rank: int) -> int:
    return edge[0] if edge[1] == rank else edge[1]


def _is_in_flight(waits: Mapping[int, Wait], rank: int) -> bool:
    """Return whether the other end has done its part for the message that a rank waits for."""
    wait = waits[rank]
    other = _other_end(wait.edge, rank)
    begun = waits[other].sent if other == wait.edge[0] else waits[other].posted
    return begun.get(rank, 0) > wait.message


def _within(request: Callable[[], T], limit_s: float) -> T | None:
    """Return the answer of the store; None if it does not answer in time."""
    answers: list[T] = []

    def work() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(request())

    thread = threading.Thread(target=work, name="shardwise-stall", daemon=True)
    thread.start()
    thread.join(max(0.0, limit_s))
    return answers[0] if answers else None
