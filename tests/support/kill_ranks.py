"""Training that is killed again and again: `python -m tests.support.kill_ranks FOLDER ROUNDS`.

In every round some ranks go on from the newest checkpoint and save after each step, until one of
them, chosen at random, is killed (SIGKILL) at a random moment. Then the others must end by
themselves, the newest checkpoint must be sound, no older than the last one that a rank saw
completed, and training from it must give the losses that it gave before.
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

RANKS = 2
END_S = 60.0  # for the others to end
START_S = 120.0


class Net(nn.Module):
    """Some megabytes, so that a save takes longer than a step."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 40_000), nn.Linear(40_000, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(torch.tanh(self.up(x))), labels)


def train(rank: int, port: int, folder: Path) -> None:
    """One rank, for ever; rank 0 writes down what it did."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model, made = Net().double(), torch.Generator().manual_seed(1)
    batch = {
        "x": torch.randn(4, 16, generator=made, dtype=torch.float64),
        "labels": torch.randn(4, 1, generator=made, dtype=torch.float64),
    }
    plan = sw.strategies.fsdp(sw.capture(model, batch), sw.Cluster.local(RANKS))
    pm = sw.parallelize(model, batch, plan=plan, timeout_s=20.0)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-3)
    kept = sw.CheckpointManager(folder / "kept", keep_last=2)
    step, newest = 0, kept.latest()
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
        saving = kept.save(step, pm, optimizer, extra={"loss": loss})
        if step % 3 == 0:  # at times beside the next step
            saving.wait()
            note("complete", [step])


def events(folder: Path) -> list[list[Any]]:
    """What rank 0 has written down so far."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        if line.endswith("]"):  # the last one may be cut off
            found.append(json.loads(line))
    return found


def one_round(folder: Path, chance: random.Random) -> str:
    """Start, kill, and see what is left."""
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
        assert time.monotonic() < deadline, "training did not go on"
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, 1.5))
    victim = chance.randrange(RANKS)
    os.kill(ranks[victim].pid or 0, signal.SIGKILL)
    for process in ranks:
        process.join(END_S)
        hung = process.is_alive()
        if hung:
            os.kill(process.pid or 0, signal.SIGUSR1)  # shows where it waits
            time.sleep(1.0)
            process.kill()
        assert not hung, f"a rank waits for ever after rank {victim} was killed"
    return check(folder, before)


def check(folder: Path, before: int) -> str:
    """The newest checkpoint is sound, new enough, and losses are those of other rounds."""
    found = events(folder)
    losses: dict[int, float] = {}
    for what, step, *rest in found:
        if what == "loss":
            assert losses.setdefault(step, rest[0]) == rest[0], f"another loss in step {step}"
    complete = max((step for what, step, *_ in found if what == "complete"), default=0)
    newest = sw.CheckpointManager(folder / "kept").latest()
    step = 0
    if newest is not None:
        verified = verify_checkpoint(newest)
        assert verified.ok, verified.problems
        step = verified.opened.manifest.step or 0
    assert step >= complete, f"step {complete} was complete, {step} is what is left"
    return f"began at {found[before][1]}, completed {complete}, newest {step}"


def main() -> None:
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    chance = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else None)
    for number in range(rounds):
        print(f"{number}: {one_round(folder, chance)}", flush=True)


if __name__ == "__main__":
    main()
