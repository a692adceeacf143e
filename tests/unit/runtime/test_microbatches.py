"""Micro-batches of several parts, in any order, accumulate the gradients of the full batch."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.runtime import redistribute as c
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import declare
from shardwise.runtime.store import ParameterStore
from tests.support import toy
from tests.support.threads import on
from tests.support.tiers import thinned

SKIPPED = ("unused",)


class First(nn.Module):
    """The embedding and the first two blocks."""

    def __init__(self, mesh: ProcessMesh) -> None:
        super().__init__()
        self.dp = mesh.axis("dp")
        declare(self, "embed.weight", (toy.VOCAB, toy.WIDTH), "float64")
        hidden = mesh.axis("tp").length(toy.HIDDEN)
        self.blocks = nn.ModuleList([toy.Block(mesh, hidden) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        h = F.embedding(c.shard(tokens, self.dp, 0, tokens.shape[0]), self.embed.weight)
        for block in self.blocks:
            h = block(h)
        return h


class Second(nn.Module):
    """The last block, the norm, and the embedding's weight again."""

    def __init__(self, mesh: ProcessMesh) -> None:
        super().__init__()
        self.dp = mesh.axis("dp")
        self.blocks = nn.ModuleDict({"2": toy.Block(mesh, mesh.axis("tp").length(toy.HIDDEN))})
        declare(self, "norm.weight", (toy.WIDTH,), "float64")
        declare(self, "head.weight", (toy.VOCAB, toy.WIDTH), "float64")

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        labels = c.shard(labels, self.dp, 0, labels.shape[0])
        logits = (self.blocks["2"](h) * self.norm.weight) @ self.head.weight.t()
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return c.reduce(loss, self.dp)


def data(rows: int = 6) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2)
    shape = (rows, 5)
    return (
        torch.randint(toy.VOCAB, shape, generator=made),
        torch.randint(toy.VOCAB, shape, generator=made),
    )


def expected() -> dict[str, Tensor]:
    tokens, labels = data()
    state = {**toy.full_state(), "offset": torch.zeros(toy.WIDTH, dtype=torch.float64)}
    _, grads = toy.dense_step(state, tokens, labels)
    return {n: g * labels.numel() for n, g in grads.items() if g is not None}


class Setup:
    """Both parts on every rank, running one action after the other."""

    def __init__(self, mesh: ProcessMesh, zero: int, num_micro: int, recompute: str = "") -> None:
        self.parts: dict[int, nn.Module] = {0: First(mesh), 1: Second(mesh)}
        specs = [s for s in toy.specs(zero) if s.name not in SKIPPED]
        self.store = ParameterStore(self.parts, mesh, specs)
        self.store.load_with(lambda name: toy.full_state()[name])
        for module in self.parts.values():
            for block in module.modules():
                if isinstance(block, toy.Block) and recompute:
                    recomputing(block, recompute)
        tokens, labels = data()
        self.tokens, self.labels = tokens.chunk(num_micro), labels.chunk(num_micro)
        self.ends: dict[tuple[int, int], Tensor] = {}
        self.starts: dict[int, Tensor] = {}

    def forward(self, part: int, micro: int) -> None:
        with self.store.forward(part):
            if part == 0:
                self.ends[0, micro] = self.parts[0](self.tokens[micro])
            else:
                self.starts[micro] = self.ends[0, micro].detach().requires_grad_()
                self.ends[1, micro] = self.parts[1](self.starts[micro], self.labels[micro])
        self.check_freed()

    def backward(self, part: int, micro: int, last: bool) -> None:
        with self.store.backward(part, last=last):
            if part == 1:
                self.ends[1, micro].backward()
            else:
                self.ends[0, micro].backward(self.starts[micro].grad)
        self.check_freed()

    def check_freed(self) -> None:
        gathered = [g for g in self.store.groups if g.zero == 3 and g.full.untyped_storage().size()]
        assert all(g.entries[0].spec.unit == "" for g in gathered)


def recomputing(block: nn.Module, where: str) -> None:
    if where == "inside":
        inner = block.forward
        block.forward = lambda h: checkpoint(inner, h, use_reentrant=False)
    else:
        call = type(block).__call__
        around = type("Recomputed", (type(block),), {})
        around.__call__ = lambda self, h: checkpoint(partial(call, self), h, use_reentrant=False)
        block.__class__ = around


Schedule = list[tuple[str, int, int]]


def in_turn(num_micro: int) -> Schedule:
    actions: Schedule = []
    for m in range(num_micro):
        actions += [("F", 0, m), ("F", 1, m), ("B", 1, m), ("B", 0, m)]
    return actions


