import math

import pytest
import torch

from shardwise.errors import PlanMismatch
from shardwise.runtime.mesh import Axis, ProcessMesh
from shardwise.runtime.store import ParameterStore
from tests.support import toy
from tests.support.threads import on
from tests.support.tiers import thinned

MESHES = [{"dp": 1, "tp": 1}, {"dp": 3, "tp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}]


def three_steps(mesh: ProcessMesh, zero: int, rows: int) -> tuple[object, ...]:
    model, store = toy.make(mesh, zero)
    tokens, labels = toy.batch(rows)
    losses = [toy.train_step(model, store, tokens, labels) for _ in range(3)]
    return losses, store.gather_gradients(), store.gather_state_dict()


GRID = [(rows, axes, zero) for rows in (7, 2) for axes in MESHES for zero in range(4)]


@pytest.mark.parametrize(
    ("rows", "axes", "zero"), thinned(GRID, lambda i, _: (i + i // 4 + i // 16) % 2 == 0), ids=str
)
def test_steps_add_the_dense_gradient(axes: dict[str, int], zero: int, rows: int) -> None:
    expected_loss, expected = toy.dense_step(toy.full_state(), *toy.batch(rows))
    for losses, gradients, state in on(axes, three_steps, zero, rows):
        for loss in losses:
            torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
        assert list(gradients) == list(toy.shapes())
        for name, grad in gradients.items():
            want = expected[name]
            if want is None:
                assert grad is None, name
            else:
                torch.testing.assert_close(grad, 3 * want, rtol=1e-11, atol=1e-11)
        assert set(state) == {*toy.shapes(), "head.weight", "offset"}
        assert all(torch.equal(state[n], t) for n, t in toy.full_state().items())
        assert torch.equal(state["head.weight"], state["embed.weight"])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_grad_removes_gradients(zero: int) -> None:
    def run(mesh: ProcessMesh) -> dict[str, torch.Tensor | None]:
        model, store = toy.make(mesh, zero)
        for _ in range(2):
            store.zero_grad()
            toy.train_step(model, store, *toy.batch())
        return store.gather_gradients()

    _, expected = toy.dense_step(toy.full_state(), *toy.batch())
    for gradients in on({"dp": 2, "tp": 1}, run):
        torch.testing.assert_close(gradients["embed.weight"], expected["embed.weight"])


def test_zero3_stores_its_range_and_gathers_for_use() -> None:
    def run(mesh: ProcessMesh) -> int:
        model, store = toy.make(mesh, 3)
        shown = list(model.parameters())
        assert all(p.dim() == 1 for p in shown)
        toy.train_step(model, store, *toy.batch())
        assert all(a is b for a, b in zip(shown, model.parameters(), strict=True))
        assert all(g.full.untyped_storage().size() == 0 for g in store.groups)
        with store.evaluate():
            assert tuple(model.embed.weight.shape) == (toy.VOCAB, toy.WIDTH)
            model(*toy.batch())
        return sum(p.numel() for p in shown)

    stored = on({"dp": 3, "tp": 1}, run)
    assert sum(stored) == sum(math.prod(s) for s in toy.shapes().values())
    assert max(stored) - min(stored) <= len(toy.shapes())


def test_a_failed_step_changes_no_gradients_or_parameters() -> None:
    def run(mesh: ProcessMesh) -> None:
        model, store = toy.make(mesh, 3)

        def stop() -> None:
            with store.step():
                model(*toy.batch())
                raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            stop()
        assert all(g.full.untyped_storage().size() == 0 for g in store.groups)
        toy.train_step(model, store, *toy.batch())

    on({"dp": 2, "tp": 1}, run)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_rank_without_a_gradient_counts_as_zero(zero: int) -> None:
    """A rank whose shard is empty may never touch a parameter that others train."""

    def run(mesh: ProcessMesh) -> list[float]:
        from torch import nn

        from shardwise.runtime.parameters import ParameterSpec, declare

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
                loss = module.b.sum() * 2
                if mesh.rank == 1:
                    loss = loss + module.a.sum()
                loss.backward()
        gradients = store.gather_gradients()
        return [gradients["a"].tolist(), gradients["b"].tolist()]

    assert on({"dp": 2, "tp": 1}, run) == [[[1.0] * 3, [4.0] * 2]] * 2


def test_wrong_states_are_refused() -> None:
    _, store = toy.make(ProcessMesh({"dp": 1, "tp": 1}), 0)
    with pytest.raises(PlanMismatch, match=r"embed.weight has shape \(2, 2\)"):
        store.load_full("embed.weight", torch.ones(2, 2))
    with pytest.raises(PlanMismatch, match=r"did you mean 'norm.weight'"):
        store.load_full("norm.wieght", torch.ones(2, 2))
    with pytest.raises(PlanMismatch, match=r"lacks .*norm\.weight"):
        store.load_state_dict({"unused": torch.ones(3)})


@pytest.mark.parametrize("zero", [0, 2])
def test_programs_share_the_memory_of_their_sums(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def bucket(axis: Axis, numel: int, dtype: torch.dtype, operation: str) -> torch.Tensor:
        made.append(numel)
        return torch.zeros(numel, dtype=dtype)

    def run(mesh: ProcessMesh) -> dict[str, torch.Tensor | None]:
        model, store = toy.make(mesh, zero)
        tokens, labels = toy.batch()
        for key in ("short", "long", "short"):
            with store.step(key):
                model(tokens, labels).backward()
        return store.gather_gradients()

    monkeypatch.setattr(Axis, "bucket", bucket)
    _, expected = toy.dense_step(toy.full_state(), *toy.batch())
    for gradients in on({"dp": 2, "tp": 1}, run):
        torch.testing.assert_close(gradients["embed.weight"], 3 * expected["embed.weight"])
    trained = sum(math.prod(s) for n, s in toy.shapes().items() if not toy.is_frozen(n))
    assert 0 < sum(made) <= 2 * trained  # of two ranks, for all programs
