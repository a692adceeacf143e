"""Starts the ranks of a measurement and collects what they found.

Enters: how many ranks, and what they are to do. Leaves: one result per rank, or a `RankError` that
names the rank which failed or was too slow. No rank outlives the call.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import RankError

_TAIL = 6  # lines of a failed rank's last words


def run_ranks(
    jobs: list[dict[str, Any]], timeout_s: float, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the result of each rank; `jobs` has what differs between ranks and what does not."""
    heard: queue.Queue[tuple[int, str | None]] = queue.Queue()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="shardwise-profile-"))
        ranks = [
            stack.enter_context(_rank(job | {"store": f"{folder}/store"}, folder, heard))
            for job in jobs
        ]
        return _collect(ranks, heard, timeout_s, progress, Path(folder))


@contextlib.contextmanager
def _rank(
    job: dict[str, Any], folder: str, heard: queue.Queue[tuple[int, str | None]]
) -> Iterator[subprocess.Popen[str]]:
    """A running rank, whose lines go to `heard`; None says that it has closed its output."""
    threads = str(job["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # see `shardwise doctor`
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with Path(folder, f"rank{job['rank']}.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.profiling.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # a rank that died at once is reported below
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.close()
    listener = threading.Thread(target=_listen, args=(job["rank"], process, heard), daemon=True)
    listener.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        listener.join()


def _listen(
    rank: int, process: subprocess.Popen[str], heard: queue.Queue[tuple[int, str | None]]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        heard.put((rank, line))
    heard.put((rank, None))


def _collect(
    ranks: list[subprocess.Popen[str]],
    heard: queue.Queue[tuple[int, str | None]],
    timeout_s: float,
    progress: Callable[[str], None],
    folder: Path,
) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(ranks):
        try:
            rank, line = heard.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            missing = [rank for rank in range(len(ranks)) if rank not in results]
            raise RankError(
                f"ranks {missing} of {len(ranks)} gave no result within {timeout_s:g} s",
                hint="shardwise profile --quick, or fewer --ranks",
            ) from None
        if line is None:
            if rank not in results:
                code = ranks[rank].wait()
                words = Path(folder, f"rank{rank}.txt").read_text(errors="replace").splitlines()
                raise RankError(
                    f"rank {rank} of {len(ranks)} ended with code {code}: "
                    + "\n    ".join(words[-_TAIL:]),
                    hint="shardwise doctor",
                )
            continue
        try:
            said = json.loads(line)
        except json.JSONDecodeError:  # a library's own words
            continue
        if "doing" in said:
            progress(said["doing"])
        elif "result" in said:
            results[rank] = said["result"]
    return [results[rank] for rank in range(len(ranks))]
