"""Disturb elastic trainings at random, and compare their results with an undisturbed one.

    python -m benchmarks.elastic --events 30 --plans ddp fsdp tensor pipeline --ranks 4

Each plan is trained once on one rank without disturbances, and once on several ranks of which some
are killed (SIGKILL), stopped (SIGSTOP), slowed (SIGSTOP and SIGCONT) or added and removed at random
moments: several at once, rank 0 too, during saves and changes of ranks. The losses of all steps and
the final parameters must agree, in float64. Prints a table of recovery times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw

VOCAB, WIDTH, LENGTH, BLOCKS = 31, 24, 9, 4
KINDS = ("ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline", "hybrid", "3d")
EVENTS = ("kill", "kill", "kill_two", "kill_rank_0", "stop", "slow", "add", "remove")
LIMIT = 1e-9
EVERY = 5  # steps between copies of the state
SILENT_S = 6.0
PARTS = ("abort", "agree", "connect", "compile", "move", "copy")


# ------------------------------------------------------------ the training
class Net(nn.Module):
    """Residual blocks with dropout over an embedding, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Samples:
    """Samples by index, with random augmentation."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCAB, (LENGTH + 1,), generator=generator)
        ids[0] = torch.randint(0, VOCAB, ())
        return {"ids": ids[:-1], "labels": ids[1:]}


class Pause(sw.Callback):
    """Make steps last as long as those of a larger model."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step(self, trainer: sw.Trainer, metrics: Any) -> None:
        time.sleep(self.seconds)


