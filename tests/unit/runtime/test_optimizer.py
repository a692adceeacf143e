import math
import warnings

import pytest
import torch

from shardwise.errors import OptimizerError
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.optimizer import ELEMENTWISE, ShardedOptimizer, clip_grad_norm_, optimizer
from shardwise.runtime.store import ParameterStore
from tests.support import toy
from tests.support.threads import on
from tests.support.tiers import thinned

LAYOUTS = [({"dp": 3, "tp": 1}, 0), ({"dp": 3, "tp": 1}, 1), ({"dp": 2, "tp": 2}, 2)]
LAYOUTS += [({"dp": 3, "tp": 1}, 3), ({"dp": 2, "tp": 2}, 3), ({"dp": 1, "tp": 2}, 0)]


class Module:
    """The part of a parallel module that optimizers use."""

    def __init__(self, mesh: ProcessMesh, zero: int) -> None:
        self.toy, self.store = toy.make(mesh, zero)

    def train_step(self) -> None:
        toy.train_step(self.toy, self.store, *toy.batch())


def dense(cls, steps, groups=None, max_norm=None, **options):  # type: ignore[no-untyped-def]
    """The same training on one device: parameters, optimizer state by name, norms."""
    params = {n: t.clone() for n, t in toy.full_state().items() if n != "offset"}
    trained = {n: t.requires_grad_() for n, t in params.items() if not toy.is_frozen(n)}
    split = groups(trained) if groups else list(trained.values())
    opt, norms = cls(split, **options), []
    for _ in range(steps):
        state = {**{n: t.detach() for n, t in params.items()}, "offset": offset()}
        _, grads = toy.dense_step(state, *toy.batch())
        for name, p in trained.items():
            p.grad = grads[name]
        if max_norm:
            norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), max_norm))
        opt.step()
    state = {n: opt.state[p] for n, p in trained.items() if p in opt.state}
    return {n: p.detach() for n, p in params.items()}, state, norms


def offset() -> torch.Tensor:
    return toy.full_state()["offset"]


GRID = [(cls, *layout) for cls in ELEMENTWISE for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("cls", "axes", "zero"),
    thinned(GRID, lambda i, case: case[0] is torch.optim.AdamW or i % 6 == i // 6 % 6),
    ids=str,
)
def test_elementwise_optimizers_equal_one_device(
    cls: type[torch.optim.Optimizer], axes: dict[str, int], zero: int
) -> None:
    def run(mesh: ProcessMesh) -> tuple[object, ...]:
        module = Module(mesh, zero)
        opt = optimizer(module, cls, lr=0.01)
        for _ in range(3):
            module.train_step()
            opt.step()
            opt.zero_grad()
        return module.store.gather_state_dict(), opt.state_dict()

    params, state, _ = dense(cls, 3, lr=0.01)
    for got, saved in on(axes, run):
        for name, want in params.items():
            torch.testing.assert_close(got[name], want, rtol=1e-10, atol=1e-10)
        trained = {name for name in saved["state"] if not toy.is_frozen(name)}
        assert trained == set(state)  # Adagrad begins with state of frozen parameters too
        for name, values in state.items():
            assert set(saved["state"][name]) == set(values)
            for key, value in values.items():
                torch.testing.assert_close(saved["state"][name][key], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_saved_state_continues_on_another_mesh(zero: int) -> None:
    def first(mesh: ProcessMesh) -> tuple[object, ...]:
        module = Module(mesh, zero)
        opt = optimizer(module, torch.optim.AdamW, lr=0.01)
        module.train_step()
        opt.step()
        return module.store.gather_state_dict(), opt.state_dict()

    def second(mesh: ProcessMesh, state: dict, saved: dict) -> dict[str, torch.Tensor]:
        module = Module(mesh, 3 - zero)
        opt = optimizer(module, torch.optim.AdamW, lr=0.5)
        module.store.load_state_dict(state)
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["lr"] == 0.01
        module.train_step()
        opt.step()
        return module.store.gather_state_dict()

    state, saved = on({"dp": 2, "tp": 2}, first)[0]
    params, _, _ = dense(torch.optim.AdamW, 2, lr=0.01)
    for got in on({"dp": 3, "tp": 1}, second, state, saved):
        for name, want in params.items():
            torch.testing.assert_close(got[name], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("axes", "zero"), LAYOUTS, ids=str)
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
def test_clipping_counts_every_element_once(
    axes: dict[str, int], zero: int, norm_type: float
) -> None:
    def run(mesh: ProcessMesh) -> tuple[object, ...]:
        module = Module(mesh, zero)
        module.train_step()
        norm = clip_grad_norm_(module, 0.5, norm_type)
        return norm, module.store.gather_gradients()

    _, grads = toy.dense_step(toy.full_state(), *toy.batch())
    parameters = [torch.nn.Parameter(g) for g in grads.values() if g is not None]
    for p in parameters:
        p.grad = p.detach().clone()
    want = torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type)
    results = on(axes, run)
    assert len({norm.item() for norm, _ in results}) == 1
    for norm, gradients in results:
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0.0)
        got = [g for g in gradients.values() if g is not None]
        torch.testing.assert_close(got, [p.grad for p in parameters], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("axes", "zero"), LAYOUTS, ids=str)
