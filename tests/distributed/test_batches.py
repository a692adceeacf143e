"""Batches that differ from the first one, compared with plain PyTorch step by step."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise import runtime as rt
from shardwise.runtime import step as programs
from tests.support.pool import Pool
from tests.support.training import error_of

pytestmark = pytest.mark.distributed


class Modal(nn.Module):
    """Text with an optional image, optional sound, an optional mask and a flag."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, width)
        self.image = nn.Linear(5, width)
        self.sound = nn.Linear(3, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, 13)

    def forward(
        self,
        ids: Tensor,
        labels: Tensor | None = None,
        image: Tensor | None = None,
        sound: Tensor | None = None,
        mask: Tensor | None = None,
        double: bool = False,
    ) -> dict[str, Tensor]:
        x = self.embed(ids)
        if image is not None:
            x = x + self.image(image)[:, None]
        if sound is not None:
            x = x + self.sound(sound)
        if mask is not None:
            x = x * mask[..., None]
        logits = self.head(torch.tanh(self.hidden(2 * x if double else x)))
        if labels is None:
            return {"logits": logits}
        flat = labels.flatten().long()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), flat), "logits": logits}


def make_batch(rows: int, length: int, seed: int, more: str = "") -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    batch: dict[str, Any] = {
        "ids": torch.randint(13, (rows, length), generator=random),
        "labels": torch.randint(13, (rows, length), generator=random),
    }
    if "image" in more:
        batch["image"] = normal(rows, 5)
    if "sound" in more:
        batch["sound"] = normal(rows, length, 3)
    if "bool" in more:
        batch["mask"] = normal(rows, length) > 0
    if "float" in more:
        batch["mask"] = normal(rows, length)
    if "int32" in more:
        batch = {k: v.int() if v.dtype == torch.int64 else v for k, v in batch.items()}
    if "none" in more:
        batch |= {"image": None, "sound": None}
    if "flag" in more:
        batch["double"] = True
    return batch


KINDS = {
    "inputs that go": ["image sound", "image", "", "none", "sound", "image sound"],
    "inputs that come": ["", "image", "none", "image sound", ""],
    "types": ["bool", "int32 bool", "float", "", "flag", "int32"],
}
SIZES = {
    "few rows": [(6, 5), (1, 5), (1, 1), (2, 3), (7, 5), (0, 5), (6, 0), (3, 4)],
    "one row first": [(1, 5), (6, 5), (1, 4), (3, 2)],
}
STRATEGIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("ddp", 2, {}),
    "zero1": ("zero1", 3, {}),
    "zero2": ("zero2", 2, {}),
    "fsdp": ("fsdp", 2, {}),
    "fsdp on 4": ("fsdp", 4, {}),
    "tensor": ("tensor", 2, {}),
    "pipeline": ("pipeline", 2, {"num_microbatches": 3}),
    "hybrid": ("hybrid", 4, {"dp": 2, "tp": 2}),
}


def batches_of(kind: str) -> list[dict[str, Any]]:
    if kind in SIZES:
        return [make_batch(*size, seed, "image") for seed, size in enumerate(SIZES[kind])]
    return [make_batch(6, 5, seed, more) for seed, more in enumerate(KINDS[kind])]


