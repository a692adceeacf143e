"""Name the rank at fault when a step over NCCL does not end, and end it.

The host does not wait for NCCL: a step returns before its kernels have run, and kernels that wait
for a dead rank run forever. torch's watchdog only ends the process, at the group's timeout and
without naming a rank. `NcclWatch`, a thread, therefore looks for the cause while this rank is in a
step or its kernels run: a cause that another rank recorded, ranks without a heartbeat, or kernels
that have not ended in time. It records the cause, aborts the communicators, which ends their
kernels, and writes torch's flight recorder. The next step of this rank raises the cause. A process
that does not get there within ten seconds is ended, so that it does not occupy its GPU.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import RankError
from shardwise.files import write_text
from shardwise.runtime.failures import CLOSE_S, GRACE_S, Cause, FailureReports
from shardwise.runtime.rendezvous import DEAD_AFTER_S, Liveness, name_ranks

POLL_S = 0.2
# Of the time limit of a step, so that the cause is named before torch ends the process.
LIMIT = 0.9


class NcclWatch:
    """Watch the steps of this rank; `abort` ends their kernels, `end` the process."""

    def __init__(
        self,
        reports: FailureReports,
        abort: Callable[[], None],
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.reports = reports
        self.cause: Cause | None = None
        self._abort, self._end = abort, end or _end_process
        self._liveness = Liveness(reports.connection)
        self._inside = 0
        self._running: deque[tuple[Callable[[], bool], float]] = deque()  # steps on the device
        self._since = time.monotonic()  # the last progress
        self._failed_in = (-1, 0.0)  # the body in which this rank learned of a failure, and when
        self._raised = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwise-nccl", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def step(self, timeout_s: float, ended: Callable[[], Callable[[], bool]]) -> Iterator[None]:
        """Watch the body, and its kernels: `ended()` returns a function that tells their end."""
        self.raise_cause()
        self._inside += 1
        try:
            yield
            if not self._running:
                self._since = time.monotonic()
            self._running.append((ended(), timeout_s))
        finally:
            self._inside -= 1
        self.raise_cause()

    def raise_cause(self) -> None:
        """Raise the cause for which communicators were aborted."""
        if self.cause is not None:
            self._raised.set()
            raise self.cause.as_error(self.reports.rank, "its communicators were aborted")

    def _run(self) -> None:
        while self.cause is None and dist.is_initialized():
            time.sleep(POLL_S)
            with contextlib.suppress(RuntimeError):  # a lost store: the next look tries again
                self.cause = self._look()
        if self.cause is None:
            return
        _write_flight_recorder(self.reports.rank)
        self._abort()
        if not self._raised.wait(GRACE_S):
            self._end(f"RankError: {self.cause.text} (rank {self.reports.rank} was waiting)")

    def _look(self) -> Cause | None:
        """Return the cause of a failure, if this rank depends on other ranks now."""
        while self._running and self._running[0][0]():
            self._running.popleft()
            self._since = time.monotonic()
        if not self._running and not self._inside:
            return None
        if self.reports.last_cause is not None and self._still_waits():
            return self.reports.last_cause
        if dead := self._liveness.dead(self.reports.others()):
            text = f"{name_ranks(dead)} died: no heartbeat for {DEAD_AFTER_S:g} s"
            return self.reports.record(Cause(text, dead))
        limit_s = LIMIT * self._running[0][1] if self._running else float("inf")
        if time.monotonic() - self._since < limit_s:
            return None
        own = self.reports.heartbeat.num_runs
        late = [
            rank for rank in self.reports.others() if self._liveness.latest(rank).num_runs < own
        ]
        text = f"{name_ranks(late)} did not begin step {own}" if late else "no rank is behind, but"
        text += f": the kernels of rank {self.reports.rank} did not end within {limit_s:g} s"
        return self.reports.record(Cause(text, late))

    def _still_waits(self) -> bool:
        """Return whether this rank has been in one body for a while since it learned of a failure.

        If all ranks raise the same error, none waits for another, and training may go on.
        """
        (body, _), now = self.reports.heartbeat.body, time.monotonic()
        if self._failed_in[0] != body:
            self._failed_in = (body, now)
        return now - self._failed_in[1] >= CLOSE_S


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort the communicators of all groups at the same time.

    An abort frees memory, and CUDA then waits for all kernels of this rank, including those of
    communicators that have not been aborted yet. torch aborts in a thread of its own, so that
    NCCL's group calls do not join the aborts of several groups.
    """

    def abort(group: dist.ProcessGroup) -> None:
        with contextlib.suppress(RuntimeError):
            group.abort()

    threads = [threading.Thread(target=abort, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GRACE_S)


def kernels_end() -> Callable[[], bool]:
    """Return a function that tells whether the work that the device has now is done."""
    event: Any = torch.cuda.current_stream().record_event()
    return lambda: bool(event.query())


def _write_flight_recorder(rank: int) -> None:
    """Write the latest operations of this rank as JSON, where this build of torch records them."""
    names = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    dump = next(
        (d for name in names if (d := getattr(torch._C._distributed_c10d, name, None))), None
    )
    if dump is None:
        return
    path = Path(tempfile.gettempdir(), f"shardwise_flight_recorder_{os.getpid()}_rank{rank}.json")
    with contextlib.suppress(Exception):  # an aid for debugging must not replace the cause
        write_text(path, dump().decode(), RankError)
        sys.stderr.write(f"the latest operations of rank {rank} are in {path}\n")


def _end_process(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    os._exit(1)