def test_clipping_by_torch_is_global_or_raises(axes: dict[str, int], zero: int) -> None:
    def run(mesh: ProcessMesh) -> object:
        module = Module(mesh, zero)
        module.train_step()
        parameters = [module.store.parameter(e) for e in module.store.entries]
        try:
            return torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        except OptimizerError as error:
            return str(error)

    _, grads = toy.dense_step(toy.full_state(), *toy.batch())
    want = torch.nn.utils.get_total_norm([g for g in grads.values() if g is not None])
    for got in on(axes, run):
        if isinstance(got, str):
            assert "sw.clip_grad_norm_" in got
        else:
            assert zero < 2
            assert axes["tp"] == 1
            torch.testing.assert_close(got, want)


def test_sharded_gradients_behave_like_tensors() -> None:
    def run(mesh: ProcessMesh) -> None:
        module = Module(mesh, 3)
        module.train_step()
        p = module.store.parameter(module.store.entries[0])
        assert p.grad is not None
        before = p.grad.clone()
        p.grad.mul_(2)
        torch.testing.assert_close((p.grad + 0).full_tensor(), (before * 2).full_tensor())
        for norm in (torch.norm, torch.linalg.vector_norm, torch.linalg.norm, torch.Tensor.norm):
            with pytest.raises(OptimizerError):
                norm(p.grad)
        with pytest.raises(OptimizerError):
            torch._foreach_norm([p.grad])

    on({"dp": 2, "tp": 1}, run)


def test_groups_by_glob_with_a_scheduler() -> None:
    groups = [{"params": ["*.bias", "norm.*"], "weight_decay": 0.0}, {"params": "head.*", "lr": 1}]

    def run(mesh: ProcessMesh) -> ShardedOptimizer:
        opt = optimizer(Module(mesh, 1), torch.optim.AdamW, groups, lr=0.1, weight_decay=0.3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step()
            scheduler.step()
        return opt

    for opt in on({"dp": 2, "tp": 1}, run):
        assert isinstance(opt, torch.optim.Optimizer)
        assert [g["lr"] for g in opt.param_groups] == [0.05, 0.5, 0.05]
        assert [g["weight_decay"] for g in opt.inner.param_groups] == [0.0, 0.3, 0.3]
        names = [g["params"] for g in opt.state_dict()["param_groups"]]
        assert names[0] == [f"blocks.{i}.{w}.bias" for i in range(3) for w in ("w1", "w2")] + [
            "norm.weight"
        ]
        assert names[1] == ["embed.weight"]


def test_wrong_globs_and_optimizers_are_refused() -> None:
    module = Module(ProcessMesh({"dp": 1, "tp": 1}), 0)
    with pytest.raises(OptimizerError, match=r"matches 'norm.wait'; did you mean 'norm.weight'"):
        optimizer(module, torch.optim.SGD, [{"params": "norm.wait"}], lr=0.1)
    opt = optimizer(module, torch.optim.LBFGS)
    with pytest.raises(OptimizerError, match="added later"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})

    def run(mesh: ProcessMesh) -> None:
        with pytest.raises(OptimizerError, match=r"Adafactor .* embed.weight of shape \(11, 4\)"):
            optimizer(Module(mesh, 1), torch.optim.Adafactor)
        with pytest.raises(OptimizerError, match="CustomSGD is not known"):
            optimizer(Module(mesh, 3), CustomSGD, lr=0.1)
        optimizer(Module(mesh, 3), CustomSGD, lr=0.1, elementwise=True)
        optimizer(Module(mesh, 0), torch.optim.Adafactor)

    on({"dp": 2, "tp": 1}, run)


class CustomSGD(torch.optim.SGD):
    pass


def test_an_accumulated_gradient_may_be_set_to_zero_in_place() -> None:
    def run(mesh: ProcessMesh, zero: int) -> dict[str, torch.Tensor | None]:
        module = Module(mesh, zero)
        module.train_step()
        store: ParameterStore = module.store
        store.zero_grad(set_to_none=False)
        module.train_step()
        return store.gather_gradients()

    _, grads = toy.dense_step(toy.full_state(), *toy.batch())
    for zero in range(4):
        for got in on({"dp": 2, "tp": 1}, run, zero):
            torch.testing.assert_close(got["embed.weight"], grads["embed.weight"])
