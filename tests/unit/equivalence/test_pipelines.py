"""Mutation tests of pipelines: every fault is caught and located."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.equivalence import Certificate, check, double, run_reference
from shardwise.equivalence.check import make_trials
from shardwise.equivalence.ranks import subject_of
from shardwise.equivalence.reference import Reference, widen_graph
from shardwise.equivalence.trial import Trial
from shardwise.program import Pipeline, RankProgram, build_pipeline
from shardwise.runtime.pipeline.executor import BatchReader
from shardwise.runtime.pipeline.transfers import Exchange, Message, TiedParameters
from shardwise.runtime.store import ParameterStore
from tests.support.tiers import thinned
from tests.unit.equivalence.cases import build


@dataclass(frozen=True)
class Case:
    pipeline: Pipeline
    reference: Reference
    batch: Any
    trials: list[Trial]

    def check(self, pipeline: Pipeline | None = None, **options: Any) -> Certificate:
        options = {"trials": self.trials, "timeout_s": 20, **options}
        return check(pipeline or self.pipeline, self.reference, self.batch, **options)


@cache
def case(name: str, **options: Any) -> Case:
    model, batch = double(*build(name))
    graph = widen_graph(sw.capture(model, batch))
    options = {"pp": 2, "num_microbatches": 2, **options}
    plan = sw.strategies.pipeline(graph, sw.Cluster.local(options["pp"]), **options)
    pipeline, reference = build_pipeline(graph, plan), run_reference(model, batch)
    return Case(pipeline, reference, batch, make_trials(pipeline, reference, batch))


def assert_caught(certificate: Certificate, *words: str) -> None:
    """Require a failed check whose first difference contains one of the words."""
    assert not certificate.ok
    assert certificate.first_difference, str(certificate)
    has_word = any(word in certificate.first_difference for word in words)
    assert has_word, f"none of {words} in: {certificate.first_difference}"


# ------------------------------------------------ faults of the runtime, while a test runs


@contextmanager
def patched(owner: type, name: str, replacement: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement)
        yield


def swapped_inputs(name: str) -> Any:
    """Let micro-batches 0 and 1 read each other's rows of an input."""
    rows = BatchReader._rows

    def swapped(self: BatchReader, tensor: torch.Tensor, key: str, splits: Any, k: int) -> Any:
        return rows(self, tensor, key, splits, 1 - k if key == name else k)

    return patched(BatchReader, "_rows", swapped)


def lost_accumulation(target: int, number: int) -> Any:
    """Lose the parameter gradients of one backward pass of a stage."""
    backward = ParameterStore.backward
    counts: dict[int, int] = {}

    @contextmanager
    def lost(self: ParameterStore, stage: int, *, last: bool) -> Iterator[None]:
        with backward(self, stage, last=last):
            before = [None if e.leaf.grad is None else e.leaf.grad.clone() for e in self.entries]
            yield
            counts[stage] = counts.get(stage, -1) + 1  # a stage is on one rank here
            if (stage, counts[stage]) == (target, number):
                for entry, grad in zip(self.entries, before, strict=True):
                    entry.leaf.grad = grad

    return patched(ParameterStore, "backward", lost)


def changed_transfer(value: str, change: Callable[[torch.Tensor], torch.Tensor], back: bool) -> Any:
    """Change the tensors that a transfer sends."""
    send = Exchange.send

    def changed(self: Exchange, tensor: torch.Tensor, message: Message) -> None:
        is_target = self.spec.transfers[message[0]].value == value and message[2] == back
        send(self, change(tensor) if is_target else tensor, message)

    return patched(Exchange, "send", changed)


# ------------------------------------------------ faults of the program


def without_gradient(pipeline: Pipeline, value: str) -> Pipeline:
    """Send no gradient back for a transferred value."""
    transfers = tuple(
        replace(t, gradient=False) if t.value == value else t for t in pipeline.transfers
    )
    return replace(pipeline, transfers=transfers)


def sending(pipeline: Pipeline, stage: int, value: str, other: str) -> Pipeline:
    """Let a stage send `other` instead of `value`."""

    def change(ranks: RankProgram) -> RankProgram:
        names = dict(zip(pipeline.stages[stage].program.graph.sends, ranks.sends, strict=True))
        names[value] = other
        return replace(ranks, sends=tuple(names.values()))

    program = pipeline.stages[stage].program
    changed = replace(program, rank_programs=tuple(map(change, program.rank_programs)))
    stages = list(pipeline.stages)
    stages[stage] = replace(stages[stage], program=changed)
    return replace(pipeline, stages=tuple(stages))


# ------------------------------------------------ tests


USERS = {  # where the next stage uses each transferred value
    ("fused_gpt", "add_2"): "blocks.1.n1",
    ("unet", "silu"): "the model",
    ("unet", "silu_2"): "up",
}
TRANSFERS = list(USERS)


