"""Ranks for the tests over NCCL: one GPU each where there are enough, else they share one.

`SHARDWISE_NCCL_TESTS=gloo` runs the same tests over gloo on CPUs, to debug them without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests.support import pool as pools


@pytest.fixture(scope="session")
def backend() -> str:
    """Return the backend under test; skip where it cannot run."""
    name = os.environ.get("SHARDWISE_NCCL_TESTS", "nccl")
    if name == "nccl" and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        pytest.skip("needs a GPU and NCCL; SHARDWISE_NCCL_TESTS=gloo runs it on CPUs")
    return name


@pytest.fixture(scope="session")
def ranks(backend: str) -> Callable[[int], pools.Pool]:
    """Return a pool of ranks by its size, as in `ranks(4).run(worker, *args)`."""
    return lambda num_ranks: pools.pool(num_ranks, backend)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free the GPU after the last of these tests."""
    here = item.config.rootpath / "tests" / "gpu"
    if nextitem is None or not nextitem.path.is_relative_to(here):
        pools.close_all()
