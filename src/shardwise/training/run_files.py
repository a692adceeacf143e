"""All that a run writes besides checkpoints: its settings, logs, `run.json`, and the terminal.

On
ranks other than the first nothing is written and nothing said.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import resource
import time
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch

from shardwise.errors import CheckpointError, ShardwiseError, TraceError, TrainingError
from shardwise.files import parse_json, write_text, writing
from shardwise.planner.figures import with_figures
from shardwise.plans import Plan
from shardwise.runtime import ParallelModule
from shardwise.runtime.rendezvous import open_rendezvous
from shardwise.runtime.tracing import own_seconds
from shardwise.training.config import TrainConfig, config_to_json
from shardwise.training.logs import Log, make_console, make_logs
from shardwise.training.logs.files import JsonlLog
from shardwise.training.planning import Planned
from shardwise.training.session import Session

__all__ = [
    "FORMAT",
    "LOCK_FILE",
    "RUN_FILE",
    "VERSION",
    "Records",
    "RunFile",
    "RunOutputs",
    "locked_folder",
    "peak_memory_bytes",
    "predicted_step_s",
    "ranks_row",
]


# `run.json`: what a run is, that it goes on, and how it ended; for those who watch it.
#
# Its figures come from `metrics.jsonl` and `ranks.jsonl` beside it.


FORMAT, VERSION, RUN_FILE = "shardwise-run", 1, "run.json"
ROOM_BYTES = 4096  # so that a full disk has room for how the run ended


class RunFile:
    """The file of one run; without a folder there is none."""

    def __init__(self, folder: Path | None, session: Session) -> None:
        self._path = None if folder is None else folder / RUN_FILE
        plan = session.planned.plan
        predicted = predicted_step_s(plan)
        self._data: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "model": plan.model,
            "plan": plan.name,
            "ranks": session.world.size,
            "device": session.world.device.type,
            "batch_size": session.source.batch_size,
            "first_step": session.step,
            "total_steps": session.totals()["total_steps"],
            "predicted_step_s": predicted,
            "known_machines": session.planned.known_machines,
            "host": platform.node(),
            "pid": os.getpid(),
            "started_at": time.time(),
            "state": "running",
        }
        self._write()

    def end(self, state: str, error: str | None = None) -> None:
        """The run has ended: "finished", "callback", "signal" or "failed"."""
        more = {} if error is None else {"error": error}
        self._data |= {"state": state, "ended_at": time.time(), **more}
        self._write()

    def _write(self) -> None:
        """Write the file; on a full disk into the place that the old one has."""
        if self._path is None:
            return
        text = (json.dumps(self._data, indent=2) + "\n").ljust(ROOM_BYTES)
        try:
            write_text(self._path, text, TrainingError)
        except TrainingError:
            with suppress(OSError), self._path.open("r+b") as file:
                file.write(text.encode())
                return
            raise


def predicted_step_s(plan: Plan) -> float | None:
    """Return the step time that the search predicted; None for a plan without figures."""
    return None if plan.search is None or plan.is_edited else plan.search.best.step_time_s


# One training at a time in a run's folder.
#
# Two of them would cut each other's logs and delete each other's checkpoints. The lock is the
# system's own on a small file: it ends with the process, however that ends, so that a killed
# training is resumed at once; and processes that the training forked do not hold it.


LOCK_FILE = "run.lock"
_BUSY = (errno.EACCES, errno.EAGAIN)
_held: dict[str, int] = {}  # file -> process: the system's locks do not keep one from itself


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock inside; a `TrainingError` names who has it."""
    path = folder / LOCK_FILE
    key = os.path.realpath(path)
    # Opening and closing the file once more would give this process's own lock back.
    if _held.get(key) == os.getpid():
        raise _in_use(folder, {"host": platform.node(), "pid": os.getpid()})
    with writing(path, TrainingError, hint="folder: a folder that you may write to"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _take(handle):
            raise _in_use(folder, _holder(handle))
        _held[key] = os.getpid()
        yield
    finally:
        _held.pop(key, None)
        os.close(handle)  # which gives the lock back


def _take(handle: int) -> bool:
    """Take the lock and note who has it; False if another process has it."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        # A file system without locks: the note in the file is all there is.
        if _is_alive(_holder(handle)):
            return False
    note = {"host": platform.node(), "pid": os.getpid(), "since": time.time()}
    with contextlib.suppress(OSError):  # a full disk: the lock holds without its note
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(note).encode(), 0)
    return True


def _holder(handle: int) -> dict[str, Any]:
    try:
        found = parse_json(os.pread(handle, 4096, 0), where=LOCK_FILE)
    except (OSError, ShardwiseError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Whether the process of a note runs; of other hosts that is not known."""
    pid = holder.get("pid")
    if holder.get("host") != platform.node() or not isinstance(pid, int) or pid == os.getpid():
        return False
    return Path(f"/proc/{pid}").exists()


def _in_use(folder: Path, holder: dict[str, Any]) -> TrainingError:
    since = ""
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
    return TrainingError(
        f"{folder} is in use: process {holder.get('pid', '?')} on {holder.get('host', '?')} "
        f"trains in it{since}",
        where="folder",
        hint="another folder, or wait until that training has ended",
    )


class RunOutputs:
    """Opened when a run starts; closed when it ends, also by an error, which `run.json` tells.

    A run that has nothing left to do leaves all files as they are.
    """

    def __init__(self, session: Session) -> None:
        self.logs: list[Log] = []
        self.ranks: JsonlLog | None = None
        self._run: RunFile | None = None
        self._lock = contextlib.ExitStack()
        try:
            # A folder that cannot be used is an error of all ranks, not of the first alone.
            rendezvous = open_rendezvous("open the run", CheckpointError)
            rendezvous.run(lambda: self._open(session), session.config.timeout_s)
        except BaseException:
            self._close()
            raise

    def _open(self, session: Session) -> None:
        config, writer = session.config, session.world.talks
        folder = Path(config.folder) if config.folder is not None and writer else None
        if session.complete():
            folder = None
        if folder is not None:
            self._lock.enter_context(locked_folder(folder))
            _write_settings(session, folder)
            self._run = RunFile(folder, session)
        if writer and not session.complete():
            self.logs = make_logs(config.logs, folder, config_to_json(config), session.step)
        if folder is not None and config.logs.jsonl:
            self.ranks = JsonlLog(folder / "ranks.jsonl", session.step)
        kind = config.logs.console if writer else "off"
        self.terminal = make_console(kind, session.totals()["total_steps"], session.step)

    def __enter__(self) -> RunOutputs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.terminal.close()
        try:
            if error is not None:
                self.ended("failed", f"{type(error).__name__}: {error}"[:2000])
        finally:
            self._close()

    def _close(self) -> None:
        for log in (*self.logs, *([self.ranks] if self.ranks is not None else [])):
            log.close()
        self._lock.close()

    def ended(self, how: str, error: str | None = None) -> None:
        """Note how the run ended: "finished", "callback", "signal" or "failed"."""
        if self._run is None:
            return
        try:
            self._run.end(how, error)
        except TrainingError as problem:  # the run has ended all the same
            warnings.warn(f"{problem.message} ({problem.hint})", RuntimeWarning, stacklevel=2)


def _write_settings(session: Session, folder: Path) -> None:
    """The config and the plan of the run, for people."""
    text = json.dumps(config_to_json(session.config), indent=2) + "\n"
    write_text(folder / "config.json", text, TrainingError)
    plan = session.planned.plan
    if session.config.trace is not None and predicted_step_s(plan) is None:
        plan = _with_figures(session.planned)
    plan.save(folder / "plan.json")


def _with_figures(planned: Planned) -> Plan:
    """The plan with a prediction that its trace can be laid over, where one can be made."""
    try:
        return with_figures(planned.graph, planned.plan, planned.cluster)
    except ShardwiseError:
        return planned.plan


# Recorded steps of a training: those of a trace, and now and then one for the times of all ranks.
#
# In a synchronous training all steps take as long as the slowest rank's; who is slow shows only in
# the time that the others wait. So a step is recorded as cheaply as that goes, at most every few
# seconds, and each rank reduces its own recording to a few numbers, which all gather.


FIRST_SAMPLE = 3  # steps before it are not like the others
SHOWN = 8  # slowest ranks, by number
EACH = 64  # ranks of which every one is written
FIGURES = ("own_s", "waiting_s", "step_s", "memory_bytes")


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process has had, on its device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Records:
    """Starts and stops the recorder around steps; all ranks do the same."""

    def __init__(self, config: TrainConfig, module: ParallelModule, log: JsonlLog | None) -> None:
        self._module, self._log = module, log
        self._folder = Path(config.folder) if config.folder is not None else None
        self._steps = config.trace.range if config.trace is not None else range(0)
        self._file = config.trace.file if config.trace is not None else ""
        self._every_s = config.logs.ranks_every_s
        self._sampled_at = time.monotonic()
        self._sampling = self._tracing = False
        self._next = False
        self._had = range(0)  # the steps of this run
        self.trace: Path | None = None
        if module.recorder is not None:  # a run before this one may have failed in a recorded step
            module.recorder.pause()
            module.recorder.take()

    def wants_sample(self, step: int) -> bool:
        """Whether this rank, the one that writes, would have the step after this one recorded."""
        if self._log is None or self._every_s is None or step + 1 < FIRST_SAMPLE:
            return False
        first = step + 1 == FIRST_SAMPLE
        return first or time.monotonic() - self._sampled_at >= self._every_s

    def plan(self, sample: bool) -> None:
        """What all ranks agreed on for the next step."""
        self._next = sample

    def begin(self, step: int) -> None:
        """A step begins."""
        self._had = range(self._had.start or step, step + 1)
        recorder = self._module.recorder
        if recorder is None:
            return
        if step in self._steps:
            recorder.start()
            self._tracing = True
        elif self._next and not self._tracing:
            recorder.start(blocks=False)
            self._sampling = True
        self._next = False

    def end(self, step: int, seconds: float) -> bool:
        """A step has ended, with the optimizer's; whether the trace was written."""
        recorder = self._module.recorder
        if recorder is not None and self._sampling:
            recorder.pause()
            self._sampling = False
            self._sample(step, seconds)
        done = self._tracing and step + 1 not in self._steps
        if done:
            self.finish()
        return done

    def finish(self) -> None:
        """Write the trace, if one was begun; all ranks call it."""
        recorder = self._module.recorder
        if recorder is None or not self._tracing:
            return
        recorder.pause()
        self._tracing = False
        assert self._folder is not None
        path = self._folder / self._file
        try:
            self._module.trace(path)
            self.trace = path
        except TraceError as error:  # the trace is lost, the training is not
            warnings.warn(f"{error.message} ({error.hint})", RuntimeWarning, stacklevel=2)

    def missed(self) -> str | None:
        """Which steps of the trace the run did not have, in words: it was resumed, or ended."""
        missing = [step for step in self._steps if step not in self._had]
        if not missing:
            return None
        had = f"steps {_first_to_last(self._had)}" if self._had else "no steps"
        return f"trace: steps {_first_to_last(missing)} were not recorded: this run had {had}"

    def _sample(self, step: int, seconds: float) -> None:
        module, recorder = self._module, self._module.recorder
        assert recorder is not None
        own, waiting = own_seconds(recorder.take())
        device = module.store.device
        mine = [own, waiting, seconds, float(peak_memory_bytes(device))]
        everyone = module.mesh.everyone
        flat = torch.tensor(mine, dtype=torch.float64, device=device)
        found = everyone.all_gather(flat, [len(mine)] * everyone.size).wait()
        self._sampled_at = time.monotonic()
        if self._log is not None:
            groups: list[tuple[int, ...]] = list(module.mesh.groups)
            groups = groups or [tuple(range(everyone.size))]
            self._log.write_row(ranks_row(step, found.view(-1, len(mine)).tolist(), groups))


def _first_to_last(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}"


def ranks_row(
    step: int, rows: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The figures of all ranks as one line: least, median, most; and the slowest by number.

    A rank's `ratio` is its own time to the median of the others that do the same; of a rank that
    nobody is like, to the median of all.
    """
    columns = dict(zip(FIGURES, zip(*rows, strict=True), strict=True))
    own = columns["own_s"]
    usual = [median(own)] * len(rows)
    group_of = [0] * len(rows)
    for number, ranks in enumerate(groups):
        ordered = sorted(own[rank] for rank in ranks)
        for rank in ranks:
            group_of[rank] = number
            if len(ranks) > 1:
                usual[rank] = _median_without(ordered, own[rank])
    ratios = [mine / of if of > 0 else 1.0 for mine, of in zip(own, usual, strict=True)]
    slowest = sorted(range(len(rows)), key=lambda rank: (-ratios[rank], rank))[:SHOWN]
    found: dict[str, Any] = {"step": step, "ranks": len(rows)}
    for name, values in columns.items():
        found[name] = {"min": min(values), "median": median(values), "max": max(values)}
    found["slowest"] = [
        {
            "rank": rank,
            "group": group_of[rank],
            "own_s": own[rank],
            "ratio": ratios[rank],
            "memory_bytes": columns["memory_bytes"][rank],
        }
        for rank in slowest
    ]
    if len(rows) <= EACH:
        found["each"] = {name: list(columns[name]) for name in ("own_s", "memory_bytes")}
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of all of them but this one.

    >>> _median_without([1.0, 2.0, 6.0], 6.0), _median_without([3.0, 6.0], 6.0)
    (1.5, 3.0)
    """
    mine, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[at + (at >= mine)] for at in (last // 2, (last + 1) // 2))
    return (low + high) / 2
