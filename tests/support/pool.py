"""Persistent pools of processes for tests: a call takes milliseconds, a start seconds.

    results = pool(4).run("tests.distributed.test_x:worker", batch, timeout=30)   # one per rank

`worker(*args, **kwargs)` runs on every rank with the default group initialized, over gloo unless
`pool(4, "nccl")` asks for NCCL. Its ranks then have a GPU each, or share one; arguments and
results are pickled (tensors by value). A failure on any rank ends the pool, because its group can
no longer be trusted, and the next `run` starts a new one. A test that expects an error on every
rank is faster if the worker catches and returns it.

This module does not import torch. The workers are forks of a process that has only imported it,
because the import takes four seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

MAX_PROCESSES = 12
START_TIMEOUT_S = 120.0
GROUP_TIMEOUT_S = 60.0
GRACE_S = 1.0  # for the other ranks to report their errors after a failure

STACK_S = 5.0  # for a hanging rank to print its stack

PRELOADED = ["torch.distributed", "torch.export._trace", "shardwise.api.parallelize"]


class RankDied(RuntimeError):
    """The process of a rank ended without an answer."""


class RankTimeout(TimeoutError):
    """Some ranks did not answer in time; the message has their stacks."""


class RemoteError(RuntimeError):
    """A rank raised an exception that cannot be pickled; the message has its text."""


@dataclass(frozen=True)
class _Failure:
    pickled: bytes | None
    summary: str
    trace: str


@dataclass
class _Worker:
    rank: int
    process: ForkServerProcess
    connection: Connection
    stacks: Path

    def stack(self) -> str:
        """Return the stack that the process has written, if any."""
        return self.stacks.read_text() if self.stacks.exists() else ""


class Pool:
    """`num_ranks` processes with an initialized group, started at the first `run`."""

    def __init__(self, num_ranks: int, backend: str = "gloo") -> None:
        if num_ranks < 1:
            raise ValueError(f"a pool needs at least one rank, not {num_ranks}")
        self.num_ranks, self.backend = num_ranks, backend
        self._workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def alive(self) -> bool:
        """Whether the processes are running."""
        return bool(self._workers)

    @property
    def pids(self) -> list[int]:
        """The process ids by rank, empty if the pool is not running."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(
        self, target: str | Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Call `target` ("module:function", or the function itself) on all ranks.

        Returns the results by rank. The first failing rank's exception is raised here, with its
        traceback as a note; `RankDied` and `RankTimeout` name the rank.
        """
        call = pickle.dumps((_reference(target), args, kwargs))
        _touch(self)
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close()
        if not self.alive:
            self._start()
        for worker in self._workers:
            # `_collect` reports a rank that has just died.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.connection.send_bytes(call)
        return self._collect(timeout)

    def close(self) -> None:
        """End the processes; the next `run` starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()
            worker.process.kill()
        for worker in workers:
            worker.process.join(10)
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _start(self) -> None:
        _make_room(self)
        self._directory = tempfile.TemporaryDirectory(prefix="shardwise-pool-")
        self._workers = [self._spawn(rank) for rank in range(self.num_ranks)]
        try:
            port = self._receive_port()
            for worker in self._workers[1:]:
                worker.connection.send_bytes(pickle.dumps(port))
            self._collect(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int) -> _Worker:
        assert self._directory is not None
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        connection, remote = context.Pipe()
        stacks = Path(self._directory.name, f"rank{rank}.txt")
        process = context.Process(
            target=_serve,
            args=(rank, self.num_ranks, self.backend, remote, str(stacks)),
            name=f"rank{rank}of{self.num_ranks}",
            daemon=True,
        )
        process.start()
        remote.close()
        return _Worker(rank, process, connection, stacks)

    def _receive_port(self) -> int:
        first = self._workers[0]
        if not first.connection.poll(START_TIMEOUT_S):
            raise RankTimeout(f"rank 0 did not start within {START_TIMEOUT_S:.0f} s")
        try:
            port: int = pickle.loads(first.connection.recv_bytes())
        except EOFError:
            raise RankDied("rank 0 died while it started") from None
        return port

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        try:
            while len(answers) < self.num_ranks:
                self._collect_some(answers, deadline, timeout)
        except BaseException:
            self.close()
            raise
        return [answers[rank] for rank in range(self.num_ranks)]

    def _collect_some(self, answers: dict[int, Any], deadline: float, timeout: float) -> None:
        pending = {w.connection: w for w in self._workers if w.rank not in answers}
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankTimeout(self._describe_hang(list(pending.values()), timeout))
        failures: list[tuple[int, _Failure]] = []
        died: list[_Worker] = []
        for connection in ready:
            worker = pending[connection]
            try:
                answer = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                died.append(worker)
                continue
            if isinstance(answer, _Failure):
                failures.append((worker.rank, answer))
            else:
                answers[worker.rank] = answer
        if died:
            raise RankDied(self._describe_death(died))
        if failures:
            self._raise(failures, pending, answers)

    def _raise(
        self,
        failures: list[tuple[int, _Failure]],
        pending: dict[Connection, _Worker],
        answers: dict[int, Any],
    ) -> None:
        (rank, first), *others = sorted(failures, key=lambda item: item[0])
        failed = {rank for rank, _ in failures}
        silent = [w for w in pending.values() if w.rank not in failed and w.rank not in answers]
        hung = _wait_for_reports(silent)
        error = _rebuild(first)
        error.add_note(f"on rank {rank} of {self.num_ranks}:\n{first.trace}")
        for other, failure in others:
            error.add_note(f"rank {other} also failed: {failure.summary}")
        if hung:
            error.add_note(f"ranks {hung} were still waiting and have been ended")
        for worker in silent:
            worker.process.join(0.0 if worker.rank in hung else 0.1)
        died = [w for w in silent if not w.process.is_alive()]
        if died:  # the other ranks failed because of it
            raise RankDied(self._describe_death(died)) from error
        raise error

    def _describe_death(self, died: list[_Worker]) -> str:
        lines = []
        for worker in died:
            worker.process.join(5)
            code = worker.process.exitcode
            cause = f"exit code {code}"
            if code is not None and code < 0:
                cause = signal.Signals(-code).name
            lines.append(f"rank {worker.rank} of {self.num_ranks} died ({cause})")
        return "\n".join(lines)

    def _describe_hang(self, hung: list[_Worker], timeout: float) -> str:
        for worker in hung:
            if worker.process.is_alive() and worker.process.pid:
                os.kill(worker.process.pid, signal.SIGUSR1)
        end = time.monotonic() + STACK_S
        while time.monotonic() < end and not all(w.stack().strip() for w in hung):
            time.sleep(0.05)
        time.sleep(0.1)  # for the last lines
        ranks = [worker.rank for worker in hung]
        lines = [f"ranks {ranks} of {self.num_ranks} gave no answer within {timeout:g} s"]
        for worker in hung:
            lines.append(f"rank {worker.rank}:\n{worker.stack() or '(no stack)'}")
        return "\n".join(lines)


