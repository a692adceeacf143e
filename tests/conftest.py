"""Settings shared by all tests: the environment, hypothesis profiles, the process pool."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest

from tests.support import pool as pools

hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` writes the expected files of `tests/golden` anew."""
    parser.addoption("--update-golden", action="store_true", help="write expected files anew")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests run in one process, and all that use pools of ranks in the same one."""
    for item in items:
        shared = "distributed" in item.path.parts
        group = "distributed" if shared else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def pool() -> Callable[[int], pools.Pool]:
    """`pool(4).run("module:function", *args)`: see `tests/support/pool.py`."""
    return pools.pool
