"""A checkpoint written under one plan continues under any other, on gloo processes."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import shardwise as sw
from shardwise.checkpoint import box_io
from tests.support.checkpoints import (
    BEFORE,
    FURTHER,
    SETTINGS,
    Run,
    assert_same_state,
    continued,
    load_runs,
    save_run,
    start,
)
from tests.support.pool import Pool
from tests.support.training import error_of, make, plan_for

pytestmark = pytest.mark.distributed


def saved_under(pool: Callable[[int], Pool], setting: str, model: str, path: Path) -> Run:
    ranks = {**SETTINGS, **FURTHER}[setting][0]
    if ranks == 1:
        return save_run(setting, model, path)
    return pool(ranks).run(save_run, setting, model, path, timeout=300)[0]


def check_pairs(
    pool: Callable[[int], Pool], model: str, before: list[str], after: list[str], folder: Path
) -> None:
    """Load every checkpoint of `before` under every setting of `after`."""
    expected = continued(model)[BEFORE:]
    saved = {s: saved_under(pool, s, model, folder / s) for s in before}
    paths = [folder / s for s in before]
    for setting in after:
        ranks = {**SETTINGS, **FURTHER}[setting][0]
        if ranks == 1:
            runs = [load_runs(setting, model, paths)]
        else:
            runs = pool(ranks).run(load_runs, setting, model, paths, timeout=300)
        for outcomes in runs:
            for name, (state, losses) in zip(before, outcomes, strict=True):
                assert_same_state(state, saved[name])
                assert losses == pytest.approx(expected, rel=1e-9), f"{name} to {setting}"


def test_a_pipeline_checkpoint_continues_under_tensor_parallelism(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    check_pairs(pool, "fused_gpt", ["pp2"], ["tp2"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["odd", "fused_gpt"])
def test_all_pairs_of_plans(pool: Callable[[int], Pool], model: str, tmp_path: Path) -> None:
    check_pairs(pool, model, list(SETTINGS), list(SETTINGS), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["odd", "fused_gpt"])
def test_pairs_with_further_plans(pool: Callable[[int], Pool], model: str, tmp_path: Path) -> None:
    check_pairs(pool, model, list(FURTHER), ["one", "pp2"], tmp_path / "a")
    check_pairs(pool, model, ["one", "tp2xpp2"], list(FURTHER), tmp_path / "b")


def replicated(path: Path) -> list[str]:
    """Save and load a plain module that is the same on all ranks, as with DDP."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    sw.save_checkpoint(path, wrapped, optimizer)
    expected = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    sw.load_checkpoint(path, wrapped, optimizer)
    assert torch.equal(model.weight, expected)
    return sorted(file.name for file in path.iterdir())


