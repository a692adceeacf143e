"""Write the files of a run besides checkpoints: settings, logs, `run.json` and traces.

Only rank 0 writes files and prints; all ranks take part in recording.
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
from pathlib import Path
from statistics import median
from typing import Any

import torch

from shardwise.errors import CheckpointError, ShardwiseError, TraceError, TrainingError
from shardwise.files import parse_json, write_text, writing
from shardwise.planner.figures import with_figures
from shardwise.plans import Plan
from shardwise.runtime import ParallelModule, devices
from shardwise.runtime.rendezvous import open_rendezvous
from shardwise.runtime.tracing import own_seconds
from shardwise.training.config import TrainConfig, config_to_json
from shardwise.training.logs import JsonlLog, Log, make_logs, make_terminal
from shardwise.training.session import Session

# ------------------------------------------------------------ run.json
FORMAT, VERSION, RUN_FILE = "shardwise-run", 1, "run.json"
RESERVED_BYTES = 4096  # so that the end of a run can be recorded even if the disk is full


class RunFile:
    """`run.json`, which describes a run and its state to `shardwise watch`."""

    def __init__(self, folder: Path, session: Session) -> None:
        self._path = folder / RUN_FILE
        plan = session.planned.plan
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
            "predicted_step_s": predicted_step_s(plan),
            "known_machines": session.planned.known_machines,
            "host": platform.node(),
            "pid": os.getpid(),
            "started_at": time.time(),
            "state": "running",
        }
        self._write()

    def end(self, state: str, error: str | None = None) -> None:
        """Record that the run has ended: "finished", "callback", "signal" or "failed"."""
        self._data |= {"state": state, "ended_at": time.time()}
        self._data |= {} if error is None else {"error": error}
        self._write()

    def _write(self) -> None:
        """Write the file; if the disk is full, overwrite the old one in place."""
        text = (json.dumps(self._data, indent=2) + "\n").ljust(RESERVED_BYTES)
        try:
            write_text(self._path, text, TrainingError)
        except TrainingError:
            with contextlib.suppress(OSError), self._path.open("r+b") as file:
                file.write(text.encode())
                return
            raise


def predicted_step_s(plan: Plan) -> float | None:
    """Return the step time that the search predicted, or None for a plan without figures."""
    return None if plan.search is None or plan.is_edited else plan.search.best.step_time_s


# ------------------------------------------------------------ one training at a time in a folder
# Two of them would truncate each other's logs and delete each other's checkpoints. The lock is a
# POSIX lock on a small file: it ends with the process, however that ends, so that a killed training
# can be resumed at once, and forked children do not inherit it.

LOCK_FILE = "run.lock"
_BUSY = (errno.EACCES, errno.EAGAIN)
_locked: dict[str, int] = {}  # file -> process: POSIX locks do not exclude their own process


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a `TrainingError` names its holder if it is taken."""
    path = folder / LOCK_FILE
    key = os.path.realpath(path)
    # Opening and closing the file again would release this process's own lock.
    if _locked.get(key) == os.getpid():
        raise _in_use(folder, {"host": platform.node(), "pid": os.getpid()})
    with writing(path, TrainingError, hint="folder: a folder that you may write to"):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _lock(handle):
            raise _in_use(folder, _holder(handle))
        _locked[key] = os.getpid()
        yield
    finally:
        _locked.pop(key, None)
        os.close(handle)  # releases the lock


def _lock(handle: int) -> bool:
    """Take the lock and write who holds it; return False if another process does."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        # A file system without locks: rely on the process named in the file.
        if _is_alive(_holder(handle)):
            return False
    holder = {"host": platform.node(), "pid": os.getpid(), "since": time.time()}
    with contextlib.suppress(OSError):  # on a full disk, the lock holds without its description
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode(), 0)
    return True


def _holder(handle: int) -> dict[str, Any]:
    try:
        holder = parse_json(os.pread(handle, 4096, 0), where=LOCK_FILE)
    except (OSError, ShardwiseError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Return whether the holder is a running process on this host."""
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


