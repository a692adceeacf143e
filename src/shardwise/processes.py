"""Start local ranks, wait for them with a time limit, and collect their results or first error.

`fork_ranks` runs a function in forks of this process, and `fork_server` keeps a fork in reserve for
later calls. `run_workers` runs a module of the library in new processes that exchange JSON,
`run_commands` runs a command for each rank, and `run_until_exit` runs ranks without a time limit.
No process outlives its call: all are killed at its end, and by the kernel if this process dies.
"""

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from shardwise.errors import LaunchError, RankError, ShardwiseError
from shardwise.malloc_tuning import keep_heap

TIMEOUT_S = 120.0
GRACE_S = 20.0  # for the other ranks to report the failure of a rank
_END_S = 30.0  # for a killed process to end
_POLL_S = 0.02
_TAIL = 6  # lines of output of a failed process in an error
_PR_SET_PDEATHSIG = 1
_ABANDONED = "abandoned by another rank"

Result = TypeVar("Result")
Ask = Callable[[Any], Any]


# ------------------------------------------------------------ forks
def fork_ranks(
    work: Callable[[int, Callable[[], object]], Result], ranks: int, timeout_s: float = TIMEOUT_S
) -> list[Result]:
    """Return the results of `work(rank, meet)` in forks of this process; `meet()` is a barrier.

    Forks share the graph, the program and the user's functions, which cannot be pickled; results
    are returned as JSON. The error names the first rank that failed, not one that waited for it.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(ranks)
    ends, workers = [], []
    for rank in range(ranks):
        receiver, sender = context.Pipe(duplex=False)
        args = (work, rank, barrier, sender, timeout_s)
        worker = context.Process(target=_run_fork, args=args, daemon=True)
        worker.start()
        sender.close()
        ends.append(receiver)
        workers.append(worker)
    try:
        return _fork_results(ends, timeout_s)
    finally:
        for worker in workers:
            worker.kill()
            worker.join(timeout_s)


@contextlib.contextmanager
def fork_server(serve: Callable[[Any], Any], timeout_s: float = 2 * TIMEOUT_S) -> Iterator[Ask]:
    """Fork this process now; the fork answers JSON requests with `serve`.

    CUDA builds of torch start autograd threads on first use (even for meta tensors) and then refuse
    to run in forked children, so a process forks a server before it computes costs. GPUs are hidden
    from its ranks, because autograd would start threads for them.
    """
    context = multiprocessing.get_context("fork")
    client, server = context.Pipe()
    process = context.Process(target=_serve, args=(serve, client, server))
    process.start()
    server.close()

    def ask(request: Any) -> Any:
        try:
            client.send_bytes(json.dumps(request).encode())
        except OSError:
            raise RankError("the process that runs plans has ended") from None
        if not client.poll(timeout_s):
            client.close()  # a late answer would be taken for the next one
            raise RankError(f"no answer within {timeout_s:g} s")
        answer = _receive(client, 0)
        if "failed" in answer:
            raise RankError(answer["failed"], hint=_fork_hint(answer["failed"]))
        return answer["result"]

    try:
        yield ask
    finally:
        client.close()  # ends the server
        assert process.pid is not None
        wait_for([process.sentinel], 1.0)  # until it is joined, its id is not reused
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # including ranks that it started
        process.kill()
        process.join(timeout_s)


def _serve(serve: Callable[[Any], Any], client: Connection, end: Connection) -> None:
    os.setpgrp()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    client.close()
    while True:
        try:
            request = json.loads(end.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = {"result": serve(request)}
        except ShardwiseError as error:
            answer = {"failed": error.message}
        except Exception as error:  # operators of a model may raise anything
            answer = {"failed": _first_line(error)}
        try:
            end.send_bytes(json.dumps(answer).encode())
        except OSError:  # the client has gone
            return


def _run_fork(work: Any, rank: int, barrier: Any, end: Connection, timeout_s: float) -> None:
    import torch

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    keep_heap()  # like the ranks of a run
    try:
        answer: dict[str, Any] = {"result": work(rank, lambda: barrier.wait(timeout_s))}
    except threading.BrokenBarrierError:
        answer = {"failed": _ABANDONED}
    except Exception as error:  # operators of a model may raise anything
        answer = {"failed": _first_line(error)}
        barrier.abort()
    end.send_bytes(json.dumps(answer).encode())
    end.close()


def _fork_results(ends: list[Connection], timeout_s: float) -> list[Any]:
    """Return the results in rank order; the first failure ends the wait for the others."""
    results: dict[int, Any] = {}
    abandoned: list[int] = []
    deadline = time.monotonic() + timeout_s
    while missing := [r for r in range(len(ends)) if r not in results and r not in abandoned]:
        ready = wait_for([ends[r] for r in missing], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in (r for r in missing if ends[r] in ready):
            answer = _receive(ends[rank], rank)
            if "result" in answer:
                results[rank] = answer["result"]
            elif answer["failed"] == _ABANDONED:
                abandoned.append(rank)
            else:
                failed = answer["failed"]
                raise RankError(f"rank {rank} cannot run here: {failed}", hint=_fork_hint(failed))
    if len(results) < len(ends):
        names = ", ".join(map(str, missing or abandoned))
        raise RankError(f"rank {names} did not finish within {timeout_s:g} s")
    return [results[rank] for rank in range(len(ends))]


def _receive(end: Connection, rank: int) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(end.recv_bytes())
    except (EOFError, OSError):
        raise RankError(f"rank {rank} died on this machine") from None
    return answer


def _first_line(error: Exception) -> str:
    """Return an error without the advice for CUDA developers after its first line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _fork_hint(failed: str) -> str:
    """Return a hint if autograd or the CUDA driver was used before the fork."""
    if "autograd's threading" in failed:
        return "shardwise tune, or a fresh process"
    if "CUDA" in failed:
        return "set CUDA_VISIBLE_DEVICES= in the environment; the plan uses no GPUs"
    return ""


