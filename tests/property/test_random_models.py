"""Random small models under random strategies compute the same as on one device."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.errors import InfeasiblePlan
from tests.support.random_models import Recipe, build, recipes

SPLITS = {4: [(2, 2)], 6: [(2, 3), (3, 2)]}


@st.composite
def strategies(draw: Any) -> tuple[str, int, dict[str, Any]]:
    """Draw a strategy's name, the number of ranks, and its options."""
    ranks = draw(st.sampled_from([2, 3, 4, 5, 6, 7]))
    names = ["ddp", "zero1", "zero2", "fsdp", "tensor", "tensor", "tensor"]
    name = draw(st.sampled_from(names + ["hybrid"] * 3 * (ranks in SPLITS)))
    options: dict[str, Any] = {}
    if name == "hybrid":
        dp, tp = draw(st.sampled_from(SPLITS[ranks]))
        options = {"dp": dp, "tp": tp, "zero": draw(st.integers(0, 3))}
    hybrid = {axis: options[axis] for axis in ("dp", "tp") if axis in options}
    sizes = hybrid or {"tp" if name == "tensor" else "dp": ranks}
    if draw(st.integers(0, 2)) == 0:
        options["shares"] = {axis: draw(weights(size)) for axis, size in sizes.items()}
    return name, ranks, options


def weights(ranks: int) -> st.SearchStrategy[list[int]]:
    """Draw shares of the ranks along an axis, some of which may be zero."""
    return st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any)


def check(recipe: Recipe, strategy: tuple[str, int, dict[str, Any]]) -> None:
    """Verify the plan; only a batch of one sample may be impossible to shard."""
    name, ranks, options = strategy
    model, batch = build(recipe)
    graph = sw.capture(model, batch)
    try:
        plan = getattr(sw.strategies, name)(graph, sw.Cluster.local(ranks), **options)
    except InfeasiblePlan:
        assert recipe.batch == 1
        assert name != "tensor"
        return
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(recipes(max_layers=3), strategies())
def test_random_models_equal_one_device(recipe: Recipe, strategy: Any) -> None:
    check(recipe, strategy)


@pytest.mark.slow
@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(recipes(max_layers=5), strategies())
def test_many_random_models_equal_one_device(recipe: Recipe, strategy: Any) -> None:
    check(recipe, strategy)


def recipe(*layers: tuple[Any, ...], **changes: Any) -> Recipe:
    plain: dict[str, Any] = {
        "kind": "vectors",
        "batch": 4,
        "length": 4,
        "heads": 3,
        "head_dim": 4,
        "loss": "count",
        "classes": 7,
    }
    return Recipe(layers=layers, **{**plain, **changes})


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(
    "model_recipe",
    [
        recipe(("uneven",)),  # local parts of a chunk that are not equal
        recipe(("+", "mix", "shift"), length=5, batch=1),  # factors that refine without end
        recipe(("conv", "down", "batch"), kind="image"),  # a gradient of rounding errors only
    ],
    ids=lambda model_recipe: str(model_recipe.layers[0]),
)
def test_models_that_once_failed(model_recipe: Recipe, ranks: int) -> None:
    check(model_recipe, ("tensor", ranks, {}))
