"""Micro-batches of several parts in any order add the gradients of the whole batch, once summed."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ProgramError
from shardwise.runtime import collectives as c
from shardwise.runtime import deferred
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import ParameterSpec, declare
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.threads import ThreadTransport, run_threads
from tests.support import toy

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
    """Both parts on every rank, and one action after the other."""

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
        held = [g for g in self.store.groups if g.zero == 3 and g.full.untyped_storage().size()]
        assert all(g.entries[0].spec.unit == "" for g in held)


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
    """All forwards of a part first, or as late as can be."""
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


def on(axes: dict[str, int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    def run(rank: int, transport: ThreadTransport) -> object:
        return fn(ProcessMesh(axes, rank, transport), *args)

    return run_threads(math.prod(axes.values()), run, timeout=30)


def check(gradients: dict[str, Tensor | None], times: int = 1) -> None:
    for name, want in expected().items():
        torch.testing.assert_close(gradients[name], want * times, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", [in_turn, interleaved], ids=lambda s: s.__name__)
@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 1}])
def test_micro_batches_of_two_parts(
    axes: dict[str, int], zero: int, schedule: Callable[[int], Schedule]
) -> None:
    def run(mesh: ProcessMesh) -> list[dict[str, Tensor | None]]:
        setup, found = Setup(mesh, zero, 3), []
        for _ in range(3):
            play(setup, schedule(3))
            found.append(setup.store.gather_gradients())
        return found

    for steps in on(axes, run):
        for times, gradients in enumerate(steps, 1):
            check(gradients, times)


@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("recompute", ["inside", "around"])
@pytest.mark.parametrize("zero", [0, 3])
def test_recomputed_units_with_micro_batches(zero: int, recompute: str, num_micro: int) -> None:
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
def test_gradients_are_summed_once_and_while_the_last_backward_runs(zero: int) -> None:
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
        assert counts["reduce_scatter"] == 5  # the embedding, the norm, three blocks


def test_weight_gradients_may_come_in_a_window_of_their_own() -> None:
    """What came before the last window counts as arrived; what comes in it starts the sum."""

    def run(mesh: ProcessMesh, zero: int) -> list[list[float]]:
        module = nn.Module()
        specs = []
        for name in "ab":
            declare(module, name, (3,), "float64")
            shape = {"name": name, "shape": (3,), "dtype": "float64"}
            specs.append(ParameterSpec(**shape, sync=("dp",), zero=zero))
        store = ParameterStore(module, mesh, specs)
        store.load_with(lambda name: torch.ones(3, dtype=torch.float64))
        for _ in range(2):
            store.zero_grad()
            with store.step():
                for m in range(2):
                    with store.forward():
                        a, b = module.a.sum() * 2, module.b.sum() * 3
                    with store.backward(last=False):
                        a.backward()
                    with store.backward(last=m == 1):
                        b.backward()
                        assert all(r.launched == (m == 1) for r in store.reducer.plan.reductions)
        return [g.tolist() for g in store.gather_gradients().values() if g is not None]

    for zero in range(4):
        assert on({"dp": 2}, run, zero) == [[[8.0] * 3, [12.0] * 3]] * 2


def test_a_gradient_of_only_some_micro_batches_and_ranks() -> None:
    def run(mesh: ProcessMesh, zero: int) -> list[list[float]]:
        module = nn.Module()
        declare(module, "a", (3,), "float64")
        declare(module, "b", (2,), "float64")
        specs = [
            ParameterSpec(name=n, shape=(s,), dtype="float64", sync=("dp",), zero=zero)
            for n, s in (("a", 3), ("b", 2))
        ]
        store = ParameterStore(module, mesh, specs)
        store.load_with(lambda name: torch.ones(3 if name == "a" else 2, dtype=torch.float64))
        for _ in range(2):
            store.zero_grad()
            with store.step():
                for m in range(2):
                    with store.forward():
                        loss = module.b.sum()
                        if m == 0 and mesh.rank == 1:
                            loss = loss + module.a.sum()
                    with store.backward(last=m == 1):
                        loss.backward()
        return [g.tolist() for g in store.gather_gradients().values() if g is not None]

    for zero in range(4):
        assert on({"dp": 2}, run, zero) == [[[1.0] * 3, [4.0] * 2]] * 2


def test_one_forward_may_call_many_units_and_holds_two() -> None:
    """While a unit runs, the next is on its way; no more are held, forward or backward."""

    def run(mesh: ProcessMesh) -> list[int]:
        model, store = toy.make(mesh, 3)
        held: list[int] = []

        def note(*_: Any) -> None:
            full = [
                g
                for g in store.groups
                if g.entries[0].spec.unit and g.entries[0].spec.requires_grad
            ]
            held.append(sum(g.full.untyped_storage().size() > 0 for g in full))

        for block in model.blocks:
            block.register_forward_hook(note, prepend=True)
            block.register_full_backward_hook(note)
        for _ in range(2):
            with store.step():
                with store.forward():
                    loss = model(*toy.batch())
                with store.backward(last=True):
                    loss.backward()
        return held

    for held in on({"dp": 2, "tp": 1}, run):
        assert max(held) <= 2
        assert len(held) == 12


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


def test_a_gradient_that_comes_too_late_is_refused() -> None:
    module = nn.Module()
    declare(module, "a", (3,), "float64")
    spec = ParameterSpec(name="a", shape=(3,), dtype="float64")
    store = ParameterStore(module, ProcessMesh({"dp": 1}), [spec])
    store.load_with(lambda name: torch.ones(3, dtype=torch.float64))

    def late() -> None:
        with store.step():
            with store.backward(last=True):
                module.a.sum().backward()
            with store.backward(last=False):
                module.a.sum().backward()

    with pytest.raises(ProgramError, match="the gradient of a arrived after"):
        late()


class Deferred(nn.Module):
    """Units whose weight gradients can wait; its output is a unit's."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Dense(), Dense()])

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        declare(self, "w", (4, 4), "float64")
        declare(self, "b", (4,), "float64")

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(deferred.linear(x, self.w) * self.b)


