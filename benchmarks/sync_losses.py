"""Train a small GPT with every inexact form of synchronization, and plot the losses.

    python -m benchmarks.sync_losses [--form local_sgd …] [--steps 300]

Two gloo processes train on the sources of Python's standard library, byte by byte, with the same
weights, batches and optimizer for every form. The loss is that of the synchronized parameters on
held-out text. Writes benchmarks/results/sync_losses.json, where forms of earlier runs stay, and
docs/pictures/sync_losses.svg. Exits with 1 if a form misses its documented distance.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import shardwise as sw
from benchmarks.pipeline import machine
from examples.small_gpt import SmallGPT

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "sync_losses.json"
PICTURE = ROOT / "docs" / "pictures" / "sync_losses.svg"
RANKS, ROWS, LENGTH, EVERY, RATE = 2, 16, 48, 20, 2e-3
OUTER = sw.OuterOptimizer(lr=0.7, momentum=0.6)

# Forms with the largest documented distance of the final loss from that of synchronous training.
FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "synchronous": ({}, 0.0),
    "local_sgd": ({"every": 10}, 0.05),
    "diloco": ({"every": 10, "outer": OUTER}, 0.1),
    "streaming": ({"every": 10, "outer": OUTER, "fragments": 2, "overlap": 2}, 0.1),
    "stale": ({"stale": 1}, 0.15),
    "stale_owner": ({"kind": "owner", "owner": 0, "stale": 1}, 0.15),
    "bf16": ({"compression": sw.Compression(kind="bf16")}, 0.02),
    "fp16": ({"compression": sw.Compression(kind="fp16")}, 0.02),
    "int8": ({"compression": sw.Compression(kind="int8")}, 0.02),
    "fp8": ({"compression": sw.Compression(kind="fp8")}, 0.05),
    "onebit": ({"compression": sw.Compression(kind="onebit", warmup=20)}, 0.25),
    "topk": ({"compression": sw.Compression(kind="topk", ratio=0.05)}, 0.15),
    "randomk": ({"compression": sw.Compression(kind="randomk", ratio=0.25)}, 0.25),
    "powersgd": ({"compression": sw.Compression(kind="powersgd", rank=4)}, 0.1),
}


def text() -> Tensor:
    """Return the bytes of some modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py")))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8).clamp(max=127).long()


def batch(data: Tensor, seed: int) -> dict[str, Tensor]:
    """Return rows from random places."""
    source = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(data) - LENGTH - 1, (ROWS, 1), generator=source)
    rows = data[starts + torch.arange(LENGTH + 1)]
    return {"ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def train(rank: int, folder: str, form: str, steps: int) -> None:
    """Train on one rank; the first one writes the losses."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{form}", rank=rank, world_size=RANKS
    )
    data = text()
    split = len(data) * 9 // 10
    torch.manual_seed(0)
    model = SmallGPT(vocab=128)
    held_out = [batch(data[split:], seed) for seed in range(8)]
    sync = sw.Sync(**FORMS[form][0])
    graph = sw.capture(model, held_out[0])
    plan = sw.strategies.ddp(graph, sw.Cluster.local(RANKS), constraints={"*": sync})
    module = sw.parallelize(model, held_out[0], plan)
    optimizer = sw.optimizer(module, torch.optim.AdamW, lr=RATE)
    losses = {}
    for step in range(steps + 1):
        if step % EVERY == 0:
            model.load_state_dict(module.gather_state_dict())
            with torch.no_grad():
                losses[step] = sum(float(model(**b)) for b in held_out) / len(held_out)
        optimizer.zero_grad()
        module.train_step(batch(data[:split], 1000 + step))
        optimizer.step()
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(form: str, steps: int) -> dict[str, float]:
    """Return the losses of a form by step."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (folder, form, steps), nprocs=RANKS)  # type: ignore[no-untyped-call]
        losses: dict[str, float] = json.loads(Path(folder, "losses.json").read_text())
    return losses


def final(losses: Mapping[str, float]) -> float:
    """Return the loss after the last step."""
    return losses[max(losses, key=int)]


# ------------------------------------------------------------ the picture
WIDTH, HEIGHT, LEFT, TOP = 480, 250, 46, 14
COLORS = ("#111827", "#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed")
COLORS += ("#0891b2", "#db2777", "#65a30d", "#9a3412")
COLORS += ("#4b5563", "#0d9488", "#b45309", "#a21caf")


def picture(losses: Mapping[str, Mapping[str, float]]) -> str:
    """Return the losses as lines, with their final values."""
    points = {form: {int(s): loss for s, loss in of.items()} for form, of in losses.items()}
    last = max(step for of in points.values() for step in of)
    shown = [loss for of in points.values() for step, loss in of.items() if step >= EVERY]
    low, high = min(shown), max(shown)
    size = f'width="{LEFT + WIDTH + 190}" height="{TOP + HEIGHT + 40}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    parts += ['<rect width="100%" height="100%" fill="#ffffff"/>']

    def place(step: float, loss: float) -> tuple[float, float]:
        right = (step - EVERY) / max(1, last - EVERY)
        return LEFT + WIDTH * right, TOP + HEIGHT * (high - loss) / (high - low)

    def label(x: float, y: float, words: str, color: str = "#374151", anchor: str = "start") -> str:
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        return f'<text {at} font-size="12" fill="{color}">{words}</text>'

    for number in range(5):
        loss = low + (high - low) * number / 4
        x, y = place(EVERY, loss)
        parts.append(
            f'<line x1="{x}" y1="{y:.1f}" x2="{x + WIDTH}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        )
        parts.append(label(x - 6, y + 4, f"{loss:.1f}", anchor="end"))
    for step in range(EVERY, last + 1, max(EVERY, (last - EVERY) // 5)):
        parts.append(label(place(step, low)[0], TOP + HEIGHT + 18, str(step), anchor="middle"))
    parts.append(label(LEFT + WIDTH / 2, TOP + HEIGHT + 34, "step", anchor="middle"))
    for row, (form, of) in enumerate(points.items()):
        color = COLORS[row % len(COLORS)]
        line = " ".join(
            "{:.1f},{:.1f}".format(*place(step, loss)) for step, loss in of.items() if step >= EVERY
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        words = f"{of[max(of)]:.3f} {form.replace('_', ' ')}"
        parts.append(label(LEFT + WIDTH + 14, TOP + 14 + 18 * row, words, color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def missed(losses: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Print the distance of every form, and yield the forms that are too far away."""
    target = final(losses["synchronous"])
    for form, of in losses.items():
        distance, limit = final(of) / target - 1, FORMS[form][1]
        print(f"{form:12} {final(of):.4f}, {distance:+.1%} (at most {limit:.0%})", flush=True)
        if distance > limit:
            yield form


def run(forms: Sequence[str], steps: int) -> int:
    """Train, write the figures and the picture; return the exit status."""
    earlier = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    losses = {} if earlier.get("steps") != steps else earlier["losses"]
    for form in forms:
        losses[form] = measure(form, steps)
        losses = {name: losses[name] for name in FORMS if name in losses}
        result = {"command": "python -m benchmarks.sync_losses", "machine": machine()}
        result |= {"steps": steps, "ranks": RANKS, "losses": losses}
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        PICTURE.write_text(picture(losses), encoding="utf-8")
        print(f"{form}: {final(losses[form]):.4f}", flush=True)
    return 1 if any([*missed(losses)]) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--form", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    sys.exit(run(options.form, options.steps))
