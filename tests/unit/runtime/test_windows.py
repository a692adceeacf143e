"""Windows of a step: when gradients arrive, are summed, and units are gathered."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardwise.errors import ProgramError
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.parameters import ParameterSpec, declare
from shardwise.runtime.pipeline import weight_grad as deferred
from shardwise.runtime.store import ParameterStore
from tests.support import toy
from tests.support.threads import on


def test_weight_gradients_may_have_a_separate_window() -> None:
    """Gradients before the last window count as arrived; those in it start the sum."""

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


def test_a_late_gradient_is_refused() -> None:
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


def test_a_forward_of_many_units_gathers_two_at_a_time() -> None:
    """While a unit runs, only the next one is being gathered, in forward and backward."""

    def run(mesh: ProcessMesh) -> list[int]:
        model, store = toy.make(mesh, 3)
        num_gathered: list[int] = []

        def note(*_: Any) -> None:
            full = [
                g
                for g in store.groups
                if g.entries[0].spec.unit and g.entries[0].spec.requires_grad
            ]
            num_gathered.append(sum(g.full.untyped_storage().size() > 0 for g in full))

        for block in model.blocks:
            block.register_forward_hook(note, prepend=True)
            block.register_full_backward_hook(note)
        for _ in range(2):
            with store.step():
                with store.forward():
                    loss = model(*toy.batch())
                with store.backward(last=True):
                    loss.backward()
        return num_gathered

    for num_gathered in on({"dp": 2, "tp": 1}, run):
        assert max(num_gathered) <= 2
        assert len(num_gathered) == 12


class Deferred(nn.Module):
    """Units with deferrable weight gradients, the last of which returns the output."""

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
    """Input gradients of all micro-batches first; only the edges of outputs are saved."""
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
                    assert len(queue._jobs) == 2
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
