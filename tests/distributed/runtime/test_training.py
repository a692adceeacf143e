"""The store, reducer and optimizer on real gloo processes equal one device."""

from collections.abc import Callable

import pytest
import torch

from shardwise.runtime.optimizer import clip_grad_norm_, optimizer
from tests.support import toy
from tests.support.pool import Pool
from tests.support.tiers import thinned


class Module:
    def __init__(self, axes: dict[str, int], zero: int) -> None:
        self.toy, self.store = toy.make(toy.process_mesh(axes), zero)


def train(axes: dict[str, int], zero: int) -> tuple[list[float], list[float], dict]:
    module = Module(axes, zero)
    opt = optimizer(module, torch.optim.AdamW, lr=0.01)
    losses, norms = [], []
    for _ in range(4):
        losses.append(toy.train_step(module.toy, module.store, *toy.batch()).item())
        norms.append(clip_grad_norm_(module, 1.0).item())
        opt.step()
        opt.zero_grad()
    return losses, norms, module.store.gather_state_dict()


def dense() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    params = {n: t.clone() for n, t in toy.full_state().items() if n != "offset"}
    trained = [t.requires_grad_() for n, t in params.items() if not toy.is_frozen(n)]
    opt = torch.optim.AdamW(trained, lr=0.01)
    losses, norms = [], []
    for _ in range(4):
        state = {n: t.detach() for n, t in params.items()}
        state["offset"] = toy.full_state()["offset"]
        loss, grads = toy.dense_step(state, *toy.batch())
        for name, p in params.items():
            p.grad = grads[name]
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        opt.step()
    return losses, norms, {n: t.detach() for n, t in params.items()}


def compiled(axes: dict[str, int], zero: int) -> dict[str, torch.Tensor | None]:
    module = Module(axes, zero)
    model = torch.compile(module.toy, backend="aot_eager")
    for _ in range(2):
        module.store.zero_grad()
        with module.store.step():
            model(*toy.batch()).backward()
    return module.store.gather_gradients()


CASES = [(2, {"dp": 2, "tp": 1}, z) for z in range(4)] + [
    (3, {"dp": 3, "tp": 1}, 3),
    (4, {"dp": 2, "tp": 2}, 0),
    (4, {"dp": 2, "tp": 2}, 2),
    (4, {"dp": 2, "tp": 2}, 3),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "axes", "zero"), thinned(CASES, lambda i, _: i in (0, 1, 4, 6, 7)), ids=str
)
def test_training_equals_one_device(
    pool: Callable[[int], Pool], size: int, axes: dict[str, int], zero: int
) -> None:
    losses, norms, params = dense()
    results = pool(size).run(train, axes, zero)
    assert len({tuple(r[1]) for r in results}) == 1, "norms differ between ranks"
    for got_losses, got_norms, state in results:
        assert got_losses == pytest.approx(losses, rel=1e-10)
        assert got_norms == pytest.approx(norms, rel=1e-10)
        for name, want in params.items():
            torch.testing.assert_close(state[name], want, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("zero", [0, 3])
def test_compiled_programs(pool: Callable[[int], Pool], zero: int) -> None:
    _, expected = toy.dense_step(toy.full_state(), *toy.batch())
    for gradients in pool(2).run(compiled, {"dp": 2, "tp": 1}, zero, timeout=110):
        for name, want in expected.items():
            torch.testing.assert_close(gradients[name], want, rtol=1e-11, atol=1e-11)
