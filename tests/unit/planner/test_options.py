from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import PlanError
from shardwise.planner.strategies import make_plan

NAMED = sw.strategies.strategy_names()
PUBLIC = {
    **{f"sw.strategies.{name}": getattr(sw.strategies, name) for name in (*NAMED, "make_plan")},
    "sw.plan": sw.plan,
    "sw.tune": sw.tune,
    "sw.advise": sw.advise,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_signature_shows_every_option(name: str) -> None:
    parameters = inspect.signature(PUBLIC[name]).parameters.values()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)
    assert all(p.annotation is not p.empty for p in parameters)
    assert "precision" in [p.name for p in parameters]


@pytest.mark.parametrize("name", NAMED)
def test_defaults_are_those_of_make_plan(name: str) -> None:
    shared = inspect.signature(make_plan).parameters
    own = {"pipeline": ("pp", "num_microbatches", "schedule"), "expert": ("ep",)}.get(name, ())
    for parameter in inspect.signature(getattr(sw.strategies, name)).parameters.values():
        if parameter.name in shared and parameter.name not in own:
            assert parameter.default == shared[parameter.name].default


@pytest.mark.parametrize("name", PUBLIC)
def test_a_misspelt_option_names_the_nearest(name: str) -> None:
    function: Callable[..., Any] = PUBLIC[name]
    with pytest.raises(PlanError, match=r"no option 'precison'; did you mean 'precision'\?") as e:
        function(precison="bf16")
    assert e.value.where == name
    assert "recompute" in (e.value.hint or "")