# ------------------------------------------------------------ all outputs of a run
class RunOutputs:
    """The outputs of a run, closed when it ends; an error is recorded in `run.json`.

    A run that is already complete leaves all files unchanged.
    """

    def __init__(self, session: Session) -> None:
        self.logs: list[Log] = []
        self.ranks: JsonlLog | None = None
        self._run: RunFile | None = None
        self._lock = contextlib.ExitStack()
        try:
            # All ranks must fail if the folder cannot be used, not only the first.
            rendezvous = open_rendezvous("open the run", CheckpointError)
            rendezvous.run(lambda: self._open(session), session.config.timeout_s)
        except BaseException:
            self._close()
            raise

    def _open(self, session: Session) -> None:
        config, is_main = session.config, session.world.is_main
        folder = Path(config.folder) if config.folder is not None and is_main else None
        if session.complete():
            folder = None
        if folder is not None:
            self._lock.enter_context(locked_folder(folder))
            _write_settings(session, folder)
            self._run = RunFile(folder, session)
        if is_main and not session.complete():
            self.logs = make_logs(config.logs, folder, config_to_json(config), session.step)
        if folder is not None and config.logs.jsonl:
            self.ranks = JsonlLog(folder / "ranks.jsonl", session.step)
        kind = config.logs.console if is_main else "off"
        self.terminal = make_terminal(kind, session.totals()["total_steps"], session.step)

    def __enter__(self) -> RunOutputs:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.terminal.close()
        try:
            if error is not None:
                self.record_end("failed", f"{type(error).__name__}: {error}"[:2000])
        finally:
            self._close()

    def _close(self) -> None:
        for log in (*self.logs, *([self.ranks] if self.ranks is not None else [])):
            log.close()
        self._lock.close()

    def record_end(self, state: str, error: str | None = None) -> None:
        """Record how the run ended: "finished", "callback", "signal" or "failed"."""
        if self._run is None:
            return
        try:
            self._run.end(state, error)
        except TrainingError as problem:  # a failure to record it must not fail the run
            warnings.warn(f"{problem.message} ({problem.hint})", RuntimeWarning, stacklevel=2)


def _write_settings(session: Session, folder: Path) -> None:
    """Write the config and the plan of the run, for readers."""
    text = json.dumps(config_to_json(session.config), indent=2) + "\n"
    write_text(folder / "config.json", text, TrainingError)
    planned, plan = session.planned, session.planned.plan
    if session.config.trace is not None and predicted_step_s(plan) is None:
        # With a prediction, the trace can be compared to it.
        with contextlib.suppress(ShardwiseError):
            plan = with_figures(planned.graph, plan, planned.cluster)
    plan.save(folder / "plan.json")


# ------------------------------------------------------------ recorded steps
# In a synchronous training, every step takes as long as its slowest rank, which shows only in the
# time that the others wait. So besides the steps of a trace, one step every few seconds is recorded
# as cheaply as possible; each rank reduces its recording to a few numbers, which are gathered.

