"""Inexact synchronization on gloo processes equals its reference in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.plans import Sync
from tests.support import inexact
from tests.support.inexact import FORMS, STEPS
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed
History = list[dict[str, torch.Tensor]]


def assert_equal(histories: list[History], expected: list[Any], first: int = 0) -> None:
    for rank, history in enumerate(histories):
        for step, (actual, wanted) in enumerate(zip(history, expected[first:], strict=True)):
            for name, tensor in wanted[rank].items():
                where = f"rank {rank} step {step} {name}"
                torch.testing.assert_close(
                    actual[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda m, w=where: f"{w}: {m}"
                )


def compare(pool: Pool, syncs: dict[str, Sync], ranks: int, **options: Any) -> None:
    expected = inexact.reference(syncs, ranks, **options)
    assert_equal(pool(ranks).run(inexact.run, syncs, ranks, **options), expected)


EVERYDAY = {("overlap", 3), ("stale_int8", 2), ("stale_owner", 2)}


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        pytest.param(form, ranks, marks=[] if (form, ranks) in EVERYDAY else pytest.mark.slow)
        for form in FORMS
        for ranks in (2, 3, 4, 5, 8)
    ],
)
def test_ranks_compute_the_reference(pool: Pool, form: str, ranks: int) -> None:
    compare(pool, {"*": FORMS[form]}, ranks, optimizer="sgd")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["diloco", "stale_1", "int8", "topk"])
def test_adamw_and_clipping_by_the_norm_of_each_replica(pool: Pool, form: str) -> None:
    compare(pool, {"*": FORMS[form]}, 3, optimizer="adamw", max_norm=0.3)


@pytest.mark.slow
def test_every_glob_has_its_own_synchronization(pool: Pool) -> None:
    syncs = {"embed*": FORMS["stale_1"], "up*": FORMS["fragments"], "down*": FORMS["powersgd"]}
    compare(pool, syncs, 3, optimizer="adamw", max_norm=0.3)


# ------------------------------------------------------------ checkpoints


def resumed(folder: str, syncs: dict[str, Sync], ranks: int, at: int, wait: bool) -> Any:
    """Train, save in the middle, continue in a new module; return both histories."""
    pm, opt, batches = inexact.start(syncs, ranks)
    before = inexact.train(pm, opt, batches[:at])
    saving = sw.save_checkpoint(folder, pm, opt, step=at, wait=wait)
    straight = inexact.train(pm, opt, batches[at:STEPS])
    saving.wait()
    pm, opt, batches = inexact.start(syncs, ranks)
    sw.load_checkpoint(folder, pm, opt)
    again = {e.spec.name: e.leaf.detach().clone() for e in pm.store.entries}
    return before[-1], again, straight, inexact.train(pm, opt, batches[at:STEPS])


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[] if f == "overlap" else pytest.mark.slow) for f in FORMS]
)
def test_a_resumed_run_continues_exactly(pool: Pool, tmp_path: Path, form: str) -> None:
    results = pool(3).run(resumed, str(tmp_path / "c"), {"*": FORMS[form]}, 3, 4, form != "overlap")
    for before, again, straight, continued in results:
        assert all(torch.equal(again[n], before[n]) for n in before)
        for a, b in zip(straight, continued, strict=True):
            assert all(torch.equal(a[n], b[n]) for n in a)


def saved(folder: str, syncs: dict[str, Sync], ranks: int, at: int) -> Any:
    pm, opt, batches = inexact.start(syncs, ranks)
    history = inexact.train(pm, opt, batches[:at])
    sw.save_checkpoint(folder, pm, opt, step=at)
    return history[-1], _state(pm, opt)


def loaded(folder: str, syncs: dict[str, Sync], ranks: int) -> Any:
    pm, opt, _ = inexact.start(syncs, ranks)
    sw.load_checkpoint(folder, pm, opt)
    return {e.spec.name: e.leaf.detach().clone() for e in pm.store.entries}, _state(pm, opt)


def _state(pm: Any, opt: Any) -> dict[str, Any]:
    sync, store = pm.store.reducer.state, pm.store
    moments, late = {}, {}
    for entry in store.entries:
        name, owned = entry.spec.name, entry.zero >= 2
        moments[name] = opt.state[entry.piece]["exp_avg"]
        if owned:
            moments[name] = store.gather_full(entry, moments[name], piece=True)
        if queue := sync.late.get(name):
            late[name] = [store.gather_full(entry, p.wait(), piece=owned) for p in queue]
    return {
        "residuals": dict(sync.feedback.residuals),
        "late": late,
        "anchors": dict(sync.anchors),
        "momenta": dict(sync.momenta),
        "moments": moments,
        "updates": dict(sync.updates),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["overlap", "diloco_int8", "stale_int8", "powersgd", "stale_owner"]
)
@pytest.mark.parametrize("ranks", [2, 5])
def test_another_number_of_ranks_continues_from_means_and_sums(
    pool: Pool, tmp_path: Path, form: str, ranks: int
) -> None:
    folder, syncs = str(tmp_path / "c"), {"*": FORMS[form]}
    before = pool(3).run(saved, folder, syncs, 3, 4)
    after = pool(ranks).run(loaded, folder, syncs, ranks)
    for name in before[0][0]:
        mean = torch.stack([parameters[name] for parameters, _ in before]).mean(0)
        for parameters, state in after:
            torch.testing.assert_close(parameters[name], mean)
            for key in ("late", "anchors", "momenta"):
                torch.testing.assert_close(state[key].get(name), before[0][1][key].get(name))
            moments = torch.stack([state["moments"][name] for _, state in before]).mean(0)
            torch.testing.assert_close(state["moments"][name], moments)
            assert state["updates"].get(name) == before[0][1]["updates"].get(name)
        if name in before[0][1]["residuals"]:
            total = sum(state["residuals"][name] for _, state in before)
            again = sum(state["residuals"][name] for _, state in after)
            torch.testing.assert_close(again, total)
    assert math.isfinite(sum(float(p.sum()) for p in after[0][0].values()))


def resumed_zero_1(folder: str) -> Any:
    """Continue late gradients whose optimizer state is sharded."""
    syncs, batches = {"*": FORMS["stale_1"]}, inexact.make()[1]
    pm, opt, _ = inexact.start(syncs, 3, zero=1)
    inexact.train(pm, opt, batches[:2])
    sw.save_checkpoint(folder, pm, opt, step=2)
    straight = inexact.train(pm, opt, batches[2:4])
    pm, opt, _ = inexact.start(syncs, 3, zero=1)
    sw.load_checkpoint(folder, pm, opt)
    return straight, inexact.train(pm, opt, batches[2:4])


@pytest.mark.slow
def test_late_gradients_with_sharded_optimizer_state_continue(pool: Pool, tmp_path: Path) -> None:
    for straight, continued in pool(3).run(resumed_zero_1, str(tmp_path / "c")):
        for a, b in zip(straight, continued, strict=True):
            assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.slow
def test_a_synchronous_plan_and_plain_torch_continue_from_the_last_round(
    pool: Pool, tmp_path: Path
) -> None:
    folder, syncs = str(tmp_path / "c"), {"*": FORMS["local_sgd"]}
    before = pool(3).run(saved, folder, syncs, 3, 4)
    rounds = inexact.reference(syncs, 3, optimizer="adamw", steps=3)[-1][0]
    model, _ = inexact.make()
    opt = torch.optim.AdamW(model.parameters(), lr=inexact.LEARNING_RATE)
    sw.load_checkpoint(folder, model, opt)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), rounds[name])
        mean = torch.stack([state["moments"][name] for _, state in before]).mean(0)
        torch.testing.assert_close(opt.state[parameter]["exp_avg"], mean)
    for parameters, _ in pool(2).run(loaded, folder, {}, 2):
        assert all(torch.allclose(parameters[n], rounds[n]) for n in rounds)