_pools: OrderedDict[tuple[int, str], Pool] = OrderedDict()


def pool(num_ranks: int, backend: str = "") -> Pool:
    """Return the shared pool of `num_ranks` processes, which starts at its first `run`.

    The backend is gloo unless `SHARDWISE_POOL_BACKEND=nccl` runs `tests/distributed` on GPUs.
    """
    backend = backend or os.environ.get("SHARDWISE_POOL_BACKEND", "gloo")
    key = (num_ranks, backend)
    if key not in _pools:
        _pools[key] = Pool(num_ranks, backend)
    return _pools[key]


def close_all() -> None:
    """End the processes of all shared pools."""
    for pool in _pools.values():
        pool.close()


atexit.register(close_all)


def _touch(used: Pool) -> None:
    key = (used.num_ranks, used.backend)
    if _pools.get(key) is used:
        _pools.move_to_end(key)


def _make_room(starting: Pool) -> None:
    """End the least recently used shared pools until `starting` fits."""
    running = [pool for pool in _pools.values() if pool.alive and pool is not starting]
    total = starting.num_ranks + sum(pool.num_ranks for pool in running)
    for pool in running:
        if total <= MAX_PROCESSES:
            return
        pool.close()
        total -= pool.num_ranks


def _wait_for_reports(workers: list[_Worker]) -> list[int]:
    """Return the ranks that have neither reported nor died after the grace period."""
    deadline = time.monotonic() + GRACE_S
    waiting = {w.connection: w.rank for w in workers}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        waiting = {c: rank for c, rank in waiting.items() if c not in ready}
    return sorted(waiting.values())


def _reference(target: str | Callable[..., Any]) -> str:
    if isinstance(target, str):
        return target
    return f"{target.__module__}:{target.__qualname__}"


def _resolve(reference: str) -> Callable[..., Any]:
    module, _, name = reference.partition(":")
    function: Callable[..., Any] = reduce(getattr, name.split("."), importlib.import_module(module))
    return function


def _rebuild(failure: _Failure) -> Exception:
    if failure.pickled is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(failure.pickled)
            if isinstance(error, Exception):
                return error
    return RemoteError(failure.summary)


def _failure(error: BaseException) -> _Failure:
    summary = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return _Failure(pickled, summary, "".join(traceback.format_exception(error)))


def _serve(rank: int, num_ranks: int, backend: str, connection: Connection, stacks: str) -> None:
    """Join the group, then answer calls until the connection closes."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        try:
            _join_group(rank, num_ranks, backend, connection)
        except BaseException as error:
            connection.send_bytes(pickle.dumps(_failure(error)))
            return
        connection.send_bytes(pickle.dumps(None))
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while True:
                connection.send_bytes(_answer(connection.recv_bytes()))
    os._exit(0)  # threads of gloo may block a normal exit


def use_gpu(rank: int, num_ranks: int) -> None:
    """Select the GPU of a rank; ranks that share one get identities that NCCL accepts."""
    import torch

    from shardwise.runtime.rendezvous import NCCL_ENVIRONMENT, shared_gpu_environment

    os.environ.update(NCCL_ENVIRONMENT)
    if num_ranks > torch.cuda.device_count():
        os.environ.update(shared_gpu_environment(rank))
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _join_group(rank: int, num_ranks: int, backend: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        use_gpu(rank, num_ranks)
    limit = timedelta(seconds=GROUP_TIMEOUT_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        connection.send_bytes(pickle.dumps(store.port))
    else:
        port = pickle.loads(connection.recv_bytes())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)


def _pickled(result: Any) -> bytes:
    """Pickle a result with all of its tensors on the CPU."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            on_device = isinstance(obj, torch.Tensor) and obj.device.type != "cpu"
            return obj.detach().cpu().__reduce_ex__(4) if on_device else NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(result)
    return buffer.getvalue()


def _answer(call: bytes) -> bytes:
    import torch

    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    try:
        reference, args, kwargs = pickle.loads(call)
        return _pickled(_resolve(reference)(*args, **kwargs))
    except Exception as error:
        return pickle.dumps(_failure(error))
    finally:
        torch.set_default_dtype(dtype)