FIRST_SAMPLE = 3  # earlier steps are slower: compilation, allocation
NUM_SLOWEST = 8  # ranks that are listed by number
MAX_LISTED = 64  # ranks up to which the figures of each are written
FIGURES = ("own_s", "waiting_s", "step_s", "memory_bytes")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process, on its device."""
    counter = getattr(devices.module_of(device), "max_memory_allocated", None)
    if device.type != "cpu" and counter is not None:
        return int(counter(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class StepRecorder:
    """Records the steps of a trace and samples of others, the same ones on all ranks."""

    def __init__(self, config: TrainConfig, module: ParallelModule, log: JsonlLog | None) -> None:
        self._module, self._log = module, log
        self._folder = Path(config.folder) if config.folder is not None else None
        self._steps = config.trace.range if config.trace is not None else range(0)
        self._file = config.trace.file if config.trace is not None else ""
        self._every_s = config.logs.ranks_every_s
        self._sampled_at = time.monotonic()
        self._sampling = self._tracing = False
        self.sample_next = False  # as all ranks have agreed
        self._run_steps = range(0)  # the steps of this run so far
        self.trace: Path | None = None
        if module.recorder is not None:  # an earlier run may have failed in a recorded step
            module.recorder.pause()
            module.recorder.take()

    def wants_sample(self, step: int) -> bool:
        """Return whether rank 0 wants to sample the step after this one; other ranks never do."""
        if self._log is None or self._every_s is None or step + 1 < FIRST_SAMPLE:
            return False
        first = step + 1 == FIRST_SAMPLE
        return first or time.monotonic() - self._sampled_at >= self._every_s

    def begin(self, step: int) -> None:
        """Start recording if this step is to be recorded."""
        self._run_steps = range(self._run_steps.start or step, step + 1)
        recorder = self._module.recorder
        if recorder is None:
            return
        if step in self._steps:
            recorder.start()
            self._tracing = True
        elif self.sample_next and not self._tracing:
            recorder.start(blocks=False)
            self._sampling = True
        self.sample_next = False

    def end(self, step: int, seconds: float) -> bool:
        """End the recording after a step and its update; return whether the trace is complete."""
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
        """Write the trace, if one was started; all ranks call it."""
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
        except TraceError as error:  # only the trace is lost
            warnings.warn(f"{error.message} ({error.hint})", RuntimeWarning, stacklevel=2)

    def missed_steps(self) -> str | None:
        """Describe the steps of the trace that were not part of this run, if there are any."""
        missed = [step for step in self._steps if step not in self._run_steps]
        if not missed:
            return None
        ran = self._run_steps
        had = f"steps {ran[0]} to {ran[-1]}" if ran else "no steps"
        return f"trace: steps {missed[0]} to {missed[-1]} were not recorded: this run had {had}"

    def _sample(self, step: int, seconds: float) -> None:
        module, recorder = self._module, self._module.recorder
        assert recorder is not None
        own, waiting = own_seconds(recorder.take())
        device, everyone = module.store.device, module.mesh.everyone
        figures = [own, waiting, seconds, float(peak_memory_bytes(device))]
        local = torch.tensor(figures, dtype=torch.float64, device=device)
        gathered = everyone.all_gather(local, [len(figures)] * everyone.size).wait()
        self._sampled_at = time.monotonic()
        if self._log is not None:
            groups: list[tuple[int, ...]] = list(module.mesh.groups)
            groups = groups or [tuple(range(everyone.size))]
            rows = gathered.view(-1, len(figures)).tolist()
            self._log.write_row(ranks_row(step, rows, groups))


def ranks_row(
    step: int, rows: Sequence[Sequence[float]], groups: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Summarize the figures of all ranks: minimum, median, maximum, and the slowest ranks.

    A rank's `ratio` is its own time relative to the median of the other ranks of its group, which
    do the same work; for a rank without such peers, to the median of all.
    """
    columns = dict(zip(FIGURES, zip(*rows, strict=True), strict=True))
    own = columns["own_s"]
    typical = [median(own)] * len(rows)
    group_of = [0] * len(rows)
    for number, ranks in enumerate(groups):
        ordered = sorted(own[rank] for rank in ranks)
        for rank in ranks:
            group_of[rank] = number
            if len(ranks) > 1:
                typical[rank] = _median_without(ordered, own[rank])
    pairs = zip(own, typical, strict=True)
    ratios = [time_s / usual if usual > 0 else 1.0 for time_s, usual in pairs]
    slowest = sorted(range(len(rows)), key=lambda rank: (-ratios[rank], rank))[:NUM_SLOWEST]
    row: dict[str, Any] = {"step": step, "ranks": len(rows)}
    for name, values in columns.items():
        row[name] = {"min": min(values), "median": median(values), "max": max(values)}
    row["slowest"] = [
        {
            "rank": rank,
            "group": group_of[rank],
            "own_s": own[rank],
            "ratio": ratios[rank],
            "memory_bytes": columns["memory_bytes"][rank],
        }
        for rank in slowest
    ]
    if len(rows) <= MAX_LISTED:
        row["each"] = {name: list(columns[name]) for name in ("own_s", "memory_bytes")}
    return row


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of all values but this one, without copying: there may be many ranks.

    >>> _median_without([1.0, 2.0, 6.0], 6.0), _median_without([3.0, 6.0], 6.0)
    (1.5, 3.0)
    """
    removed, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[i + (i >= removed)] for i in (last // 2, (last + 1) // 2))
    return (low + high) / 2
