"""Rules of products, reductions, norms, losses, attention and convolutions, executed on ranks."""

from __future__ import annotations

import pytest

from tests.property.rule_examples_math import CONSTANT, EXAMPLES, RUN, Arguments
from tests.support.rules import check_rule

CASES = [
    pytest.param(op, arguments, id=f"{op.removeprefix('aten.')}-{number}")
    for op, calls in EXAMPLES.items()
    for number, arguments in enumerate(calls)
]


@pytest.mark.parametrize(("op", "arguments"), CASES)
def test_every_candidate_equals_the_whole_call(op: str, arguments: Arguments) -> None:
    args, kwargs = arguments
    check_rule(op, args, kwargs, ranks=(2, 5), run=RUN.get(op), constant=CONSTANT.get(op, ()))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "arguments"), CASES)
def test_every_pair_of_candidates_equals_the_whole_call(op: str, arguments: Arguments) -> None:
    args, kwargs = arguments
    check_rule(op, args, kwargs, ranks=(3, 4), pairs=True, run=RUN.get(op), constant=CONSTANT.get(op, ()))
