"""The behaviour of a parallel module whose plan has stages, on gloo processes.

Run as a program, this file is a rank that is killed in mid-step: `RANK WORLD PORT`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from benchmarks.bubbles import bubble_fraction
from shardwise.runtime import ParallelModule
from tests.support.pool import Pool
from tests.support.training import assert_close, make, plan_for

pytestmark = pytest.mark.distributed
STAGES = {"pp": 2, "num_microbatches": 3}
TIMEOUT_S = 6.0


def start(ranks: int, **options: Any) -> tuple[ParallelModule, Any]:
    model, batch = make("odd")
    plan = plan_for(model, batch, "pipeline", ranks, **{**STAGES, **options})
    return sw.parallelize(model, batch, plan=plan, record=True), batch


def outputs_and_parts() -> None:
    model, batch = make("odd")
    expected = model(**batch)
    pm, _ = start(4)
    loss, out = pm.train_step(batch, outputs=True)
    assert_close(loss, expected["loss"].detach(), "loss")
    assert_close(out["more"][0], expected["more"][0].detach(), "logits")
    assert torch.equal(out["more"][1][0], batch["labels"])
    full_batch = pm.gather_gradients()
    pm.zero_grad()
    part = pm.local_batch(batch)
    assert_close(pm.train_step(part, local=True), loss, "loss of parts")
    for name, gradient in pm.gather_gradients().items():
        assert_close(gradient, full_batch[name], f"gradient of {name}")
    evaluated = pm.eval_step(batch)
    model.eval()
    assert_close(evaluated["more"][0], model(**batch)["more"][0].detach(), "logits in eval mode")
    other = {key: value[:4] for key, value in batch.items()}
    assert_close(pm.train_step(other), make("odd")[0](**other)["loss"].detach(), "fewer samples")


@pytest.mark.slow
def test_outputs_local_batches_evaluation_and_other_sizes(pool: Callable[[int], Pool]) -> None:
    pool(4).run(outputs_and_parts, timeout=120)


def moved_state(ranks: int) -> None:
    """Two steps under stages, then one under another plan, equal three steps under stages."""
    first, batch = start(ranks)
    optimizer = sw.optimizer(first, torch.optim.AdamW, lr=0.01)
    for _ in range(2):
        first.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
    weights, state = first.gather_state_dict(), optimizer.state_dict()
    model, _ = make("odd")
    assert list(weights) == list(model.state_dict())
    model.load_state_dict(weights)
    second = sw.parallelize(model, batch, plan=plan_for(model, batch, "zero1", ranks))
    moved = sw.optimizer(second, torch.optim.AdamW, lr=0.01)
    moved.load_state_dict(state)
    for pm, opt in ((first, optimizer), (second, moved)):
        pm.train_step(batch)
        opt.step()
    state, expected = second.gather_state_dict(), first.gather_state_dict()
    for name, tensor in expected.items():
        assert_close(state[name], tensor, name, floor=0.01)


@pytest.mark.slow
def test_a_state_dict_moves_between_plans(pool: Callable[[int], Pool]) -> None:
    pool(2).run(moved_state, 2, timeout=120)


class Tied(nn.Module):
    """A language model with a tied head that can return scores only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        )
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        scores = self.head(x)
        if labels is None:
            return {"scores": scores}
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "scores": scores}


def without_weights() -> None:
    """A model on meta begins with the same weights under any plan, tied ones equal."""
    ids = torch.arange(24).view(4, 6)
    batch = {"ids": ids, "labels": ids.flip(0)}
    runs = []
    for strategy, options in (("ddp", {}), ("pipeline", {"pp": 2, "num_microbatches": 2})):
        with torch.device("meta"):
            model = Tied()
        plan = plan_for(model, batch, strategy, 2, **options)
        pm = sw.parallelize(model, batch, plan=plan, seed=3, init=Tied)
        state, loss = pm.gather_state_dict(), pm.train_step(batch)
        runs.append((state, loss, pm.eval_step({"ids": ids})["scores"]))
    (first, loss, scores), (second, other_loss, other_scores) = runs
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(other_loss, loss)
    torch.testing.assert_close(other_scores, scores)


def test_models_without_weights_and_batches_without_labels(pool: Callable[[int], Pool]) -> None:
    pool(2).run(without_weights, timeout=120)


def recorded(path: str) -> Any:
    pm, batch = start(2, schedule="zero_bubble")
    pm.train_step(batch)
    pm.trace()
    pm.train_step(batch)
    return pm.trace(path)


def test_every_action_and_transfer_is_recorded(pool: Callable[[int], Pool], tmp_path: Any) -> None:
    trace, nothing = pool(2).run(recorded, str(tmp_path / "trace.json"), timeout=120)
    assert nothing is None
    assert (tmp_path / "trace.json").stat().st_size > 1000
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    for rank in (0, 1):
        names = [e["name"] for e in events if e["pid"] == rank]
        for kind in "FIW":
            assert all(f"{rank}{kind}{k}" in names for k in range(3))
        assert sum(name.startswith("send") for name in names) >= 3
        assert sum(name.startswith("receive") for name in names) >= 3
    assert 0 <= bubble_fraction(trace).overall < 1


@pytest.mark.slow
def test_a_rank_killed_during_a_step_is_named() -> None:
    port = str(29500 + os.getpid() % 4000)
    command = [sys.executable, __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join(["src", ".", environment.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "3", port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in ranks]
    assert ranks[1].returncode == -signal.SIGKILL, outputs[1]
    for rank in (0, 2):
        assert ranks[rank].returncode == 1
        assert "RankError: rank 1 died" in outputs[rank], outputs[rank]
        seconds = float(outputs[rank].split("after ")[-1].split()[0])
        assert seconds < TIMEOUT_S + 12


def die(rank: int, world: int, port: str) -> None:
    """Train; rank 1 kills itself when it computes its second micro-batch."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    model, batch = make("odd")
    plan = plan_for(model, batch, "pipeline", world, pp=world, num_microbatches=3)
    pm = sw.parallelize(model, batch, plan=plan, timeout_s=TIMEOUT_S)
    pm.train_step(batch)
    begun = time.monotonic()
    if rank == 1:
        executor = next(program for _, program in pm._programs.items()).executor  # type: ignore[attr-defined]
        run = executor._run

        def once(step: Any, action: Any, **options: Any) -> None:
            if str(action) == "1F1":
                os.kill(os.getpid(), signal.SIGKILL)
            run(step, action, **options)

        executor._run = once
    try:
        pm.train_step(batch)
    finally:
        print(f"after {time.monotonic() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    die(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
