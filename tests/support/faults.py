"""Stop or kill one rank during collectives, and collect the errors of the others.

    errors = survivors("tests.distributed.test_x:forever", 4, victim=2, how=signal.SIGSTOP)

`forever()` runs on every rank, in a group whose store the test hosts, and calls collectives
until one fails. The result has the error of each other rank, and the seconds until it was raised.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.support.pool import use_gpu

START_S = 120.0
RUNNING_S = 0.5  # of collectives before the fault


def survivors(
    target: str,
    num_ranks: int,
    *,
    victim: int,
    how: signal.Signals,
    limit_s: float,
    backend: str = "gloo",
    **kwargs: Any,
) -> dict[int, tuple[str, float]]:
    """Return the errors of all ranks but one, and the seconds after the fault."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")  # of a process with all imports
    context.set_forkserver_preload(["torch.distributed", target.partition(":")[0]])
    pipes, processes = {}, []
    for rank in range(num_ranks):
        connection, remote = context.Pipe()
        process = context.Process(
            target=_rank,
            args=(target, rank, num_ranks, backend, store.port, remote, kwargs),
            daemon=True,
        )
        process.start()
        remote.close()
        pipes[connection] = rank
        processes.append(process)
    try:
        for pipe, rank in pipes.items():
            assert pipe.poll(START_S), f"rank {rank} did not start"
            assert pipe.recv() == "ready", f"rank {rank} did not start"
        time.sleep(RUNNING_S)
        os.kill(processes[victim].pid or 0, how)
        return _errors({p: r for p, r in pipes.items() if r != victim}, limit_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(10)


def _errors(pipes: dict[Connection, int], limit_s: float) -> dict[int, tuple[str, float]]:
    errors: dict[int, tuple[str, float]] = {}
    began = time.monotonic()
    while len(errors) < len(pipes) and time.monotonic() - began < limit_s:
        for pipe in wait([p for p in pipes if pipes[p] not in errors], timeout=1.0):
            assert isinstance(pipe, Connection)
            try:
                report = pipe.recv()
            except EOFError:
                report = "ended without an error"
            errors[pipes[pipe]] = report, time.monotonic() - began
    return errors


def _rank(
    target: str,
    rank: int,
    num_ranks: int,
    backend: str,
    port: int,
    pipe: Connection,
    kwargs: dict[str, Any],
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        use_gpu(rank, num_ranks)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        function(lambda: pipe.send("ready"), **kwargs)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    time.sleep(60)  # keep connections open, as the end of this process would close them
