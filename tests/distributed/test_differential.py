"""Random training scripts: Shardwise agrees with plain PyTorch, or refuses in the right place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.differential.running import run
from benchmarks.differential.scripts import generate
from tests.support.pool import Pool

pytestmark = pytest.mark.distributed


def check(seed: int, pool: Callable[[int], Pool], folder: Path) -> None:
    script = generate(seed)
    outcome = run(script, pool(script.ranks), folder)
    assert outcome.ok, f"{outcome.verdict}: {script}\n{outcome.detail}\n{script.source}"


def test_scripts_are_the_same_for_a_seed() -> None:
    assert generate(17) == generate(17)
    assert len({generate(seed).source for seed in range(50)}) == 50


@pytest.mark.parametrize("seed", [5, 7, 28])
def test_scripts_agree_or_are_refused(
    pool: Callable[[int], Pool], tmp_path: Path, seed: int
) -> None:
    check(seed, pool, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10_000, 10_060))
def test_more_scripts_agree_or_are_refused(
    pool: Callable[[int], Pool], tmp_path: Path, seed: int
) -> None:
    check(seed, pool, tmp_path)