def interleaved(num_micro: int) -> Schedule:
    """All forwards of a part first, or as late as possible."""
    actions: Schedule = [("F", 0, 0)]
    for m in range(num_micro):
        actions += [("F", 0, m + 1)] if m + 1 < num_micro else []
        actions += [("F", 1, m)]
        actions += [("B", 1, m - 1), ("B", 0, m - 1)] if m else []
    return [*actions, ("B", 1, num_micro - 1), ("B", 0, num_micro - 1)]


def play(setup: Setup, schedule: Schedule) -> None:
    left = Counter(part for kind, part, _ in schedule if kind == "B")
    with setup.store.step("key"):
        for kind, part, micro in schedule:
            if kind == "F":
                setup.forward(part, micro)
            else:
                left[part] -= 1
                setup.backward(part, micro, last=not left[part])


def check(gradients: dict[str, Tensor | None], times: int = 1) -> None:
    for name, want in expected().items():
        torch.testing.assert_close(gradients[name], want * times, rtol=1e-11, atol=1e-11)


AXES = [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 1}]
GRID = [(axes, s, zero) for axes in AXES for s in (in_turn, interleaved) for zero in range(4)]


@pytest.mark.parametrize(
    ("axes", "schedule", "zero"),
    thinned(GRID, lambda i, _: i % 2 == i // 4 % 2),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_micro_batches_of_two_parts_equal_the_full_batch(
    axes: dict[str, int], zero: int, schedule: Callable[[int], Schedule]
) -> None:
    def run(mesh: ProcessMesh) -> list[dict[str, Tensor | None]]:
        setup, gradients = Setup(mesh, zero, 3), []
        for _ in range(3):
            play(setup, schedule(3))
            gradients.append(setup.store.gather_gradients())
        return gradients

    for steps in on(axes, run):
        for times, gradients in enumerate(steps, 1):
            check(gradients, times)


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("recompute", ["inside", "around"])
@pytest.mark.parametrize("zero", [0, 3])
def test_recomputed_units_with_micro_batches_equal_the_full_batch(
    zero: int, recompute: str, num_micro: int
) -> None:
    def run(mesh: ProcessMesh) -> dict[str, Tensor | None]:
        setup = Setup(mesh, zero, num_micro, recompute)
        for _ in range(2):
            setup.store.zero_grad()
            play(setup, interleaved(num_micro))
        return setup.store.gather_gradients()

    for gradients in on({"dp": 2, "tp": 1}, run):
        check(gradients)


@contextmanager
def counting(transport: Any, names: tuple[str, ...]) -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    plain = {name: getattr(transport, name) for name in names}

    def counted(name: str, *args: Any) -> Any:
        counts[name] += 1
        return plain[name](*args)

    for name in names:
        setattr(transport, name, partial(counted, name))
    yield counts
    for name in names:
        setattr(transport, name, plain[name])


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_are_summed_once_during_the_last_backward(zero: int) -> None:
    def run(mesh: ProcessMesh) -> tuple[Counter[str], list[int]]:
        setup = Setup(mesh, zero, 3)
        play(setup, interleaved(3))
        store, launched = setup.store, []
        reductions = store.reducer.plan.reductions
        with counting(mesh.transport, ("reduce_scatter",)) as counts, store.step("key"):
            for m in range(3):
                setup.forward(0, m)
                setup.forward(1, m)
            for m in range(3):
                with store.backward(1, last=m == 2):
                    setup.ends[1, m].backward()
                    launched.append(sum(r.launched for r in reductions))
            for m in range(3):
                with store.backward(0, last=m == 2):
                    setup.ends[0, m].backward(setup.starts[m].grad)
                    launched.append(sum(r.launched for r in reductions))
            assert launched[5] >= launched[3] + 2
        return counts, launched

    for counts, launched in on({"dp": 2, "tp": 1}, run):
        assert launched[:2] == [0, 0]
        assert launched[2] >= 1
        assert launched[3] == launched[4]
        # The parameters of the first part, of the second, of both; by units the embedding, the
        # norm, three blocks.
        assert counts["reduce_scatter"] == (3 if zero == 2 else 5)


def test_a_failing_window_leaves_the_store_usable() -> None:
    def run(mesh: ProcessMesh) -> dict[str, Tensor | None]:
        setup = Setup(mesh, 3, 2)

        def fail() -> None:
            with setup.store.step("key"):
                setup.forward(0, 0)
                with setup.store.forward(1):
                    raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            fail()
        assert not any(g.full.untyped_storage().size() for g in setup.store.groups)
        play(setup, in_turn(2))
        return setup.store.gather_gradients()

    for gradients in on({"dp": 2, "tp": 1}, run):
        check(gradients)
