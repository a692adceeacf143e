"""Settings shared by all tests: the environment, hypothesis profiles, the process pool."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["SHARDWISE_CACHE"] = "off"  # tests of the cache use a separate folder

import hypothesis
import pytest

from tests.support import pool as pools

# Without compiled files, each of the tests' many processes compiles all of Shardwise again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`, which rewrites the expected files of `tests/golden`."""
    parser.addoption("--update-golden", action="store_true", help="rewrite expected files")


def pytest_collection_finish() -> None:
    """Exclude imported objects from later garbage collections.

    Memory prediction and some libraries collect explicitly, which takes 0.3 s with all objects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file, see `tests/support/workers.py`."""
    from tests.support.workers import ByFile

    return ByFile(config, log)


@pytest.fixture(scope="session")
def pool() -> Callable[[int], pools.Pool]:
    """Return `pool`, as in `pool(4).run("module:function", *args)`."""
    return pools.pool
