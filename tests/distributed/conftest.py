"""Pools of ranks live as long as the tests that use them."""

from __future__ import annotations

import pytest

from tests.support import pool as pools


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last of them, the ranks end: each group they made polls its connections."""
    here = item.config.rootpath / "tests" / "distributed"
    if nextitem is None or not nextitem.path.is_relative_to(here):
        pools.close_all()
