"""Grids of cases: a few of them every day, all of them in the slow tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], everyday: Callable[[int, Any], bool]) -> list[Any]:
    """The cases; those of which `everyday(index, case)` does not hold are marked as slow."""
    return [
        case if everyday(i, case) else pytest.param(*_values(case), marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
