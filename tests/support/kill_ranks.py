"""Kill training repeatedly: `python -m tests.support.kill_ranks FOLDER ROUNDS [SEED [FORM]]`.

In every round, ranks resume from the latest checkpoint and save after each step, until a random one
is killed (SIGKILL) at a random time. The others must then end by themselves. The latest checkpoint
must be intact and not older than the last one that a rank reported as complete, and training from
it must reproduce the earlier losses.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import verify_checkpoint
from tests.support.inexact import FORMS

FORM = FORMS[sys.argv[4]] if len(sys.argv) > 4 else None
RANKS = 2 if FORM is None else 3
END_S = 60.0  # for the other ranks to end
START_S = 120.0


class Net(nn.Module):
    """A model of some megabytes, so that a save takes longer than a step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 40_000), nn.Linear(40_000, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), labels)


def train(rank: int, port: int, folder: Path) -> None:
    """Train one rank forever; rank 0 logs its progress."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model, generator = Net().double(), torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(4, 16, generator=generator, dtype=torch.float64),
        "labels": torch.randn(4, 1, generator=generator, dtype=torch.float64),
    }
    graph, cluster = sw.capture(model, batch), sw.Cluster.local(RANKS)
    plan = sw.strategies.fsdp(graph, cluster)
    if FORM is not None:
        plan = sw.strategies.ddp(graph, cluster, constraints={"*": FORM})
    pm = sw.parallelize(model, batch, plan=plan, timeout_s=20.0)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-3)
    manager = sw.CheckpointManager(folder / "checkpoints", keep_last=2)
    step, newest = 0, manager.latest()
    if newest is not None:
        step = sw.load_checkpoint(newest, pm, optimizer).step or 0
    log = (folder / "log.jsonl").open("a") if rank == 0 else None

    def note(what: str, value: Any) -> None:
        if log is not None:
            log.write(json.dumps([what, *value]) + "\n")
            log.flush()

    note("start", [step])
    while True:
        loss = pm.train_step(batch).item()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        note("loss", [step, loss])
        saving = manager.save(step, pm, optimizer, extra={"loss": loss})
        if step % 3 == 0:  # otherwise it overlaps with the next step
            saving.wait()
            note("complete", [step])


def events(folder: Path) -> list[list[Any]]:
    """Return the log of rank 0."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line may be incomplete.
    return [json.loads(line) for line in lines if line.endswith("]")]


def one_round(folder: Path, chance: random.Random) -> str:
    """Start the ranks, kill one, and check the result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = len(events(folder))
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=train, args=(r, port, folder)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + START_S
    while not any(e[0] == "loss" for e in events(folder)[before:]):
        assert time.monotonic() < deadline, "training did not continue"
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 1.5))
    victim = chance.randrange(RANKS)
    os.kill(ranks[victim].pid or 0, signal.SIGKILL)
    for process in ranks:
        process.join(END_S)
        hung = process.is_alive()
        if hung:
            os.kill(process.pid or 0, signal.SIGUSR1)  # prints its stack
            time.sleep(1.0)
            process.kill()
        assert not hung, f"a rank hangs after rank {victim} was killed"
    return check(folder, before)


def check(folder: Path, before: int) -> str:
    """Check that the latest checkpoint is intact and recent, and that losses are reproduced."""
    log = events(folder)
    losses: dict[int, float] = {}
    for event, step, *values in log:
        if event == "loss":
            assert losses.setdefault(step, values[0]) == values[0], f"different loss in step {step}"
    complete = max((step for event, step, *_ in log if event == "complete"), default=0)
    newest = sw.CheckpointManager(folder / "checkpoints").latest()
    step = 0
    if newest is not None:
        verified = verify_checkpoint(newest)
        assert verified.ok, verified.problems
        step = verified.checkpoint.manifest.step or 0
    assert step >= complete, f"step {complete} was complete, but the latest is {step}"
    return f"began at {log[before][1]}, completed {complete}, newest {step}"


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else None)
    for number in range(rounds):
        print(f"{number}: {one_round(folder, chance)}", flush=True)


if __name__ == "__main__":
    main()