def deferred_state(name: str) -> Tensor:
    made = torch.Generator().manual_seed(len(name) + int(name[6]))
    return torch.randn((4, 4) if name.endswith("w") else (4,), generator=made).double()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_deferred_weight_gradients_of_gathered_units(zero: int) -> None:
    """Input gradients of all micro-batches first; outputs are let go, their edges kept."""
    inputs = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    names = [f"units.{i}.{n}" for i in range(2) for n in "wb"]

    def run(mesh: ProcessMesh) -> dict[str, Tensor | None]:
        module = Deferred()
        specs = [
            ParameterSpec(
                name=name,
                shape=(4, 4) if name.endswith("w") else (4,),
                dtype="float64",
                sync=("dp",),
                zero=zero,
                unit=name[:7],
            )
            for name in names
        ]
        store = ParameterStore(module, mesh, specs)
        store.load_with(deferred_state)
        for _ in range(2):
            store.zero_grad()
            with store.step():
                flying = []
                for x in inputs:
                    queue = deferred.WeightQueue()
                    with store.forward(), queue.deferring():
                        edge = get_gradient_edge(module(x[mesh.rank].requires_grad_()))
                    flying.append((queue, edge))
                for _, edge in flying:
                    with store.backward(last=False):
                        torch.autograd.backward([edge], [torch.ones(5, 4, dtype=torch.float64)])
                for m, (queue, _) in enumerate(flying):
                    assert queue.num_waiting == 2
                    with store.backward(last=m == 2):
                        queue.run()
        return store.gather_gradients()

    state = {name: deferred_state(name).requires_grad_() for name in names}
    h = inputs
    for i in range(2):
        h = torch.tanh(h @ state[f"units.{i}.w"].t() * state[f"units.{i}.b"])
    h.sum().backward()
    for gradients in on({"dp": 2}, run):
        for name in names:
            torch.testing.assert_close(gradients[name], state[name].grad, rtol=1e-11, atol=1e-11)
