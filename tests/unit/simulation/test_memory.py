"""Memory worked out from lives of values is that of the program that runs."""

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
        found = GPT(layers=4, width=64, heads=2, length=64, vocab=512)
    batch = tokens(8, 64, 512)
    return found, batch, sw.capture(found, batch)


@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    thinned(PLANS, lambda _, plan: plan[0] == "fsdp"),
)
def test_the_peak_is_that_of_the_program(
    strategy: str, ranks: int, options: dict[str, Any]
) -> None:
    module, batch, graph = model()
    cluster = sw.Cluster.local(ranks)
    plan = getattr(sw.strategies, strategy)(graph, cluster, **options)
    graph = sw.capture(module, batch, plan=plan)
    use = sw.simulate(graph, plan, cluster).memory[-1]
    truth = sw.compile(graph, plan).memory(plan.groups[-1][0])
    assert use.peak_bytes == pytest.approx(truth.peak_bytes, rel=0.05)
    assert sum(use.parts.values()) == pytest.approx(use.peak_bytes)
    assert use.parts["optimizer"] == pytest.approx(truth.parts["optimizer"], rel=0.01)


def chain(uses_of_first: int) -> Liveness:
    """x -> a -> … -> z, with x added to the last: its gradient waits for the whole chain."""
    names = ["x", *(f"v{i}" for i in range(uses_of_first)), "z"]
    moments = [Moment(node=0, operands=(), results=(("x", "x"),))]
    for i, (given, made) in enumerate(itertools.pairwise(names[:-1]), start=1):
        moments.append(
            Moment(
                node=i, operands=(given,), results=((made, made),), saves=frozenset({given}),
                made_bytes=10.0, gradients=((given, 10.0),),
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
    found = chain(3).arrays()
    assert found["gradients"].tolist() == [10.0, 20.0, 20.0, 10.0, 10.0]
    assert found["backward_extra"].max() == 10.0
    assert found["freed"].sum() == found["saved"].sum() == 30.0


def test_what_many_blocks_use_is_kept_once_and_where_it_is_made() -> None:
    moments = [Moment(node=0, operands=(), results=(("mask", "mask"),))]
    moments += [
        Moment(node=i, operands=("mask",), results=((f"y{i}", f"y{i}"),), saves=frozenset({"mask"}))
        for i in (1, 2)
    ]
    sizes = {"mask": 8.0, "y1": 1.0, "y2": 1.0}
    found = Liveness(moments, ["", "layers.0", "layers.1"], sizes, frozenset()).arrays()
    for mode in ("", "_full", "_selective"):
        assert found["freed" + mode].tolist() == [8.0, 0.0, 0.0]
    assert found["shared"].tolist() == [0.0, 8.0, 8.0]


def test_what_comes_from_another_block_counts_where_it_enters() -> None:
    """Layers that are folded into one have the node that a value enters, not all that make it."""
    moments = [
        Moment(node=0, operands=(), results=(("x", "x"),)),
        Moment(node=1, operands=("x",), results=(("y", "y"),), saves=frozenset({"x"})),
        Moment(node=2, operands=("y",), results=(("z", "z"),)),
    ]
    sizes = dict.fromkeys("xyz", 8.0)
    found = Liveness(moments, ["layers.0", "layers.1", ""], sizes, frozenset("xyz")).arrays()
    for mode in ("", "_full", "_selective"):
        assert found["saved" + mode].tolist() == found["freed" + mode].tolist() == [0.0, 8.0, 0.0]
        assert found["entering" + mode].tolist() == [0.0, 8.0, 0.0]


def test_what_a_model_gives_back_is_there_to_the_end_of_forward() -> None:
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
