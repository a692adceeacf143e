"""Faults of pipelines: each is refused, and the certificate names the place."""

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
from shardwise.runtime.pipeline.p2p import Exchange, Message
from shardwise.runtime.pipeline.transfers import TiedParameters
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
    """Refused, and the first difference has one of the words."""
    assert not certificate.ok
    assert certificate.first_difference, str(certificate)
    found = [word for word in words if word in certificate.first_difference]
    assert found, f"none of {words} in: {certificate.first_difference}"


# ------------------------------------------------ faults of the runtime, while a test runs


@contextmanager
def patched(owner: type, name: str, replacement: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replacement)
        yield


def swapped_inputs(name: str) -> Any:
    """Micro-batches 0 and 1 take each other's part of an input."""
    rows = BatchReader._rows

    def swapped(self: BatchReader, tensor: torch.Tensor, given: str, splits: Any, k: int) -> Any:
        return rows(self, tensor, given, splits, 1 - k if given == name else k)

    return patched(BatchReader, "_rows", swapped)


def lost_accumulation(part: int, number: int) -> Any:
    """What one backward of a stage adds to the gradients of parameters is lost."""
    backward = ParameterStore.backward
    counts: dict[int, int] = {}

    @contextmanager
    def lost(self: ParameterStore, stage: int, *, last: bool) -> Iterator[None]:
        with backward(self, stage, last=last):
            before = [None if e.leaf.grad is None else e.leaf.grad.clone() for e in self.entries]
            yield
            counts[stage] = counts.get(stage, -1) + 1  # a stage is on one rank here
            if (stage, counts[stage]) == (part, number):
                for entry, grad in zip(self.entries, before, strict=True):
                    entry.leaf.grad = grad

    return patched(ParameterStore, "backward", lost)


def sent_otherwise(value: str, change: Callable[[torch.Tensor], torch.Tensor], back: bool) -> Any:
    """A transfer carries something else of the same shape."""
    send = Exchange.send

    def changed(self: Exchange, tensor: torch.Tensor, message: Message) -> None:
        mine = self.spec.transfers[message[0]].value == value and message[2] == back
        send(self, change(tensor) if mine else tensor, message)

    return patched(Exchange, "send", changed)


# ------------------------------------------------ faults of the program


def without_gradient(pipeline: Pipeline, value: str) -> Pipeline:
    """No gradient comes back for a value that was sent."""
    transfers = tuple(
        replace(t, gradient=False) if t.value == value else t for t in pipeline.transfers
    )
    return replace(pipeline, transfers=transfers)


def sending(pipeline: Pipeline, stage: int, value: str, other: str) -> Pipeline:
    """A stage sends another value in place of one."""

    def change(ranks: RankProgram) -> RankProgram:
        names = dict(zip(pipeline.stages[stage].program.graph.sends, ranks.sends, strict=True))
        names[value] = other
        return replace(ranks, sends=tuple(names.values()))

    program = pipeline.stages[stage].program
    changed = replace(program, rank_programs=tuple(map(change, program.rank_programs)))
    stages = list(pipeline.stages)
    stages[stage] = replace(stages[stage], program=changed)
    return replace(pipeline, stages=tuple(stages))


# ------------------------------------------------ what is caught


USERS = {  # of each value that is sent: where the next stage uses it
    ("fused_gpt", "add_2"): "blocks.1.n1",
    ("unet", "silu"): "the model",
    ("unet", "silu_2"): "up",
}
EACH = list(USERS)


@pytest.mark.parametrize("name", ["fused_gpt", "unet"])
def test_the_pipelines_are_equal_and_send_what_is_broken_below(name: str) -> None:
    found = case(name)
    assert found.check().ok
    assert {(name, t.value) for t in found.pipeline.transfers} == {k for k in EACH if k[0] == name}
    assert all(t.gradient for t in found.pipeline.transfers)


@pytest.mark.parametrize(("name", "value"), EACH)
def test_a_transfer_without_its_gradient_is_caught(name: str, value: str) -> None:
    found = case(name)
    certificate = found.check(without_gradient(found.pipeline, value))
    assert_caught(certificate, f"the gradient of %{value} ", f"transfer %{value}")


@pytest.mark.parametrize(("name", "value"), EACH)
def test_a_wrong_gradient_that_is_sent_back_is_caught(name: str, value: str) -> None:
    with sent_otherwise(value, lambda gradient: gradient.flip(0), back=True):
        certificate = case(name).check()
    assert_caught(certificate, f"the gradient of %{value} ", f"transfer %{value}")


OTHERS = [
    ("fused_gpt", "add_2", "add_1"),
    ("fused_gpt", "add_2", "linear_3"),
    ("unet", "silu_2", "silu_1"),
    ("unet", "silu", "conv2d"),
]


@pytest.mark.parametrize(("name", "value", "other"), OTHERS)
def test_another_value_of_the_same_shape_is_caught(name: str, value: str, other: str) -> None:
    found = case(name)
    values = found.pipeline.graph.values
    assert values[value].shape == values[other].shape
    certificate = found.check(sending(found.pipeline, 0, value, other))
    assert_caught(certificate, f"at {USERS[name, value]} ", f"%{value}")


@pytest.mark.parametrize(("name", "value"), EACH)
def test_rows_sent_in_another_order_are_caught(name: str, value: str) -> None:
    with sent_otherwise(value, lambda sent: sent.flip(0), back=False):
        certificate = case(name).check()
    assert_caught(certificate, f"at {USERS[name, value]} ", f"%{value}")


@pytest.mark.parametrize(
    ("name", "given", "node"),
    [
        ("fused_gpt", "input_ids", "node embedding "),
        ("fused_gpt", "labels", "node flatten_1 "),
        ("unet", "x", "node conv2d "),
        ("unet", "target", "node sub "),
    ],
)
def test_swapped_parts_of_an_input_are_caught(name: str, given: str, node: str) -> None:
    with swapped_inputs(given):
        assert_caught(case(name).check(), node)


def test_a_tied_gradient_that_stays_where_it_is_found_is_caught() -> None:
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
def test_a_mean_over_the_micro_batch_alone_is_caught(name: str, old: str, new: str) -> None:
    found = case(name)
    texts = subject_of(found.pipeline).sources()
    edited = [text.replace(old, new) for text in texts]
    assert edited != texts
    certificate = found.check(sources=edited)
    assert_caught(certificate, new)
    assert "loss" in [c.what for c in certificate.failures]


LAST = {  # of each stage: the parameter whose gradient is complete first
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
    found = case(name)
    with lost_accumulation(stage, microbatch):
        certificate = found.check()
    assert_caught(certificate, f"gradient of parameter {LAST[name, stage]}")
    mine = {p.name for p in found.pipeline.stages[stage].program.graph.parameters}
    wrong = {c.what for c in certificate.failures if c.what.startswith("gradient of ")}
    assert wrong == {f"gradient of {parameter}" for parameter in mine}


def test_lost_weight_gradients_of_a_split_backward_are_caught() -> None:
    found = case("fused_gpt", schedule="zero_bubble")
    assert found.check().ok
    with lost_accumulation(0, 3):  # I and W of two micro-batches
        certificate = found.check()
    assert_caught(certificate, "gradient of parameter blocks.0.down.weight")