def strategy(graph: sw.Graph, cluster: sw.Cluster, kind: str = "ddp") -> sw.Plan:
    """Return a plan of a kind for any number of ranks."""
    named, ranks = sw.strategies, cluster.num_ranks
    even = ranks % 2 == 0
    if kind == "pipeline":
        pp = next(n for n in (4, 3, 2, 1) if ranks % n == 0)
        return named.hybrid(graph, cluster, dp=ranks // pp, pp=pp, num_microbatches=2)
    if kind == "hybrid":
        tp = 2 if even else 1
        return named.hybrid(graph, cluster, dp=ranks // tp, tp=tp, zero=1)
    if kind == "3d":
        pp = 2 if even else 1
        tp = 2 if even and ranks % 4 == 0 else 1
        dp = ranks // pp // tp
        return named.hybrid(graph, cluster, dp=dp, tp=tp, pp=pp, zero=1, num_microbatches=2)
    plan: sw.Plan = getattr(named, kind)(graph, cluster)
    return plan


def config(kind: str, steps: int, pause_s: float, folder: Path) -> dict[str, Any]:
    """Return the config of a training, which is also valid JSON."""
    return {
        "model": "benchmarks.elastic:Net",
        "data": {"train": "benchmarks.elastic:Samples", "batch_size": 8},
        "steps": steps,
        "optimizer": {"name": "AdamW", "args": {"lr": 0.003}},
        "lr_schedule": {"name": "CosineAnnealingLR", "args": {"T_max": "total_steps"}},
        "clip_norm": 1.0,
        "ema": 0.9,
        "plan": {"name": "benchmarks.elastic:strategy", "args": {"kind": kind}},
        "callbacks": {"name": "benchmarks.elastic:Pause", "args": {"seconds": pause_s}},
        "checkpoints": {"every_steps": 15},
        "logs": {"console": "off"},
        "folder": str(folder),
        "timeout_s": 60,
        "elastic": {"min_ranks": 1, "every_steps": EVERY, "silent_s": SILENT_S, "replace": True},
    }


def undisturbed(folder: Path, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and final parameters of a training on one rank."""
    fields = config("ddp", steps, 0.0, folder) | {"elastic": None, "callbacks": []}
    with sw.Trainer(**fields) as trainer:
        losses = list(trainer.fit().losses)
        return losses, trainer.state_dict()


# ------------------------------------------------------------ disturbances
@dataclass
class Run:
    """A training in progress, and the disturbances so far."""

    process: subprocess.Popen[bytes]
    folder: Path
    rng: random.Random
    ranks: int
    events: list[str] = field(default_factory=list)
    stopped: dict[int, float] = field(default_factory=dict)  # pid -> when to continue it

    def step(self) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        return 0

    def members(self) -> list[int]:
        """Return the process ids in the order of the newest generation's ranks."""
        return [pid for _, pid in sorted(self._children())]

    def _children(self) -> Iterator[tuple[int, int]]:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                if parent != self.process.pid:
                    continue
                pairs = (entry / "environ").read_text().split("\0")
                environment = dict(p.split("=", 1) for p in pairs if "=" in p)
                yield int(environment["SHARDWISE_MEMBER"]), int(entry.name)

    def disturb(self) -> None:
        """Do one random thing to the training."""
        kind, pids = self.rng.choice(EVENTS), self.members()
        if not pids:
            return
        chosen = self.rng.sample(pids, min(len(pids), 2 if kind == "kill_two" else 1))
        if kind == "kill_rank_0":
            chosen = [pids[0]]
        if kind in ("add", "remove"):
            count = self.ranks + (1 if kind == "add" else -1)
            (self.folder / "ranks").write_text(str(max(2, min(8, count))))
        elif kind in ("stop", "slow"):
            os.kill(chosen[0], signal.SIGSTOP)
            if kind == "slow":
                self.stopped[chosen[0]] = time.monotonic() + self.rng.uniform(0.2, 2.0)
        else:
            if len(pids) - len(chosen) < 1:
                return
            for pid in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.events.append(kind)

    def resume_slowed(self) -> None:
        for pid, at in list(self.stopped.items()):
            if time.monotonic() > at:
                del self.stopped[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def disturbed(
    kind: str, ranks: int, folder: Path, steps: int, pause_s: float, events: int, seed: int
) -> tuple[Run, int, str]:
    """Train with random disturbances; return the run, its exit code and its output."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(json.dumps(config(kind, steps, pause_s, folder)))
    command = [sys.executable, "-m", "shardwise.cli", "train", str(path), "--ranks", str(ranks)]
    log = (folder / "output.txt").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    run = Run(process, folder, random.Random(seed), ranks)
    due: float | None = None
    after = 0
    deadline = time.monotonic() + 120 + 20 * events + steps * (pause_s + 0.5)
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        run.resume_slowed()
        if run.step() < 1 or len(run.events) >= events:
            continue
        if due is None:
            # A third of the events come within a second of the last one: during its recovery.
            # Others wait for progress, so that the training is not ended by them alone.
            is_late = run.rng.random() < 0.67
            after = run.step() + (run.rng.randint(3, 12) if is_late else 0)
            due = time.monotonic() + (0 if is_late else run.rng.uniform(0, 1))
        elif time.monotonic() > due and run.step() >= after:
            run.disturb()
            due = None
    if process.poll() is None:
        process.kill()
    return run, process.wait(), (folder / "output.txt").read_text(errors="replace")


# ------------------------------------------------------------ comparison
def differences(folder: Path, losses: Sequence[float], state: dict[str, Tensor]) -> list[str]:
    """Describe how a run differs from the undisturbed one."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    problems = []
    if [row["step"] for row in rows] != list(range(1, len(losses) + 1)):
        problems.append(f"the log has steps {[row['step'] for row in rows]}")
    else:
        worst = max(abs(r["loss"] - e) / abs(e) for r, e in zip(rows, losses, strict=True))
        if not worst < LIMIT:
            problems.append(f"a loss differs by {worst:.1e}")
    latest = sw.CheckpointManager(folder / "checkpoints").latest()
    assert latest is not None
    loaded = sw.load_checkpoint(latest)
    if loaded.step != len(losses):
        problems.append(f"the last checkpoint is of step {loaded.step}")
    for name, value in state.items():
        error = (loaded.state_dict[name] - value).abs().max() / value.abs().max()
        if not error < LIMIT:
            problems.append(f"{name} differs by {error:.1e}")
    return problems


def recoveries(folder: Path) -> list[dict[str, Any]]:
    """Return the generations of a run after the first."""
    lines = (folder / "elastic.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["generation"] > 1]


def main(arguments: Sequence[str]) -> int:
    """Disturb the trainings that the arguments describe; return 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--events", type=int, default=10, help="of each plan")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause-s", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="keep the folders of all runs here")
    options = parser.parse_args(arguments)
    failed, rows, total = 0, [], 0
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(options.keep or temporary).resolve()
        shutil.rmtree(base / "undisturbed", ignore_errors=True)
        losses, state = undisturbed(base / "undisturbed", options.steps)
        for number, kind in enumerate(options.plans):
            folder = base / kind
            shutil.rmtree(folder, ignore_errors=True)
            run, code, output = disturbed(
                kind,
                options.ranks,
                folder,
                options.steps,
                options.pause_s,
                options.events,
                options.seed + 1000 * number,
            )
            problems = [f"exit code {code}"] if code else differences(folder, losses, state)
            changes = recoveries(folder) if (folder / "elastic.jsonl").exists() else []
            rows += changes
            total += len(run.events)
            from_memory = [row for row in changes if row["state_from"] == "memory"]
            repeated = max((row["repeated"] for row in from_memory), default=0)
            if repeated > EVERY:
                problems.append(f"{repeated} steps repeated")
            print(
                f"{kind:9} {len(run.events):3} events, {len(changes)} generations, "
                f"{len(changes) - len(from_memory)} from checkpoints, at most {repeated} steps "
                f"repeated: {'; '.join(problems) or 'equal'}",
                flush=True,
            )
            print(f"          {' '.join(run.events)}", flush=True)
            if problems:
                failed += 1
                print(output[-3000:], flush=True)
    print(f"{total} events, {failed} runs differ")
    for part in PARTS:
        times = [row[f"{part}_s"] for row in rows if f"{part}_s" in row]
        if times:
            print(f"  {part:8} median {statistics.median(times):6.3f} s  max {max(times):6.3f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
