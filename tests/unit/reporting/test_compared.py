"""Whatever two points of a search may differ in, the report has words for it."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from shardwise.planner.search.space import Point
from shardwise.reporting.compared import plans_of, why_not

BEST = Point(dp=2, tp=2, pp=2, schedule="1f1b", num_microbatches=4)
OTHERS = {
    "dp": (4,),
    "tp": (1,),
    "pp": (1,),
    "virtual": (2,),
    "schedule": ("zb_h1", ""),
    "num_microbatches": (1,),
    "zero": (3,),
    "outer": (1,),
    "recompute": ("full",),
    "offload": (("optimizer",), ("optimizer", "activations")),
    "layout": (1, 2, 3, 7),
    "grouping": (1,),
    "cuts": ((0, 12), (0, 3, 9, 40)),
}


def simulated(point: Point) -> dict[str, Any]:
    """A point as a plan's file has it."""
    told = {
        "what": str(point),
        "point": asdict(point),
        "step_time_s": 1.0,
        "causes": {"compute": 1.0},
        "memory": {"peak_bytes": 1.0, "limit_bytes": 2.0},
    }
    found: dict[str, Any] = json.loads(json.dumps(told))
    return found


@pytest.mark.parametrize("name", [field.name for field in fields(Point)])
def test_every_decision_has_words(name: str) -> None:
    for value in OTHERS[name]:
        other = replace(BEST, **{name: value})
        for one, two in ((BEST, other), (other, BEST)):
            best, found = simulated(one), simulated(two)
            rows = plans_of({"gap": {"layouts": 0}, "best": best, "runners_up": [found]})
            assert rows is not None
            mine, its = rows[1].words[name]
            assert mine.strip()
            assert its.strip()
            assert mine != its
            assert f"{its} instead of {mine}" in why_not(best, found)