def assert_same(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert (actual is None) == (expected is None), f"{what}: {actual} instead of {expected}"
    if actual is not None:
        torch.testing.assert_close(
            actual, expected, rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


def train(strategy: str, kind: str) -> None:
    """Train on all batches of a kind; every value of every step equals plain PyTorch's."""
    name, ranks, options = STRATEGIES[strategy]
    batches = batches_of(kind)
    torch.manual_seed(0)
    reference = Modal().double()
    model = copy.deepcopy(reference)
    planned = make_batch(6, 5, 0, "image sound") if strategy == "pipeline" else batches[0]
    plan = getattr(sw.strategies, name)(
        sw.capture(model, planned), sw.Cluster.local(ranks), **options
    )
    pm = sw.parallelize(model, batches[0], plan)
    optimizer = sw.optimizer(pm, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for number, batch in enumerate(batches):
        here = f"{strategy}, {kind}, batch {number}"
        loss = reference(**batch)["loss"]
        loss.backward()
        assert_same(pm.train_step(batch), loss.detach(), f"{here}: loss")
        gradients = pm.gather_gradients()
        for key, parameter in reference.named_parameters():
            assert_same(gradients[key], parameter.grad, f"{here}: gradient of {key}")
        if loss.isnan():  # an empty batch: its gradients would spoil the parameters
            pm.zero_grad()
            reference.zero_grad()
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
        with torch.no_grad():
            unlabeled = {k: v for k, v in batch.items() if k != "labels"}
            logits = pm.eval_step(unlabeled)["logits"]
            assert_same(logits, reference(**unlabeled)["logits"], f"{here}: logits")
            assert_same(pm.eval_loss(batch), reference(**batch)["loss"], f"{here}: eval loss")
        state = pm.gather_state_dict()
        for key, value in reference.state_dict().items():
            assert_same(state[key], value, f"{here}: {key}")


@pytest.mark.parametrize(
    ("strategy", "kind"), [("fsdp", "inputs that come"), ("pipeline", "few rows")]
)
def test_training_on_other_batches_than_the_first(
    pool: Callable[[int], Pool], strategy: str, kind: str
) -> None:
    pool(STRATEGIES[strategy][1]).run(train, strategy, kind, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [*KINDS, *SIZES])
def test_training_on_every_kind_of_batch(
    pool: Callable[[int], Pool], strategy: str, kind: str
) -> None:
    pool(STRATEGIES[strategy][1]).run(train, strategy, kind, timeout=300)


def misspelt() -> list[str]:
    model, batch = Modal().double(), make_batch(6, 5, 0)
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
    wrong = [
        plan.with_(inputs={**plan.inputs, "imgae": 0}),
        plan.with_(nodes={"hiden.linear_0": {"dp": "shard b"}}),
        plan.with_(nodes={"linaer_0": {"dp": "shard b"}}),
    ]
    errors = [error_of(sw.parallelize, model, batch, p) for p in wrong]
    optional = plan.with_(
        inputs={**plan.inputs, "sound": 0}, nodes={"sound.linear_0": {"dp": "same"}}
    )
    sw.parallelize(model, batch, optional)  # a plan for a batch that has more inputs
    return errors


def test_a_plan_may_name_optional_inputs_but_not_misspelt_ones(pool: Callable[[int], Pool]) -> None:
    errors = pool(2).run(misspelt)[0]
    for error, name in zip(errors, ("imgae", "hiden.linear_0", "linaer_0"), strict=True):
        assert name in error


def staged(first: str) -> str:
    """Train without and with an image on stages that begin inside of the image's branch."""
    torch.manual_seed(0)
    plain = Modal().double()
    model, batch = copy.deepcopy(plain), make_batch(6, 5, 0, "image")
    plan = sw.strategies.pipeline(sw.capture(model, batch), sw.Cluster.local(2), num_microbatches=2)
    at = dataclasses.replace(plan.stages[1], first=first)
    plan = plan.with_(stages=(plan.stages[0], at))
    pm = sw.parallelize(model, batch, plan)
    for seed, more in enumerate(["", "image", "", "image"]):
        batch = make_batch(6, 5, seed, more)
        loss, expected = pm.train_step(batch), plain(**batch)["loss"]
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
    for name, gradient in pm.gather_gradients().items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
    del pm
    return error_of(sw.parallelize, model, make_batch(6, 5, 0), plan)


@pytest.mark.parametrize("first", ["image.linear_0", "unsqueeze_0"])
def test_a_stage_may_begin_in_an_optional_branch(pool: Callable[[int], Pool], first: str) -> None:
    refused = pool(2).run(staged, first)[0]
    assert repr(first) in refused
    assert "stages[1]" in refused


def emptied() -> str:
    """Train a batch whose missing image leaves a stage without any node."""
    model, batch = Modal().double(), make_batch(6, 5, 0, "image")
    plan = sw.strategies.pipeline(sw.capture(model, batch), sw.Cluster.local(3), num_microbatches=2)
    firsts = ["", "image.linear_0", "hidden.linear_0"]
    stages = [dataclasses.replace(s, first=f) for s, f in zip(plan.stages, firsts, strict=True)]
    pm = sw.parallelize(model, batch, plan.with_(stages=tuple(stages)))
    return error_of(pm.train_step, make_batch(6, 5, 1))


def test_a_batch_that_leaves_a_stage_empty_names_the_line(pool: Callable[[int], Pool]) -> None:
    for error in pool(3).run(emptied):
        assert "BatchError" in error
        assert "at: image (test_batches.py:" in error


def many_lengths() -> tuple[int, list[str], int]:
    """Train on more lengths than there is room for programs, some of them twice."""
    torch.manual_seed(0)
    reference = Modal().double()
    model, first = copy.deepcopy(reference), make_batch(4, 3, 0, "image")
    plan = sw.strategies.fsdp(sw.capture(model, first), sw.Cluster.local(2))
    pm = sw.parallelize(model, first, plan)
    slots = sum(len(entry.slots) for entry in pm.store.entries)
    with (
        mock.patch.object(programs, "MAX_PROGRAMS", 3),
        mock.patch.object(programs, "MANY_PROGRAMS", 6),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        pm._programs._limit = 6
        for length in (4, 5, 6, 7, 8, 3, 5, 9):
            batch = make_batch(4, length, length, "image")
            reference.zero_grad()
            pm.zero_grad()
            loss = reference(**batch)["loss"]
            loss.backward()
            assert_same(pm.train_step(batch), loss.detach(), f"loss of length {length}")
            gradients = pm.gather_gradients()
            for key, parameter in reference.named_parameters():
                assert_same(gradients[key], parameter.grad, f"length {length}: {key}")
    messages = [str(w.message) for w in caught if w.category is RuntimeWarning]
    return (
        len(list(pm._programs.items())),
        messages,
        sum(len(e.slots) for e in pm.store.entries) // slots,
    )


def test_only_recently_used_programs_are_kept(pool: Callable[[int], Pool]) -> None:
    num_programs, messages, slots = pool(2).run(many_lengths, timeout=110)[0]
    assert num_programs == slots == 3
    assert len(messages) == 1
    assert "6 programs were" in messages[0]


def other_data() -> list[str]:
    """Return the errors of steps in which rank 1 has another batch than rank 0."""
    model = Modal().double()
    batches = [make_batch(4, 3, seed) for seed in range(2)]
    plan = sw.strategies.ddp(sw.capture(model, batches[0]), sw.Cluster.local(2))
    pm = sw.parallelize(model, batches[0], plan)
    for _ in range(5):
        pm.train_step(batches[0])
    return [error_of(pm.train_step, batches[dist.get_rank()]) for _ in range(rt.BATCH_CHECK_EVERY)]


def test_different_data_is_detected_after_the_first_steps(pool: Callable[[int], Pool]) -> None:
    for errors in pool(2).run(other_data, timeout=110):
        assert [error for error in errors if error != "no error"], "not detected"
        assert "data of ranks [1] differ from rank 0" in next(e for e in errors if e != "no error")
