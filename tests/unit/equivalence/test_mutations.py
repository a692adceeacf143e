"""The verifier is tested by mutation: every broken program is caught and its place named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.equivalence import Certificate
from shardwise.errors import ProgramError
from shardwise.program import Program
from tests.unit.equivalence import mutations as m
from tests.unit.equivalence.cases import Case, case

QUICK = (("biased_mlp", "tensor"), ("biased_mlp", "ddp"), ("mlp", "tensor"), ("resnet", "ddp"))
LONG = (("fused_gpt", "tensor"), ("fused_gpt", "hybrid"), ("t5", "tensor"))
ALL = [*QUICK, *(pytest.param(*spec, marks=pytest.mark.slow) for spec in LONG)]


def made(name: str, strategy: str) -> Case:
    return case(name, strategy, dp=2, tp=2) if strategy == "hybrid" else case(name, strategy)


def assert_caught(certificate: Certificate, *words: str) -> None:
    assert not certificate.ok
    assert certificate.first_difference, str(certificate)
    for word in words:
        assert word in certificate.first_difference, certificate.first_difference


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "strategy"), ALL)
def test_every_move_is_needed(name: str, strategy: str) -> None:
    found = made(name, strategy)
    whole = found.check()
    assert whole.ok, str(whole)
    mutants = list(m.move_mutants(found.program))
    assert mutants
    survived = [
        mutant.name
        for mutant in mutants
        if found.check(mutant.program).ok != (mutant.equivalent is not None)
    ]
    assert survived == []


@pytest.mark.parametrize(("name", "strategy"), [*QUICK, *LONG[:2]])
def test_the_structure_alone_shows_a_missing_move(name: str, strategy: str) -> None:
    program = made(name, strategy).program
    program.verify()
    for mutant in m.move_mutants(program):
        if mutant.equivalent is None:
            with pytest.raises(ProgramError):
                mutant.program.verify()


def test_a_partial_sum_taken_for_a_whole_value_names_the_node_that_takes_it() -> None:
    found = case("biased_mlp", "tensor")
    broken = m.drop_step(found.program, m.find_step(found.program, "rt.reduce"))
    assert_caught(found.check(broken), "node mse_loss", "cases.py", "tp (parameters): same")


def test_a_bias_added_on_every_rank_names_its_plan_entry() -> None:
    found = case("biased_mlp", "tensor")
    broken = m.drop_step(found.program, m.find_step(found.program, "rt.as_partial"))
    assert_caught(found.check(broken), "node linear_1", 'parameters["down.bias"]', "at down")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_averaged_gradients_are_caught(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = case("biased_mlp", strategy)
    assert found.check().ok
    m.average_gradients(monkeypatch)
    assert_caught(found.check(), "the gradient of parameter", "summed over dp")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_dropped_last_bucket_is_caught(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = case("mlp", strategy)
    assert found.check().ok
    m.skip_last_bucket(monkeypatch)
    assert_caught(found.check(), "the gradient of parameter")


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "down.weight"])
def test_swapped_shards_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = case("biased_mlp", "tensor")
    m.swap_shards(monkeypatch, name, "tp")
    assert_caught(found.check(), f'parameters["{name}"]')


def test_a_fused_dim_cut_into_ranges_instead_of_heads_is_caught() -> None:
    found = case("fused_gpt", "tensor")
    broken = m.contiguous_shard(found.program, "blocks.0.qkv.weight", "tp")
    assert_caught(found.check(broken), "blocks.0.qkv", 'parameters["blocks.*.qkv.weight"]')


@pytest.mark.parametrize(("name", "strategy"), [("fused_gpt", "ddp"), ("fused_gpt", "tensor")])
def test_a_tied_gradient_that_is_not_summed_is_caught(name: str, strategy: str) -> None:
    found = made(name, strategy)
    broken = m.untied(found.program, "tok.weight")
    assert_caught(found.check(broken), "the gradient of parameter tok.weight, tied as head.weight")


def test_a_stale_buffer_is_caught() -> None:
    found = case("resnet", "ddp")
    certificate = found.check(m.stale_buffers(found.program))
    assert_caught(certificate, "buffer blocks", "running_mean", "batch_norm")


BROKEN: dict[str, tuple[str, str, Callable[[Program], Program], str]] = {
    "offsets": ("fused_gpt", "tensor", m.wrong_rows, "rt.embedding_rows"),
    "sync": ("biased_mlp", "ddp", lambda p: m.unsynced(p, "up.weight"), "not synchronized"),
    "zero": ("biased_mlp", "fsdp", lambda p: m.unsynced(p, "up.weight"), "not synchronized"),
    "count": (
        "biased_mlp",
        "ddp",
        lambda p: m.change_keyword(p, "rt.partial_loss", "count", lambda n: n // 2),
        "node mse_loss",
    ),
    "statistics": (
        "resnet",
        "ddp",
        lambda p: m.change_keyword(p, "rt.batch_norm", "count", lambda n: n // 2),
        "batch_norm",
    ),
    "classes": (
        "fused_gpt",
        "tensor",
        lambda p: m.change_keyword(p, "rt.cross_entropy", "classes", lambda n: n - 20),
        "cross_entropy",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_wrong_counts_offsets_and_axes_are_caught(fault: str) -> None:
    name, strategy, change, word = BROKEN[fault]
    found = case(name, strategy)
    assert_caught(found.check(change(found.program)), word)
