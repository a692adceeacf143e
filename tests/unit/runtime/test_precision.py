"""Parameters stored, used, accumulated and reduced in different dtypes; loss scaling."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.runtime.grad_sync import LossScaler
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.optimizer import clip_grad_norm_, optimizer
from shardwise.runtime.parameters import ParameterSpec
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.transport.threads import ThreadTransport, run_threads
from tests.support.mixed import SHAPES, Module, Net, data, full_state


def on_two(fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    def run(rank: int, transport: ThreadTransport) -> object:
        return fn(ProcessMesh({"dp": 2}, rank, transport), *args, **options)

    return run_threads(2, run, timeout_s=30)


def dense(steps: int, lr: float, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same training in one dtype on one device."""
    params = {n: t.to(dtype).requires_grad_() for n, t in full_state().items()}
    opt = torch.optim.SGD(params.values(), lr=lr)
    for _ in range(steps):
        opt.zero_grad()
        h = data().to(dtype) @ params["embed"] * params["scale"]
        for i in range(2):
            h = torch.tanh(h @ params[f"blocks.{i}.w"].t())
        h.double().square().sum().backward()
        opt.step()
    return {n: t.detach().double() for n, t in params.items()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative, over all parameters."""
    gap = sum((a[n].double() - b[n].double()).square().sum() for n in SHAPES)
    return math.sqrt(gap / sum(t.double().square().sum() for t in b.values()))


def test_values_and_gradients_have_their_dtypes() -> None:
    def run(mesh: ProcessMesh, zero: int) -> None:
        module = Module(mesh, zero, master="float32", reduce="bfloat16")
        store = module.store
        module.train_step(2)
        for entry in store.entries:
            assert entry.leaf.dtype is torch.bfloat16
            assert entry.piece.dtype is torch.float32
            grad = store.gradient(entry)
            assert grad is not None
            assert grad.dtype is torch.float32
            shown = store.parameter(entry).grad
            assert shown is not None
            assert shown.dtype is torch.float32
        assert all(
            g is not None and g.dtype is torch.float32 for g in store.gather_gradients().values()
        )
        state = store.gather_state_dict()
        assert all(torch.equal(state[n], t) for n, t in full_state().items())
        opt = optimizer(module, torch.optim.AdamW, lr=1e-3)
        opt.step()
        after = store.gather_state_dict()
        moments = opt.state_dict()["state"]
        for entry in store.entries:
            name = entry.spec.name
            assert not torch.equal(after[name], state[name])
            assert moments[name]["exp_avg"].dtype is torch.float32
            assert torch.equal(store.local_value(entry), after[name].bfloat16())
        if zero == 3:
            assert not any(g.full.untyped_storage().size() for g in store.groups)

    for zero in range(4):
        on_two(run, zero)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_float32_masters_track_float32_better_than_bfloat16(zero: int) -> None:
    def run(mesh: ProcessMesh, master: str) -> dict[str, Tensor]:
        module = Module(mesh, zero, master=master)
        opt = optimizer(module, torch.optim.SGD, lr=1e-5)
        for _ in range(40):
            module.train_step()
            opt.step()
            opt.zero_grad()
        return module.store.gather_state_dict()

    want, start = dense(40, 1e-5), full_state()
    moved = distance(start, want)
    for got in on_two(run, "float32"):
        assert distance(got, want) < 0.1 * moved
    for got in on_two(run, ""):
        assert distance(got, want) > 0.5 * moved


def one_micro_batch(rows: Tensor) -> dict[str, Tensor]:
    """Gradients of a bfloat16 model on one device."""
    net = Net("bfloat16")
    store = ParameterStore(
        net,
        ProcessMesh({"dp": 1}),
        [ParameterSpec(name=n, shape=s, dtype="bfloat16") for n, s in SHAPES.items()],
    )
    store.load_state_dict(full_state())
    net(rows.bfloat16()).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_accumulated_in_float32_are_more_exact(zero: int) -> None:
    def run(mesh: ProcessMesh, gradient: str) -> dict[str, Tensor]:
        module = Module(mesh, zero, master="float32", gradient=gradient, reduce="float32")
        module.train_step(16)
        return module.store.gather_gradients()  # type: ignore[return-value]

    want = {n: torch.zeros(s).double() for n, s in SHAPES.items()}
    for rank in range(2):
        for rows in data()[rank::2].chunk(16):
            for name, grad in one_micro_batch(rows).items():
                want[name] += grad.double()
    wide, narrow = on_two(run, "float32")[0], on_two(run, "bfloat16")[0]
    assert distance(wide, want) < 1e-5
    assert distance(narrow, want) > 1e-3


def test_equal_dtypes_share_memory() -> None:
    module = Module(ProcessMesh({"dp": 1}), 0, dtype="float32")
    for entry in module.store.entries:
        assert entry.piece is entry.leaf is entry.shown

    def run(mesh: ProcessMesh) -> None:
        for zero in (1, 2):
            for group in Module(mesh, zero, dtype="float32").store.groups:
                assert group.shard.untyped_storage().data_ptr() == group.full.data_ptr()

    on_two(run)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_an_overflow_skips_the_step_and_lowers_the_scale_on_all_ranks(zero: int) -> None:
    def run(mesh: ProcessMesh) -> tuple[Any, ...]:
        module = Module(mesh, zero, dtype="float16", master="float32")
        store = module.store
        store.scaler = LossScaler(init_scale=64.0, growth_interval=2)
        opt = optimizer(module, torch.optim.SGD, lr=0.01)
        before = store.gather_state_dict()
        module.train_step(2, factor=math.inf if mesh.rank == 1 else 1.0)
        clip_grad_norm_(module, 1.0)
        opt.step()
        opt.zero_grad()
        after = store.gather_state_dict()
        assert all(torch.equal(before[n], after[n]) for n in SHAPES)
        scales = [store.scaler.scale]
        for _ in range(2):
            module.train_step(2)
            opt.step()
            opt.zero_grad()
            scales.append(store.scaler.scale)
        return opt.skipped_steps, scales, store.gather_state_dict()

    for skipped, scales, state in on_two(run):
        assert skipped == 1
        assert scales == [32.0, 32.0, 64.0]
        assert distance(state, full_state()) > 0
        assert all(bool(t.isfinite().all()) for t in state.values())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_users_see_gradients_without_the_scale(zero: int) -> None:
    def run(mesh: ProcessMesh, scale: float) -> dict[str, Tensor]:
        module = Module(mesh, zero, dtype="float32")
        module.store.scaler = LossScaler.static(scale)
        module.train_step(2)
        module.train_step()
        return module.store.gather_gradients()  # type: ignore[return-value]

    for plain, scaled in zip(on_two(run, 1.0), on_two(run, 1024.0), strict=True):
        for name in SHAPES:
            torch.testing.assert_close(scaled[name], plain[name], rtol=1e-6, atol=1e-6)


def test_a_scaler_saves_its_state() -> None:
    scaler = LossScaler(growth_interval=3)
    for overflow in (True, False, False):
        scaler.update(overflow)
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert (other.scale, other.good_steps) == (2.0**15, 2)
    fixed = LossScaler.static(8.0)
    fixed.update(True)
    assert fixed.scale == 8.0
