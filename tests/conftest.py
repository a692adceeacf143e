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
os.environ["SHARDWISE_CACHE"] = "off"  # tests of the cache have a folder of their own

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
    """`--update-golden` writes the expected files of `tests/golden` anew."""
    parser.addoption("--update-golden", action="store_true", help="write expected files anew")


def pytest_collection_finish() -> None:
    """What was imported stays: no later collection of garbage looks at it again.

    Predictions of memory and some libraries collect explicitly: 0.3 s each with all that is here.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """See `tests/support/workers.py`."""
    from tests.support.workers import ByFile

    return ByFile(config, log)


@pytest.fixture(scope="session")
def pool() -> Callable[[int], pools.Pool]:
    """`pool(4).run("module:function", *args)`: see `tests/support/pool.py`."""
    return pools.pool
