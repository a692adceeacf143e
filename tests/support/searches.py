"""Searches that end as those for many ranks do, for tests of what is made of their plans.

For few ranks a search goes on with other cuts and layouts (`planner/search/polish.py`), which takes
most of its time. `tests/unit/planner/search` shows what comes of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def unpolished() -> Iterator[None]:
    """Within it, `sw.plan` and all that calls it leave plans as the search found them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.planner.local_search.MAX_RANKS", 0)
        yield
