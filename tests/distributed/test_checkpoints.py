"""A checkpoint written under one plan goes on under any other, on gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import (
    BEFORE,
    SETTINGS,
    Run,
    assert_same_state,
    continued,
    load_runs,
    save_run,
)
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


def saved_under(pool: Callable[[int], Pool], setting: str, model: str, path: Path) -> Run:
    ranks = SETTINGS[setting][0]
    if ranks == 1:
        return save_run(setting, model, path)
    return pool(ranks).run(save_run, setting, model, path, timeout=300)[0]


def check_pairs(
    pool: Callable[[int], Pool], model: str, before: list[str], after: list[str], folder: Path
) -> None:
    """Every one of `before` is loaded under every one of `after`."""
    expected = continued(model)[BEFORE:]
    saved = {s: saved_under(pool, s, model, folder / s) for s in before}
    paths = [folder / s for s in before]
    for setting in after:
        ranks = SETTINGS[setting][0]
        if ranks == 1:
            runs = [load_runs(setting, model, paths)]
        else:
            runs = pool(ranks).run(load_runs, setting, model, paths, timeout=300)
        for found in runs:
            for name, (state, losses) in zip(before, found, strict=True):
                assert_same_state(state, saved[name])
                assert losses == pytest.approx(expected, rel=1e-9), f"{name} to {setting}"


def test_one_goes_on_under_another(pool: Callable[[int], Pool], tmp_path: Path) -> None:
    check_pairs(pool, "fused_gpt", ["pp2", "fsdp3"], ["one", "tp2"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["odd", "fused_gpt"])
def test_all_pairs(pool: Callable[[int], Pool], model: str, tmp_path: Path) -> None:
    check_pairs(pool, model, list(SETTINGS), list(SETTINGS), tmp_path)
