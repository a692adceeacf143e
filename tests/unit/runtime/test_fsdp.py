"""Gathered units with recomputation and shared blocks."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import ParameterSpec, declare
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.transport.threads import ThreadTransport, run_threads
from tests.support import toy


def on_two(fn, *args):  # type: ignore[no-untyped-def]
    def run(rank: int, transport: ThreadTransport) -> object:
        return fn(ProcessMesh({"dp": 2, "tp": 1}, rank, transport), *args)

    return run_threads(2, run, timeout_s=30)


class Outside(nn.Module):
    """Recomputes an entire unit."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, h, use_reentrant=False)
        return out


def recomputed(mesh: ProcessMesh, where: str) -> dict[str, Tensor | None]:
    model, store = toy.make(mesh, 3)
    for i, block in enumerate(model.blocks):
        if where == "outside":
            model.blocks[i] = Outside(block)
        else:
            inner = block.forward
            block.forward = lambda h, inner=inner: checkpoint(inner, h, use_reentrant=False)
    for _ in range(2):
        store.zero_grad()
        toy.train_step(model, store, *toy.batch())
    return store.gather_gradients()


def check(results: list[dict[str, Tensor | None]]) -> None:
    _, expected = toy.dense_step(toy.full_state(), *toy.batch())
    for gradients in results:
        for name, want in expected.items():
            torch.testing.assert_close(gradients[name], want, rtol=1e-11, atol=1e-11)


def test_recomputation_inside_and_around_units() -> None:
    check(on_two(recomputed, "inside"))
    check(on_two(recomputed, "outside"))


class Shared(nn.Module):
    """One unit called twice, whose output is a dict, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Scale(), Scale(), Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)["out"]
        x = self.b(x)["out"]
        return self.a(x)["out"].sum()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        declare(self, "w", (5,), "float64")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": x * self.w}


def test_a_unit_may_be_called_twice_or_never() -> None:
    def run(mesh: ProcessMesh) -> list[object]:
        module = Shared()
        specs = [
            ParameterSpec(name=f"{n}.w", shape=(5,), dtype="float64", sync=("dp",), zero=3, unit=n)
            for n in "abc"
        ]
        store = ParameterStore(module, mesh, specs)
        store.load_with(lambda name: torch.full((5,), "abc".index(name[0]) + 2.0).double())
        for _ in range(3):
            store.zero_grad()
            with store.step():
                module(torch.ones(5, dtype=torch.float64)).backward()
        gradients = store.gather_gradients()
        return [None if g is None else g.tolist() for g in gradients.values()]

    # x·a·b·a summed over 2 ranks: d/da = 2ab, d/db = a², a = 2, b = 3
    assert on_two(run) == [[[24.0] * 5, [8.0] * 5, None]] * 2


def test_a_module_without_parameters_of_a_unit_does_not_gather_it() -> None:
    def run(mesh: ProcessMesh) -> list[int]:
        _, store = toy.make(mesh, 3)
        precompute = nn.Identity()
        store.attach(precompute, 0)
        with store.step():
            precompute(torch.ones(1))
            return [unit.groups[0].full.untyped_storage().size() for unit in store.units.units]

    assert all(size == 0 for sizes in on_two(run) for size in sizes)
