"""Mutation tests of the verifier: every broken program is caught and its fault located."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.equivalence import Certificate
from shardwise.errors import ProgramError
from shardwise.program import Program
from shardwise.runtime.operators import ring, routing
from tests.unit.equivalence import mutations as m
from tests.unit.equivalence.cases import Case, case

QUICK = (("biased_mlp", "tensor"), ("biased_mlp", "ddp"), ("mlp", "tensor"), ("resnet", "ddp"))
LONG = (("fused_gpt", "tensor"), ("fused_gpt", "hybrid"), ("routed", "expert"), ("t5", "tensor"))
ALL = [*QUICK, *(pytest.param(*spec, marks=pytest.mark.slow) for spec in LONG)]


def make_case(name: str, strategy: str) -> Case:
    return case(name, strategy, dp=2, tp=2) if strategy == "hybrid" else case(name, strategy)


def assert_caught(certificate: Certificate, *words: str) -> None:
    assert not certificate.ok
    assert certificate.first_difference, str(certificate)
    for word in words:
        assert word in certificate.first_difference, certificate.first_difference


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "strategy"), ALL)
def test_every_redistribution_is_needed(name: str, strategy: str) -> None:
    subject = make_case(name, strategy)
    intact = subject.check()
    assert intact.ok, str(intact)
    mutants = list(m.move_mutants(subject.program))
    assert mutants
    survived = [
        mutant.name
        for mutant in mutants
        if subject.check(mutant.program).ok != (mutant.equivalent is not None)
    ]
    assert survived == []


@pytest.mark.parametrize(("name", "strategy"), [*QUICK, *LONG[:3]])
def test_the_structural_check_finds_a_missing_redistribution(name: str, strategy: str) -> None:
    program = make_case(name, strategy).program
    program.verify()
    for mutant in m.move_mutants(program):
        if mutant.equivalent is None:
            with pytest.raises(ProgramError):
                mutant.program.verify()


def test_a_partial_sum_used_as_a_full_value_names_the_node_that_uses_it() -> None:
    subject = case("biased_mlp", "tensor")
    broken = m.drop_step(subject.program, m.find_step(subject.program, "rt.reduce"))
    assert_caught(subject.check(broken), "node mse_loss", "cases.py", "tp (parameters): same")


def test_a_bias_added_on_every_rank_names_its_plan_entry() -> None:
    subject = case("biased_mlp", "tensor")
    broken = m.drop_step(subject.program, m.find_step(subject.program, "rt.as_partial"))
    assert_caught(subject.check(broken), "node linear_1", 'parameters["down.bias"]', "at down")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_averaged_gradients_are_caught(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = case("biased_mlp", strategy)
    assert subject.check().ok
    m.average_gradients(monkeypatch)
    assert_caught(subject.check(), "the gradient of parameter", "summed over dp")


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_dropped_last_bucket_is_caught(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = case("mlp", strategy)
    assert subject.check().ok
    m.skip_last_bucket(monkeypatch)
    assert_caught(subject.check(), "the gradient of parameter")


@pytest.mark.parametrize("name", ["up.weight", "up.bias", "down.weight"])
def test_swapped_shards_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = case("biased_mlp", "tensor")
    m.swap_shards(monkeypatch, name, "tp")
    assert_caught(subject.check(), f'parameters["{name}"]')


def test_a_fused_dim_sharded_into_ranges_instead_of_heads_is_caught() -> None:
    subject = case("fused_gpt", "tensor")
    broken = m.contiguous_shard(subject.program, "blocks.0.qkv.weight", "tp")
    assert_caught(subject.check(broken), "blocks.0.qkv", 'parameters["blocks.*.qkv.weight"]')


@pytest.mark.parametrize(("name", "strategy"), [("fused_gpt", "ddp"), ("fused_gpt", "tensor")])
def test_a_tied_gradient_that_is_not_summed_is_caught(name: str, strategy: str) -> None:
    subject = make_case(name, strategy)
    broken = m.untied(subject.program, "tok.weight")
    assert_caught(
        subject.check(broken), "the gradient of parameter tok.weight, tied as head.weight"
    )


def test_a_stale_buffer_is_caught() -> None:
    subject = case("resnet", "ddp")
    certificate = subject.check(m.stale_buffers(subject.program))
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
    subject = case(name, strategy)
    assert_caught(subject.check(change(subject.program)), word)


def wrong_order(counts: Tensor) -> Tensor:
    """Leave received rows by source rank."""
    return torch.arange(int(counts.sum()))


def wrong_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
    """Do not send gradients back to the ranks of their tokens."""
    index, width = ctx.axis.index, grads[0].shape[1]
    own = ctx.counts[index] if not ctx.forth else torch.cat([t[index] for t in ctx.counts])
    return grads[0].new_zeros(int(own.sum()), width), None, None, None


def later_keys(self: Any, step: int, num_heads: int) -> Any:
    """Show queries the later keys of their own block."""
    return (piece._replace(diagonal=None) for piece in PIECES(self, step, num_heads))


def unsent_gradients(self: Any, pair: Any, step: int) -> Any:
    """Do not add the gradients of keys and values of other ranks."""
    arrive = SHIFT(self, pair, step)
    return lambda: tuple(x * 0 if x.dtype == torch.float64 and step else x for x in arrive())


PIECES, SHIFT = ring._Ring.pieces, ring._Ring.shift
FAULTS: dict[str, tuple[str, str, object, str, object]] = {
    "rows by source": ("routed", "expert", routing, "_expert_order", wrong_order),
    "no gradients of rows": ("routed", "expert", routing._Exchange, "backward", wrong_backward),
    "a later key": ("fused_gpt", "context", ring._Ring, "pieces", later_keys),
    "blocks unsent": ("fused_gpt", "context", ring._Ring, "shift", unsent_gradients),
    "no fold": ("fused_gpt", "context", ring._Ring, "fold", lambda _, x, *args, **kwargs: x),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_messages_of_experts_and_rings_are_caught(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, strategy, owner, attribute, wrong = FAULTS[fault]
    options = {"attention": "ring"} if strategy == "context" else {}
    subject = case(name, strategy, **options)
    monkeypatch.setattr(owner, attribute, staticmethod(wrong) if attribute == "backward" else wrong)
    assert not subject.check().ok
