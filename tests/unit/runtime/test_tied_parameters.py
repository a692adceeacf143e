"""Replicas of parameters that other ranks own, and their exchange with the owner."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import OptimizerError, PlanMismatch
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.optimizer import clip_grad_norm_, optimizer
from shardwise.runtime.parameters import ParameterSpec, declare
from shardwise.runtime.splits import Split
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.transport.threads import ThreadTransport, run_threads

SHAPE = (5, 3)


class Module:
    """A weight that is owned and one that is borrowed."""

    def __init__(self, mesh: ProcessMesh, zero: int, **options: str) -> None:
        self.net = nn.Module()
        cut = (Split(axis="tp", dim=0, of=((1, 5, 1),)),)
        rows = mesh.axis("tp").length(5)
        for name in ("home", "lent"):
            declare(self.net, name, (rows, 3), "float32")
        specs = [
            ParameterSpec(
                name=name,
                shape=SHAPE,
                dtype="float32",
                splits=cut,
                sync=("dp",),
                zero=zero,
                borrowed=name == "lent",
                **options,
            )
            for name in ("home", "lent")
        ]
        self.store = ParameterStore(self.net, mesh, specs)
        self.store.load_with(lambda name: full())

    def train_step(self) -> None:
        with self.store.step():
            with self.store.forward():
                loss = (self.net.home * 2).sum() + (self.net.lent * 3).sum()
            with self.store.backward(last=True):
                loss.backward()


def full() -> Tensor:
    return torch.arange(15.0).view(SHAPE)


def on_four(fn: Callable[..., Any], *args: Any) -> list[Any]:
    def run(rank: int, transport: ThreadTransport) -> object:
        return fn(ProcessMesh({"dp": 2, "tp": 2}, rank, transport), *args)

    return run_threads(4, run, timeout_s=30)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_borrowed_parameters_only_have_gradients(zero: int) -> None:
    def run(mesh: ProcessMesh) -> tuple[Tensor, ...]:
        module = Module(mesh, zero)
        store, lent = module.store, module.store.entry("lent")
        for _ in range(2):
            module.train_step()
        grad = store.gradient(lent)
        assert grad is not None
        assert grad.shape == lent.local_shape
        assert bool((grad == 6).all()), "of the last step, summed over dp"
        assert set(store.gather_state_dict()) == set(store.gather_gradients()) == {"home"}
        norm = clip_grad_norm_(module, 1e9)
        opt = optimizer(module, torch.optim.SGD, lr=0.5)
        assert opt.state_dict()["param_groups"][0]["params"] == ["home"]
        opt.step()
        value = store.gather_full(lent, store.local_value(lent), piece=False)
        store.zero_grad(set_to_none=False)
        assert not store.gradient(lent).any()
        return norm, store.gather_state_dict()["home"], value

    for norm, home, lent in on_four(run):
        assert norm.item() == pytest.approx((15 * 8**2) ** 0.5)
        assert torch.equal(home, full() - 4)
        assert torch.equal(lent, full())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("master", ["", "float64"])
def test_gradients_go_to_the_owner_and_values_to_the_replica(zero: int, master: str) -> None:
    """Exchange tied weights as a pipeline does, here from one entry to the other."""

    def run(mesh: ProcessMesh) -> tuple[Any, ...]:
        module = Module(mesh, zero, master=master)
        store = module.store
        home, lent = store.entry("home"), store.entry("lent")
        shared: list[Tensor] = []

        def share() -> None:
            shared.append(store.local_value(home).clone())
            store.set_local(lent, store.local_value(home))

        store.after_update.append(share)
        opt = optimizer(module, torch.optim.SGD, lr=0.5)
        for _ in range(2):
            module.train_step()
            store.add_to_gradient(home, store.gradient(lent))
        gradient = store.gather_gradients()["home"]
        opt.step()
        opt.zero_grad()
        store.add_to_gradient(home, torch.ones(home.local_shape))
        gradient_of_owner = store.gather_gradients()["home"]
        assert len(shared) == 1
        assert torch.equal(module.net.lent, shared[0])
        value = store.gather_full(lent, store.local_value(lent), piece=False)
        return gradient, gradient_of_owner, value, store.gather_state_dict()["home"]

    dtype = torch.float64 if master else torch.float32
    for gradient, gradient_of_owner, lent, home in on_four(run):
        assert torch.equal(gradient, torch.full(SHAPE, 2 * (4.0 + 6.0), dtype=dtype))
        assert torch.equal(gradient_of_owner, torch.ones(SHAPE, dtype=dtype))
        assert torch.equal(home, (full() - 10).to(dtype))
        assert torch.equal(lent, full() - 10)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_set_local_changes_the_state_dict(zero: int) -> None:
    def run(mesh: ProcessMesh) -> Tensor:
        store = Module(mesh, zero).store
        home = store.entry("home")
        store.set_local(home, store.local_value(home) * 2)
        with store.evaluate():
            assert torch.equal(store.local_value(home), home.leaf)
        return store.gather_state_dict()["home"]

    for value in on_four(run):
        assert torch.equal(value, full() * 2)


def test_names_of_other_stages_are_accepted() -> None:
    module = Module(ProcessMesh({"dp": 1, "tp": 1}), 0)
    groups = [{"params": "other.*", "lr": 1.0}]
    with pytest.raises(OptimizerError, match=r"matches 'other.\*'"):
        optimizer(module, torch.optim.SGD, groups, lr=0.1)
    state = {"home": full() + 1, "lent": full(), "other.bias": full()}
    with pytest.raises(PlanMismatch, match=r"no parameter or buffer 'other.bias'"):
        module.store.load_state_dict(state)
    module.store.elsewhere = frozenset({"other.bias"})
    module.store.load_state_dict(state)
    assert torch.equal(module.store.gather_state_dict()["home"], full() + 1)
    opt = optimizer(module, torch.optim.SGD, groups, lr=0.1)
    assert opt.state_dict()["param_groups"][0]["params"] == []