def test_replicated_tensors_are_written_once(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    names = pool(2).run(replicated, tmp_path / "c", timeout=60)[0]
    kinds = ("model", "optimizer")
    files = [f"{kind}-0000{rank}.safetensors" for rank in range(2) for kind in kinds]
    assert set(names) <= {"checkpoint.json", *files}
    assert {name[-13:-12] for name in names} >= {"0", "1"}  # both ranks wrote
    manifest = json.loads((tmp_path / "c" / "checkpoint.json").read_text())
    sizes = sum(manifest["files"].values())
    assert sizes < 1.1 * 2 * 4 * (64 * 64 + 64)


# ------------------------------------------------------------ failures of one rank


def fail_on_rank_1(path: Path) -> dict[str, object]:
    """Fail on rank 1 while writing, encoding and reading; return the errors."""
    rank = dist.get_rank()
    run = start("ddp2", "odd")
    run.step()
    outcomes: dict[str, object] = {}
    write = os.write

    def full(file: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    sw.save_checkpoint(path / "good", run.module, run.optimizer)
    os.write = full if rank == 1 else write  # type: ignore[assignment]
    outcomes["disk"] = error_of(sw.save_checkpoint, path / "full", run.module, run.optimizer)
    os.write = write
    extra = {"x": object()} if rank == 1 else {}
    outcomes["extra"] = error_of(sw.save_checkpoint, path / "extra", run.module, extra=extra)
    saving = sw.save_checkpoint(path / "later", run.module, run.optimizer, wait=False)
    outcomes["later"] = error_of(saving.wait, 60)
    other = path / "good" if rank == 0 else path / "nothing"
    outcomes["load"] = error_of(sw.load_checkpoint, other, run.module)
    sw.load_checkpoint(path / "later", run.module, run.optimizer)
    outcomes["files"] = sorted(p.name for p in path.iterdir())
    return outcomes


def test_a_failure_of_one_rank_fails_all_and_names_it(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    first, second = pool(2).run(fail_on_rank_1, tmp_path, timeout=120)
    assert "CheckpointError: rank 1: no space for the checkpoint" in first["disk"]
    assert "CheckpointError: no space for the checkpoint" in second["disk"]
    assert "rank 1: `extra` cannot be written as JSON" in first["extra"]
    assert first["later"] == second["later"] == "no error"
    assert "rank 1: there is no such folder" in first["load"]
    assert first["files"] == ["good", "later"]


def mixed(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state, with master weights and a loss scale, before and after a round trip."""
    model, batch = make("fused_gpt")
    model = model.float()
    options = {"precision": sw.Precision(compute="float16", master="float32", loss_scale="dynamic")}
    plan = plan_for(model, batch, "zero1", 2, **options)
    pm = sw.parallelize(model, batch, plan=plan)
    opt = sw.optimizer(pm, torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(3):
        pm.train_step(batch)
        opt.step()
        opt.zero_grad()
    mean = {e.spec.name: e.piece.detach().clone() + 1 for e in pm.store.entries}
    assert pm.store.scaler is not None
    pm.store.scaler.scale = 64.0
    sw.save_checkpoint(path, pm, opt, copies={"ema": mean})
    before = pm.gather_state_dict()
    assert all(t.dtype is torch.float32 for t in before.values() if t.is_floating_point())
    twin = copy.deepcopy(model)
    other = sw.parallelize(twin, batch, plan=plan_for(twin, batch, "fsdp", 2, **options))
    moved = sw.optimizer(other, torch.optim.SGD, lr=0.1, momentum=0.9)
    filled = {e.spec.name: torch.zeros_like(e.piece) for e in other.store.entries}
    sw.load_checkpoint(path, other, moved, copies={"ema": filled})
    assert other.store.scaler is not None
    assert other.store.scaler.scale == 64.0
    assert other.rng.step == 3
    for entry in other.store.entries:
        assert torch.equal(filled[entry.spec.name], entry.piece.detach() + 1), entry
    pm.train_step(batch)
    assert torch.isfinite(other.train_step(batch))
    return before, other.gather_state_dict()


@pytest.mark.slow
def test_master_weights_averages_and_loss_scales_are_restored(
    pool: Callable[[int], Pool], tmp_path: Path
) -> None:
    for before, after in pool(2).run(mixed, tmp_path / "c", timeout=120):
        assert set(before) == set(after)
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name


def pretrained(folder: Path, strategy: str, options: dict[str, Any]) -> tuple[int, int, float]:
    """Fill a meta model from a Hugging Face folder; return bytes read, local bytes and the loss."""
    model, batch = make("fused_gpt")
    expected = model(**batch).item()
    read: list[int] = []
    original_read = box_io.Reader._read

    def counted(self: Any, file: Any, begin: int, nbytes: int) -> Tensor:
        read.append(nbytes)
        return original_read(self, file, begin, nbytes)

    empty = copy.deepcopy(model).to("meta")
    empty.head.weight = empty.tok.weight  # type: ignore[union-attr]  `to` untied it
    pm = sw.parallelize(
        empty, batch, plan=plan_for(empty, batch, strategy, 2, **options), device="cpu"
    )
    box_io.Reader._read = counted  # type: ignore[method-assign]
    try:
        sw.load_checkpoint(folder, pm)
    finally:
        box_io.Reader._read = original_read  # type: ignore[method-assign]
    local = sum(e.leaf.nbytes if e.zero < 3 else e.piece.nbytes for e in pm.store.entries)
    assert pm.train_step(batch).item() == pytest.approx(expected, rel=1e-9)
    return sum(read), local, expected


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("tensor", {}),
        pytest.param("fsdp", {}, marks=pytest.mark.slow),
        pytest.param("pipeline", {"pp": 2, "num_microbatches": 3}, marks=pytest.mark.slow),
    ],
)
def test_each_rank_reads_only_its_part_of_a_hugging_face_folder(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: str, options: dict[str, Any]
) -> None:
    model, _ = make("fused_gpt")
    state = {n: t for n, t in model.state_dict().items() if n != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    total = sum(t.nbytes for t in state.values())
    for read, local, _ in pool(2).run(pretrained, tmp_path, strategy, options, timeout=120):
        assert local < 0.75 * total
        assert read < 1.1 * local + 4096 * len(state)
