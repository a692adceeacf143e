"""Every operator of the zoo has a rule that is executed here, or a reason for having none."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardwise.sharding import rules  # noqa: F401 - registers the table
from shardwise.sharding.registry import REPLICATED, RULES
from shardwise.shares import Shares
from tests.property.rule_examples import EXAMPLES, RANDOM, Arguments
from tests.property.rule_examples_math import EXAMPLES as MATH
from tests.support.rules import check_rule
from tests.support.tiers import thinned

ZOO = Path(__file__).parents[1] / "data" / "ops.csv"
CALLS = [(op, arguments) for op, calls in EXAMPLES.items() for arguments in calls]
RANKS = (2, 3, 4, 5, Shares(2, 1), Shares(1, 0, 3))
CASES = [
    pytest.param(op, arguments, RANKS[number % 6], id=f"{op.removeprefix('aten.')}-{number}")
    for number, (op, arguments) in enumerate(CALLS)
]


@pytest.mark.parametrize(("op", "arguments", "ranks"), CASES)
def test_every_candidate_equals_the_full_call(op: str, arguments: Arguments, ranks: int) -> None:
    args, kwargs = arguments
    check_rule(op, args, kwargs, ranks=(ranks,))


@pytest.mark.parametrize("op", RANDOM)
def test_shards_of_random_numbers_equal_one_draw(op: str) -> None:
    for args, kwargs in RANDOM[op]:
        check_rule(op, args, kwargs, random=True)


@pytest.mark.parametrize("op", thinned(RANDOM, lambda i, _: i % 6 == 0))
def test_shards_on_two_axes_of_random_numbers_equal_one_draw(op: str) -> None:
    for args, kwargs in RANDOM[op]:
        check_rule(op, args, kwargs, ranks=(), random=True, pairs=True)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "arguments", "ranks"), CASES)
def test_every_pair_of_candidates_equals_the_full_call(
    op: str, arguments: Arguments, ranks: int
) -> None:
    args, kwargs = arguments
    others = tuple(n for n in RANKS if n != ranks)
    check_rule(op, args, kwargs, ranks=others, pairs=True)


REMOVED = {  # never in a captured graph
    "aten._assert_tensor_metadata.default",
    "aten._assert_scalar.default",
    "aten._native_batch_norm_legit_functional.default",  # becomes shardwise.batch_norm
    "aten.item.default",
    "aten.sym_size.int",
    "aten.sym_storage_offset.default",
    "transformers.grouped_mm_fallback.default",  # becomes routing
}


def is_removed(op: str) -> bool:
    """Return whether capture removes an operator: in-place, symbolic, higher-order or Python."""
    name = op.split(".")[1] if op.startswith("aten.") else ""
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__ior__"
    return in_place or op in REMOVED or op.startswith(("py:", "HOP:"))


def zoo_operators() -> list[str]:
    with ZOO.open() as file:
        return [row["op"] for row in csv.DictReader(file)]


def in_table(op: str, table: Mapping[str, object]) -> bool:
    """Return whether a table has an entry for an operator, or for all its overloads."""
    return op in table or op.rsplit(".", 1)[0] in table


def test_every_operator_of_the_zoo_has_a_rule_or_a_reason() -> None:
    known = [op for op in zoo_operators() if not is_removed(op)]
    assert [op for op in known if not in_table(op, {**RULES, **REPLICATED})] == []


def test_every_rule_of_the_zoo_is_executed() -> None:
    known = [op for op in zoo_operators() if not is_removed(op)]
    executed = {*EXAMPLES, *RANDOM, *MATH}
    assert [op for op in known if op not in executed and not in_table(op, REPLICATED)] == []
