"""Rules of products, reductions, norms, losses, attention and convolutions, executed on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import runtime as operators
from shardwise.runtime.rng import Rng
from tests.property.rule_examples_math import CONSTANT, EXAMPLES, RUN, Arguments, f
from tests.support.rules import check_rule

EVERYDAY = 2  # calls of every operator
CALLS = [(op, *call) for op, calls in EXAMPLES.items() for call in enumerate(calls)]
CASES = [
    pytest.param(
        op,
        arguments,
        (2, 3, 2, 5)[i % 4],
        id=f"{op.removeprefix('aten.')}-{number}",
        marks=[] if number < EVERYDAY else pytest.mark.slow,
    )
    for i, (op, number, arguments) in enumerate(CALLS)
]
COMMUNICATING = {  # also tested on two mesh axes every day, with their first example
    "aten.cross_entropy_loss.default",
    "aten.embedding.default",
    "aten.layer_norm.default",
    "aten.softmax.int",
    "shardwise.batch_norm.default",
}


def check(op: str, arguments: Arguments, **options: Any) -> None:
    args, kwargs = arguments
    check_rule(op, args, kwargs, run=RUN.get(op), constant=CONSTANT.get(op, ()), **options)


@pytest.mark.parametrize(("op", "arguments", "ranks"), CASES)
def test_every_candidate_equals_the_full_call(op: str, arguments: Arguments, ranks: int) -> None:
    check(op, arguments, ranks=(ranks,), pairs=op in COMMUNICATING and arguments is EXAMPLES[op][0])


@pytest.mark.slow
@pytest.mark.parametrize(("op", "arguments", "ranks"), CASES)
def test_every_pair_of_candidates_equals_the_full_call(
    op: str, arguments: Arguments, ranks: int
) -> None:
    check(op, arguments, ranks=tuple(n for n in (2, 3, 4, 5) if n != ranks), pairs=True)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_drops_the_same_weights_on_any_number_of_ranks(causal: bool) -> None:
    def unsharded(
        q: Tensor, k: Tensor, v: Tensor, _: None, p: float, causal: bool, **gqa: Any
    ) -> Tensor:
        options = {"rng": Rng(0), "key": "node", "shape": (2, 6, 4, 4), "is_causal": causal, **gqa}
        return operators.attention(q, k, v, dropout_p=p, **options)

    args = (f(2, 6, 4, 3), f(2, 2, 4, 3), f(2, 2, 4, 5), None, 0.4, causal)
    op = "aten.scaled_dot_product_attention.default"
    check_rule(op, args, {"enable_gqa": True}, ranks=(2, 5), pairs=not causal, run=unsharded)
    undropped = torch.ops.aten.scaled_dot_product_attention(*args[:4], 0.0, causal, enable_gqa=True)
    assert not torch.allclose(unsharded(*args, enable_gqa=True), undropped)
