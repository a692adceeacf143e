"""The processes of a training: joining and starting them, ending them, and printing errors once."""

import contextlib
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, RankError, ShardwiseError, did_you_mean
from shardwise.processes import handled_signals, run_until_exit
from shardwise.runtime.devices import accelerator, backend_of, module_of
from shardwise.runtime.failures import has_ended, report_of
from shardwise.runtime.mesh import Axis
from shardwise.runtime.rendezvous import host_store, init_process_group


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The rank of this process, the number of ranks, and its device."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Return whether this is the rank that writes and prints."""
        return self.rank == 0


def choose_device(name: str) -> str:
    """Return a kind of device; `auto` selects the machine's accelerator if it has one."""
    own = accelerator()
    kinds = tuple(dict.fromkeys(("auto", "cpu", "cuda", own)))
    if name not in kinds:
        raise ConfigError(
            f"unknown device {name!r}{did_you_mean(name, kinds)}", where="device", hint="auto"
        )
    if name not in ("auto", "cpu", own):
        raise ConfigError("torch finds no usable GPU", where="device", hint="device: cpu")
    return own if name == "auto" else name


@contextlib.contextmanager
def process_group(device: str, timeout_s: float) -> Iterator[World]:
    """Join the group that torchrun's variables describe, unless one exists or this is all."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    local_device = torch.device("cpu")
    if device != "cpu":
        module = module_of(torch.device(device))
        local_device = torch.device(device, local % module.device_count())
        module.set_device(local_device)
    joins = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if joins:
        _join(device, timeout_s)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    try:
        yield World(rank=rank, size=size, device=local_device)
    finally:
        if joins:
            dist.destroy_process_group()


def _join(device: str, timeout_s: float) -> None:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        init_process_group(backend_of(device, local), datetime.timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError, OSError) as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        in_use = "EADDRINUSE" in str(error) or "in use" in str(error)
        raise RankError(
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} could not join the "
            f"rendezvous at {address}: " + str(error).partition("\n")[0],
            hint="another --master-port: this one is in use"
            if in_use
            else f"check that {address} is reachable from this machine and that all ranks started",
        ) from error


def start_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m shardwise.cli ARGUMENTS` as several ranks here; return their exit code.

    This process hosts the store of the rendezvous, as torchrun's agent does, so that it survives
    the death of any rank.
    """
    store = host_store("127.0.0.1")
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # ranks connect to the store and do not host it
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))
        ),
    }
    command = [sys.executable, "-m", "shardwise.cli", *arguments]
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return run_until_exit(command, environments)


# ------------------------------------------------------------ printing an error once
# All ranks usually raise the same error. Rank 0 prints it; another rank prints its own only if rank
# 0 has raised none or a different one. A rank that leaves the message to rank 0 waits until rank 0
# has ended: torchrun kills all others as soon as one has failed, and the message would be lost.
#
# torchrun prints its own report, with the stack of its own process. It reads the cause from a file
# for each rank, to which the message is written.

WAIT_S = 2.0  # for rank 0 to raise the same error
END_S = 5.0  # for rank 0 to end after it has raised the same error
_EXIT_POLL_S = 0.05


def print_error(error: ShardwiseError) -> None:
    """Print an error that ends this process, unless rank 0 prints it."""
    text, rank = f"{type(error).__name__}: {error}", int(os.environ.get("RANK", "0"))
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        info = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": info}}, file)
    if rank == 0:
        _print(text)
    elif not _rank_0_prints(error, text.partition("\n")[0]):
        _print(f"rank {rank}: {text}")


def print_errors_once() -> None:
    """Print Shardwise's errors without a traceback in scripts that torchrun has started.

    `python -X dev` keeps the tracebacks.
    """
    before = sys.excepthook
    if "RANK" not in os.environ or sys.flags.dev_mode or getattr(before, "prints_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ShardwiseError):
            print_error(error)
        elif isinstance(error, KeyboardInterrupt):
            if os.environ["RANK"] == "0":
                _print("interrupted")
        else:
            before(kind, error, trace)

    hook.prints_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _print(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _rank_0_prints(error: ShardwiseError, first_line: str) -> bool:
    """Return whether rank 0 reports this error; if it does, wait until it has ended."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        report = report_of(0)
        # All ranks name the same cause for a lost rank, whatever error each of them raised.
        if report is not None and (isinstance(error, RankError) or report == first_line):
            deadline = time.monotonic() + END_S
            while time.monotonic() < deadline and not has_ended(0):
                time.sleep(_EXIT_POLL_S)
            return True
        time.sleep(_EXIT_POLL_S)
    return False


# ------------------------------------------------------------ requests to stop
# SIGTERM or the first SIGINT requests a stop after the current step; a second SIGINT ends at once.
# All ranks follow a request on any rank, by a maximum over ranks in every step. The signal handler
# acknowledges the request itself because a step may take minutes.

EXIT_STOPPED = 75  # EX_TEMPFAIL: the state is saved; run the same command again to continue
_WORKER_S, _WORKER_AGAIN_S = 300, 30  # life of a loading process after a first and later signals
_SAME_INTERRUPT_S = 2.0  # the terminal and torchrun both deliver a Ctrl-C


class Stop(IntEnum):
    """The reason to stop; the largest of all ranks wins."""

    NO = 0
    CALLBACK = 1
    SIGNAL = 2


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Keep a loader's process alive after a signal to the process group, until its step ends.

    Slurm's scancel and systemd signal all processes at once, but the training needs its loading
    processes until it stops after the current step. A process whose training does not end it exits
    some minutes after the first signal, or half a minute after another one.
    """

    user_init: Callable[[int], Any] | None = None  # the user's `worker_init_fn`

    def __call__(self, worker: int) -> None:
        """Initialize a loading process; the user's function may still replace the handlers."""
        delays = iter((_WORKER_S,))

        def exit_later(number: int, frame: FrameType | None) -> None:
            signal.alarm(next(delays, _WORKER_AGAIN_S))

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, exit_later)
        if self.user_init is not None:
            self.user_init(worker)


class StopRequests:
    """The request of this rank to stop, by a signal or a callback."""

    def __init__(self) -> None:
        self.request = Stop.NO
        self._interrupted_at: float | None = None
        self._reply = ""

    def listening(self, reply: str = "") -> contextlib.AbstractContextManager[None]:
        """Treat signals as requests; only the main thread can do so.

        The first signal writes `reply` to stderr at once.
        """
        self._reply = reply
        return handled_signals((signal.SIGTERM, signal.SIGINT), self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > _SAME_INTERRUPT_S:
                raise KeyboardInterrupt
            self._interrupted_at = self._interrupted_at or now
        # A second delivery of the same Ctrl-C may interrupt this handler: it must not reply again.
        is_first, self.request = self.request is not Stop.SIGNAL, Stop.SIGNAL
        if self._reply and is_first:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            begin = "\n" if sys.stderr.isatty() else ""
            with contextlib.suppress(OSError):  # unbuffered: the signal may interrupt a write
                os.write(2, f"{begin}{name}: {self._reply}\n".encode())

    def stop(self) -> None:
        """Request a stop from a callback."""
        self.request = max(self.request, Stop.CALLBACK)

    def agreed(self, everyone: Axis, device: torch.device, wish: bool = False) -> tuple[Stop, bool]:
        """Return the largest request of all ranks, and whether any has the wish; all call it."""
        if everyone.size == 1:
            return self.request, wish
        local = torch.tensor([int(self.request), int(wish)], device=device)
        stop, any_wish = everyone.all_reduce(local, "max").wait().tolist()
        return Stop(stop), bool(any_wish)