@pytest.mark.parametrize("name", ["fused_gpt", "unet"])
def test_the_intact_pipelines_pass_and_send_the_expected_values(name: str) -> None:
    subject = case(name)
    assert subject.check().ok
    assert {(name, t.value) for t in subject.pipeline.transfers} == {
        k for k in TRANSFERS if k[0] == name
    }
    assert all(t.gradient for t in subject.pipeline.transfers)


@pytest.mark.parametrize(("name", "value"), TRANSFERS)
def test_a_transfer_without_its_gradient_is_caught(name: str, value: str) -> None:
    subject = case(name)
    certificate = subject.check(without_gradient(subject.pipeline, value))
    assert_caught(certificate, f"the gradient of %{value} ", f"transfer %{value}")


@pytest.mark.parametrize(("name", "value"), TRANSFERS)
def test_a_wrong_gradient_of_a_transfer_is_caught(name: str, value: str) -> None:
    with changed_transfer(value, lambda gradient: gradient.flip(0), back=True):
        certificate = case(name).check()
    assert_caught(certificate, f"the gradient of %{value} ", f"transfer %{value}")


REPLACED = [
    ("fused_gpt", "add_2", "add_1"),
    ("fused_gpt", "add_2", "linear_3"),
    ("unet", "silu_2", "silu_1"),
    ("unet", "silu", "conv2d"),
]


@pytest.mark.parametrize(("name", "value", "other"), REPLACED)
def test_a_transfer_of_another_value_of_the_same_shape_is_caught(
    name: str, value: str, other: str
) -> None:
    subject = case(name)
    values = subject.pipeline.graph.values
    assert values[value].shape == values[other].shape
    certificate = subject.check(sending(subject.pipeline, 0, value, other))
    assert_caught(certificate, f"at {USERS[name, value]} ", f"%{value}")


@pytest.mark.parametrize(("name", "value"), TRANSFERS)
def test_rows_sent_in_another_order_are_caught(name: str, value: str) -> None:
    with changed_transfer(value, lambda rows: rows.flip(0), back=False):
        certificate = case(name).check()
    assert_caught(certificate, f"at {USERS[name, value]} ", f"%{value}")


@pytest.mark.parametrize(
    ("name", "source", "node"),
    [
        ("fused_gpt", "input_ids", "node embedding "),
        ("fused_gpt", "labels", "node flatten_1 "),
        ("unet", "x", "node conv2d "),
        ("unet", "target", "node sub "),
    ],
)
def test_swapped_rows_of_an_input_are_caught(name: str, source: str, node: str) -> None:
    with swapped_inputs(source):
        assert_caught(case(name).check(), node)


def test_a_tied_gradient_that_is_not_summed_is_caught() -> None:
    with patched(TiedParameters, "sum_gradients", lambda self: None):
        certificate = case("fused_gpt").check()
    assert_caught(certificate, "gradient of parameter tok.weight, tied as head.weight")
    wrong = [c.what for c in certificate.failures if c.what.startswith("gradient")]
    assert wrong == ["gradient of tok.weight"]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("fused_gpt", "sum_2 / sum_", "sum_2 / (labels != -100).sum()"),
        ("unet", "False, count=3072)", "False, count=1536)"),
    ],
)
def test_a_mean_over_only_the_micro_batch_is_caught(name: str, old: str, new: str) -> None:
    subject = case(name)
    texts = subject_of(subject.pipeline).sources()
    edited = [text.replace(old, new) for text in texts]
    assert edited != texts
    certificate = subject.check(sources=edited)
    assert_caught(certificate, new)
    assert "loss" in [c.what for c in certificate.failures]


LAST = {  # the parameter of each stage whose gradient is complete first
    ("fused_gpt", 0): "blocks.0.down.weight",
    ("fused_gpt", 1): "tok.weight",
    ("unet", 0): "mid.weight",
    ("unet", 1): "out.weight",
}


LOST = [(name, stage, microbatch) for name, stage in LAST for microbatch in (0, 1)]


@pytest.mark.parametrize(
    ("name", "stage", "microbatch"), thinned(LOST, lambda i, _: i % 2 == i // 2 % 2)
)
def test_a_lost_accumulation_is_caught(name: str, stage: int, microbatch: int) -> None:
    subject = case(name)
    with lost_accumulation(stage, microbatch):
        certificate = subject.check()
    assert_caught(certificate, f"gradient of parameter {LAST[name, stage]}")
    parameters = {p.name for p in subject.pipeline.stages[stage].program.graph.parameters}
    wrong = {c.what for c in certificate.failures if c.what.startswith("gradient of ")}
    assert wrong == {f"gradient of {parameter}" for parameter in parameters}


def test_lost_weight_gradients_of_a_split_backward_are_caught() -> None:
    subject = case("fused_gpt", schedule="zero_bubble")
    assert subject.check().ok
    with lost_accumulation(0, 3):  # I and W of two micro-batches
        certificate = subject.check()
    assert_caught(certificate, "gradient of parameter blocks.0.down.weight")
