"""Sequence and context parallelism equal one device: losses, gradients, three AdamW steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support import attentions, training
from tests.support.pool import Pool
from tests.support.training import check_parallel

pytestmark = pytest.mark.distributed
EVERYDAY = [
    ("tensor", 3, {"sequence_parallel": True}),
    ("context", 4, {"attention": "ring"}),
    ("hybrid", 4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
]
SLOW = [
    ("tensor", 2, {"sequence_parallel": True}),
    ("tensor", 4, {"sequence_parallel": True}),
    ("hybrid", 4, {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3}),
    ("context", 2, {"zero": 3}),
    ("context", 3, {}),
    ("context", 3, {"attention": "ring"}),
    ("context", 4, {"attention": "heads"}),
    ("context", 4, {"attention": "gather"}),
    ("hybrid", 4, {"cp": 2, "tp": 2, "attention": "ring"}),
    ("hybrid", 4, {"cp": 2, "pp": 2, "num_microbatches": 3, "attention": "ring"}),
    ("hybrid", 4, {"dp": 2, "cp": 2, "zero": 2}),
    ("hybrid", 4, {"cp": 2, "pp": 2, "num_microbatches": 3}),
]


@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_gpt_on_shards_of_its_sequence(
    pool: Callable[[int], Pool], strategy: str, ranks: int, options: dict[str, object]
) -> None:
    check_parallel(pool, "fused_gpt", strategy, ranks, options)


WAYS = [  # no rank count divides 17 queries or 11 keys of a memory; 3 key heads are too few for 4
    (2, {"cp": 2, "attention": "gather"}),
    (3, {"cp": 3, "attention": "ring"}),
    (4, {"cp": 4, "attention": "ring"}),
    (4, {"cp": 4, "attention": "heads"}),
    (6, {"cp": 6, "attention": "heads"}),
    (4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["", "_full"])
@pytest.mark.parametrize("kind", attentions.KINDS)
@pytest.mark.parametrize(("ranks", "options"), WAYS)
def test_kinds_of_attention_on_shards_of_the_sequence(
    pool: Callable[[int], Pool], ranks: int, options: dict[str, object], kind: str, form: str
) -> None:
    check_parallel(pool, f"attention_{kind}{form}", "hybrid", ranks, options, 2)


PACKED = [
    ("mask", 3, {"cp": 3, "attention": "ring"}),
    ("flex", 2, {"cp": 2, "attention": "gather"}),
    ("flex", 3, {"cp": 3, "attention": "ring"}),
    ("flex", 4, {"cp": 4, "attention": "heads"}),
    ("flex", 4, {"cp": 2, "tp": 2, "sequence_parallel": True}),
    ("flex", 4, {"dp": 2, "cp": 2, "zero": 3, "attention": "ring"}),
    ("compiled", 3, {"dp": 1, "cp": 3}),
    ("scores", 3, {"cp": 3}),
    ("scores", 4, {"cp": 2, "tp": 2}),
    ("varlen", 2, {"cp": 2, "attention": "heads"}),
    ("varlen", 3, {"cp": 3, "attention": "ring"}),
    ("varlen", 4, {"cp": 4, "attention": "gather"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "options"), PACKED)
def test_packed_documents_on_shards_of_the_sequence(
    pool: Callable[[int], Pool], kind: str, ranks: int, options: dict[str, object]
) -> None:
    rows = 1 if kind == "varlen" else 3
    runs = pool(ranks).run(
        training.parallel, f"packed_{kind}", "hybrid", ranks, options, rows, timeout=300
    )
    reference = "documents_with_scores" if kind == "scores" else "documents"
    for run in runs:
        training.assert_equal(run, training.dense(f"packed_{reference}", rows))
