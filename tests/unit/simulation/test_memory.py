"""Memory computed from the liveness of values equals that of the running program."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

import shardwise as sw
from benchmarks.models import GPT, tokens
from shardwise.simulation.liveness import Liveness, Moment
from tests.support.tiers import thinned

PLANS: list[tuple[str, int, dict[str, Any]]] = [
    ("ddp", 2, {"recompute": "selective"}),
    ("fsdp", 4, {"precision": "bf16"}),
    ("zero2", 2, {"num_microbatches": 2}),
    ("tensor", 2, {}),
    ("pipeline", 2, {"pp": 2, "schedule": "1f1b", "num_microbatches": 4}),
]


@cache
def model() -> tuple[Any, Any, sw.Graph]:
    with torch.device("meta"):
        module = GPT(layers=4, width=64, heads=2, length=64, vocab=512)
    batch = tokens(8, 64, 512)
    return module, batch, sw.capture(module, batch)


@pytest.mark.parametrize(
    ("strategy", "ranks", "options"), thinned(PLANS, lambda _, plan: plan[0] == "fsdp")
)
def test_predicted_peak_matches_the_program(
    strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    module, batch, graph = model()
    cluster = sw.Cluster.local(ranks)
    plan = getattr(sw.strategies, strategy)(graph, cluster, **options)
    graph = sw.capture(module, batch, plan=plan)
    use = sw.simulate(graph, plan, cluster).memory[-1]
    actual = sw.compile(graph, plan).memory(plan.groups[-1][0])
    assert use.peak_bytes == pytest.approx(actual.peak_bytes, rel=0.05)
    assert sum(use.parts.values()) == pytest.approx(use.peak_bytes)
    assert use.parts["optimizer"] == pytest.approx(actual.parts["optimizer"], rel=0.01)


def chain(uses_of_first: int) -> Liveness:
    """Return x -> a -> … -> z, with x added at the end: its gradient lives for the entire chain."""
    names = ["x", *(f"v{i}" for i in range(uses_of_first)), "z"]
    moments = [Moment(node=0, operands=(), results=(("x", "x"),))]
    for i, (operand, result) in enumerate(itertools.pairwise(names[:-1]), start=1):
        moments.append(
            Moment(
                node=i, operands=(operand,), results=((result, result),),
                saves=frozenset({operand}), made_bytes=10.0, gradients=((operand, 10.0),),
            )
        )  # fmt: skip
    end = len(moments)
    last = names[-2]
    moments.append(
        Moment(
            node=end, operands=(last, "x"), results=(("z", "z"),), made_bytes=10.0,
            gradients=((last, 0.0), ("x", 0.0)),
        )
    )  # fmt: skip
    sizes = dict.fromkeys(names, 10.0)
    return Liveness(moments, [""] * (end + 1), sizes, frozenset(names))


def test_gradients_share_memory_and_are_added_in_place() -> None:
    arrays = chain(3).arrays()
    assert arrays["gradients"].tolist() == [10.0, 20.0, 20.0, 10.0, 10.0]
    assert arrays["backward_extra"].max() == 10.0
    assert arrays["freed"].sum() == arrays["saved"].sum() == 30.0


def test_values_of_many_blocks_are_saved_once_where_they_are_made() -> None:
    moments = [Moment(node=0, operands=(), results=(("mask", "mask"),))]
    moments += [
        Moment(node=i, operands=("mask",), results=((f"y{i}", f"y{i}"),), saves=frozenset({"mask"}))
        for i in (1, 2)
    ]
    sizes = {"mask": 8.0, "y1": 1.0, "y2": 1.0}
    arrays = Liveness(moments, ["", "layers.0", "layers.1"], sizes, frozenset()).arrays()
    for mode in ("", "_full", "_selective"):
        assert arrays["freed" + mode].tolist() == [8.0, 0.0, 0.0]
    assert arrays["shared"].tolist() == [0.0, 8.0, 8.0]


def test_values_from_another_block_count_where_they_enter() -> None:
    """A folded layer has the node that a value enters, but not all nodes that make it."""
    moments = [
        Moment(node=0, operands=(), results=(("x", "x"),)),
        Moment(node=1, operands=("x",), results=(("y", "y"),), saves=frozenset({"x"})),
        Moment(node=2, operands=("y",), results=(("z", "z"),)),
    ]
    sizes = dict.fromkeys("xyz", 8.0)
    arrays = Liveness(moments, ["layers.0", "layers.1", ""], sizes, frozenset("xyz")).arrays()
    for mode in ("", "_full", "_selective"):
        assert arrays["saved" + mode].tolist() == arrays["freed" + mode].tolist() == [0.0, 8.0, 0.0]
        assert arrays["entering" + mode].tolist() == [0.0, 8.0, 0.0]


def test_outputs_of_the_model_live_to_the_end_of_forward() -> None:
    moments = [
        Moment(node=0, operands=(), results=(("scores", "scores"),)),
        Moment(node=1, operands=("scores",), results=(("wide", "wide"),)),
        Moment(node=2, operands=("wide",), results=(("loss", "loss"),)),
    ]
    sizes = {"scores": 8.0, "wide": 16.0, "loss": 1.0}
    shown = Liveness(moments, [""] * 3, sizes, frozenset(sizes), frozenset({"scores"}))
    assert shown.arrays()["unsaved"].tolist() == [0.0, 8.0, 24.0]
    plain = Liveness(moments, [""] * 3, sizes, frozenset(sizes))
    assert plain.arrays()["unsaved"].tolist() == [0.0, 8.0, 16.0]