# ------------------------------------------------------------ new processes
def run_workers(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    timeout_s: float,
    progress: Callable[[str], None] = lambda step: None,
    *,
    environment: Mapping[str, str] | None = None,
    hint: str = "shardwise doctor",
) -> list[Any]:
    """Run `python -m MODULE` for each job and return the results in order.

    A worker reads its job as JSON from standard input, with the path `store` of a file that all
    workers share. It writes lines `{"doing": …}` for `progress` and one line `{"result": …}`.
    """
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()  # None: end of the output
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-ranks-")))
        workers = []
        for rank, job in enumerate(jobs):
            threads = str(job.get("threads", 1))
            limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            errors = stack.enter_context((folder / f"rank{rank}.txt").open("w"))
            worker = stack.enter_context(
                started(
                    [sys.executable, "-m", module],
                    {**limits, **(environment or {})},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
            workers.append(worker)
            with contextlib.suppress(BrokenPipeError):  # the worker died: reported below
                worker.stdin.write(json.dumps({**job, "store": f"{folder}/store"}) + "\n")
                worker.stdin.close()
            threading.Thread(target=_read_lines, args=(rank, worker, lines), daemon=True).start()
        return _worker_results(workers, lines, timeout_s, progress, folder, hint)


def _read_lines(rank: int, worker: Any, lines: queue.Queue[tuple[int, str | None]]) -> None:
    for line in worker.stdout:
        lines.put((rank, line))
    lines.put((rank, None))


def _worker_results(
    workers: Sequence[Any],
    lines: queue.Queue[tuple[int, str | None]],
    timeout_s: float,
    progress: Callable[[str], None],
    folder: Path,
    hint: str,
) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(workers):
        try:
            rank, line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = [rank for rank in range(len(workers)) if rank not in results]
            raise RankError(
                f"ranks {missing} of {len(workers)} returned no result within {timeout_s:g} s",
                hint=hint,
            ) from None
        if line is None and rank not in results:
            code = workers[rank].wait(_END_S)
            output = (folder / f"rank{rank}.txt").read_text(errors="replace").splitlines()
            raise RankError(
                f"rank {rank} of {len(workers)} ended with code {code}: "
                + "\n    ".join(output[-_TAIL:]),
                hint="shardwise doctor",
            )
        try:
            message = json.loads(line or "{}")
        except json.JSONDecodeError:  # output of a library
            continue
        if "doing" in message:
            progress(message["doing"])
        elif "result" in message:
            results[rank] = message["result"]
    return [results[rank] for rank in range(len(workers))]


def run_commands(
    commands: Sequence[Sequence[str]],
    *,
    what: str,
    timeout_s: float,
    environment: Mapping[str, str],
) -> None:
    """Run a command for each rank of `what` and wait for all of them."""
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        # In new sessions, Ctrl-C reaches only this process, which then ends the others.
        processes = [
            stack.enter_context(
                started(command, environment, stdout=sys.stderr, start_new_session=True)
            )
            for command in commands
        ]
        while running := [i for i, process in enumerate(processes) if process.poll() is None]:
            _require_success(processes, what)
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"ranks {running} of {what} did not finish within {timeout_s:.0f} s",
                    hint="a longer --timeout-s, or fewer bytes",
                )
            time.sleep(_POLL_S)
        _require_success(processes, what)


def _require_success(processes: Sequence[Any], what: str) -> None:
    for rank, process in enumerate(processes):
        if process.returncode:
            raise LaunchError(
                f"rank {rank} of {what} ended with {process.returncode}",
                hint="see its output above",
            )


def run_until_exit(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run a command in each environment; return the exit code of the first that fails, or 0.

    SIGTERM and SIGINT are forwarded, so that ranks can save their state. After a failure the other
    processes have some seconds to report it.
    """
    failed, deadline = 0, math.inf
    processes: list[Any] = []
    with forwarded_signals(processes), contextlib.ExitStack() as stack:
        for environment in environments:
            processes.append(stack.enter_context(started(command, environment)))
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if not failed and any(codes):
                failed = next(code for code in codes if code)
                deadline = time.monotonic() + GRACE_S
            if None not in codes:
                break
            time.sleep(_POLL_S)
    return failed if failed >= 0 else 128 - failed


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], **options: Any
) -> Iterator[Any]:
    """Start a process with additional environment variables, and kill it at the end."""
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, preexec_fn=_die_with_parent(), **options
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if options.get("start_new_session"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
        process.wait(_END_S)


def _die_with_parent() -> Callable[[], None] | None:
    """Return a function for a child, after which the kernel kills it when this process ends."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# ------------------------------------------------------------ signals and abandoned files
@contextlib.contextmanager
def handled_signals(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals in the main thread; other threads cannot, and change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def forwarded_signals(processes: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Forward SIGTERM and SIGINT to processes, also to those that are added later."""

    def forward(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return handled_signals((signal.SIGTERM, signal.SIGINT), forward)


def terminated_as_interrupt() -> contextlib.AbstractContextManager[None]:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that cleanup code runs."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return handled_signals((signal.SIGTERM, signal.SIGHUP), interrupt)


def runs_here(holder: Mapping[str, Any]) -> bool | None:
    """Return whether the process of a `host` and `pid` runs; None unless it is on this machine."""
    pid = holder.get("pid")
    if holder.get("host") != platform.node() or not isinstance(pid, int) or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it belongs to another user
        pass
    return True


def owned(prefix: str) -> str:
    """Return a prefix for names that identifies this process as the owner."""
    return f"{prefix}{os.getpid()}-"


def is_abandoned(name: str, prefix: str) -> bool:
    """Return whether a name has a prefix of `owned` whose process no longer exists."""
    owner = name.removeprefix(prefix).partition("-")[0]
    return name.startswith(prefix) and owner.isdigit() and not os.path.exists(f"/proc/{owner}")
