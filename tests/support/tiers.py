"""Grids of cases, of which only a few run outside the slow tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], everyday: Callable[[int, Any], bool]) -> list[Any]:
    """Mark the cases as slow for which `everyday(index, case)` is false."""
    return [
        case if everyday(i, case) else pytest.param(*_values(case), marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
