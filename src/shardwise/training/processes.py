"""The processes of a training: the group that this one is in, and a start of several here."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, RankError, ShardwiseError, did_you_mean
from shardwise.processes import run_until_exit
from shardwise.runtime.failures import has_ended, report_of
from shardwise.runtime.mesh import Axis
from shardwise.runtime.rendezvous import host_store, init_process_group

__all__ = [
    "EXIT_STOPPED",
    "Stop",
    "StopRequests",
    "WorkerStart",
    "World",
    "choose_device",
    "print_errors_once",
    "process_group",
    "start_ranks",
    "tell",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among all."""

    rank: int
    size: int
    device: torch.device

    @property
    def talks(self) -> bool:
        """Whether it is the one that writes and prints."""
        return self.rank == 0


def choose_device(name: str) -> str:
    """`cpu` or `cuda`; `auto` is the GPU where there is one."""
    kinds = ("auto", "cpu", "cuda")
    if name not in kinds:
        raise ConfigError(f"{name!r}{did_you_mean(name, kinds)}", where="device", hint="auto")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no GPU is here that torch can use", where="device", hint="device: cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


@contextlib.contextmanager
def process_group(device: str, timeout_s: float) -> Iterator[World]:
    """The group that torchrun's variables describe, or the one that is there; else this alone."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(here)
    made = False
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _join(device, timeout_s)
        made = True
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        yield World(rank=rank, size=size, device=here)
    finally:
        if made:
            dist.destroy_process_group()


def _join(device: str, timeout_s: float) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NCCL takes one rank for each GPU; gloo moves what GPUs hold through the host.
    own = device == "cuda" and local <= torch.cuda.device_count()
    limit = datetime.timedelta(seconds=timeout_s)
    try:
        init_process_group("nccl" if own else "gloo", limit)
    except (RuntimeError, ValueError, OSError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        busy = "EADDRINUSE" in str(error) or "in use" in str(error)
        raise RankError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} could not meet the "
            f"others at {place}: " + str(error).partition("\n")[0],
            hint="another --master-port: this one is in use"
            if busy
            else f"is {place} reachable from this machine, and did all ranks start?",
        ) from error


def start_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m shardwise.cli ARGUMENTS` as several ranks here; return their exit code.

    The ranks meet at a store that this process hosts, as torchrun's agent does, so that it survives
    whichever rank dies.
    """
    store = host_store("127.0.0.1")
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are guests of the store
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))
        ),
    }
    command = [sys.executable, "-m", "shardwise.cli", *arguments]
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return run_until_exit(command, own)


# How a rank ends after an error: the message is printed once, and without a traceback.
#
# All ranks usually meet the same error. Rank 0 prints it; another rank prints its own only if rank
# 0 has met none, or another one. A rank that leaves the message to rank 0 waits until rank 0 has
# ended: torchrun kills all others as soon as one has failed, and the message would be lost.
#
# torchrun prints a report of its own, with the stack of its own process. It takes the cause from a
# file for each rank, which gets the message.


WAIT_S = 2.0  # for rank 0 to meet the same error
STAY_S = 5.0  # for rank 0 to end after it has met the same error
_EXIT_POLL_S = 0.05


def tell(error: ShardwiseError) -> None:
    """Print an error that ends this process, unless rank 0 prints it."""
    text, rank = f"{type(error).__name__}: {error}", int(os.environ.get("RANK", "0"))
    record(text)
    if rank == 0:
        _say(text)
    elif not _rank_0_tells(error, text.partition("\n")[0]):
        _say(f"rank {rank}: {text}")


def record(text: str) -> None:
    """Write the message where torchrun's report takes the cause of a failure from."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)


def print_errors_once() -> None:
    """In a script that torchrun has started, print Shardwise's errors without a traceback.

    `python -X dev` keeps the tracebacks.
    """
    before = sys.excepthook
    if "RANK" not in os.environ or sys.flags.dev_mode or getattr(before, "tells_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ShardwiseError):
            tell(error)
        elif isinstance(error, KeyboardInterrupt):
            if os.environ["RANK"] == "0":
                _say("interrupted")
        else:
            before(kind, error, trace)

    hook.tells_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _rank_0_tells(error: ShardwiseError, first_line: str) -> bool:
    """Wait for rank 0 to report this error; if it does, until it has ended."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        report = report_of(0)
        # All ranks name one cause for a rank that is lost, whatever each of them saw.
        if report is not None and (isinstance(error, RankError) or report == first_line):
            deadline = time.monotonic() + STAY_S
            while time.monotonic() < deadline and not has_ended(0):
                time.sleep(_EXIT_POLL_S)
            return True
        time.sleep(_EXIT_POLL_S)
    return False


# Requests to stop, from the system or from a callback, that all ranks follow together.
#
# SIGTERM, or SIGINT once, asks for a stop after the step under way; a second SIGINT ends at once. A
# request on one rank becomes that of all by a maximum over ranks, once a step. The signal handler
# itself says that the request was heard: a step may take minutes.


EXIT_STOPPED = 75  # EX_TEMPFAIL: the state is saved; run the same command again to continue
_WORKER_S, _AGAIN_S = 300, 30  # that a loading process goes on after a signal, and another one
_SAME_S = 2.0  # a terminal and torchrun both pass one Ctrl-C on


class Stop(IntEnum):
    """Why to stop; a larger one wins."""

    NO = 0
    CALLBACK = 1
    SIGNAL = 2


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Lets a loader's process finish the step under way after a signal to the whole group.

    Slurm's scancel and systemd signal all processes at once. The training itself stops after its
    step, for which it still needs this process: it ends some minutes later, or half a minute after
    another signal, if it has not been told to end by then. `then` is the user's `worker_init_fn`.
    """

    then: Callable[[int], Any] | None = None

    def __call__(self, worker: int) -> None:
        """Begin a process; it may still take other signals for its own."""
        left = iter((_WORKER_S,))

        def heard(number: int, frame: FrameType | None) -> None:
            signal.alarm(next(left, _AGAIN_S))

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, heard)
        if self.then is not None:
            self.then(worker)


class StopRequests:
    """What this rank was asked, and what all have agreed on."""

    def __init__(self) -> None:
        self.asked = Stop.NO
        self._interrupted: float | None = None
        self._answer = ""

    @contextlib.contextmanager
    def listening(self, answer: str = "") -> Iterator[None]:
        """Inside, signals are requests; only the main thread can listen.

        `answer` is what the first signal writes to stderr at once.
        """
        self._answer = answer
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._heard)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is not None and now - self._interrupted > _SAME_S:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        if self._answer and self.asked is not Stop.SIGNAL:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            begin = "\n" if sys.stderr.isatty() else ""
            with contextlib.suppress(OSError):  # written past buffers that may be in use
                os.write(2, f"{begin}{name}: {self._answer}\n".encode())
        self.asked = Stop.SIGNAL

    def ask(self) -> None:
        """A callback wants to stop."""
        self.asked = max(self.asked, Stop.CALLBACK)

    def agreed(self, everyone: Axis, device: torch.device, wish: bool = False) -> tuple[Stop, bool]:
        """The largest request of any rank, and whether any has the wish; all ranks call it."""
        if everyone.size == 1:
            return self.asked, wish
        mine = torch.tensor([int(self.asked), int(wish)], device=device)
        stop, wished = everyone.all_reduce(mine, "max").wait().tolist()
        return Stop(stop), bool(wished)
