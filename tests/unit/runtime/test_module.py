import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import BatchError, ProgramError
from shardwise.runtime import ParallelModule, ProgramKey, signature
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.rng import Rng, draw
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.transport.threads import ThreadTransport, run_threads
from tests.support import toy


class Program:
    hooks = ()
    is_guarded = False

    def __init__(self, module: toy.Toy) -> None:
        self.module = module

    def train(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[torch.Tensor, Any]:
        with store.forward():
            loss = self.module(batch["tokens"], batch["labels"])
        with store.backward(last=True):
            loss.backward()
        return loss, {"twice": loss * 2} if outputs else None

    def evaluate(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[torch.Tensor, Any]:
        with store.forward():
            loss = self.module(batch["tokens"], batch["labels"])
        return loss, {"twice": loss * 2}

    def finish(self) -> None:
        pass

    def local_batch(self, batch: Any) -> Any:
        return batch

    def takes(self, batch: Any) -> bool:
        return True


def make(mesh: ProcessMesh, zero: int = 3) -> tuple[ParallelModule, list[Any]]:
    module, store = toy.make(mesh, zero)
    made: list[Any] = []

    def specialize(key: ProgramKey, batch: Any) -> Program:
        made.append((key.batch, key.training))
        return Program(module)

    return ParallelModule(store, mesh, Rng(0, "exact", mesh), specialize), made


def batch(rows: int = 7) -> dict[str, torch.Tensor]:
    tokens, labels = toy.batch(rows)
    return {"tokens": tokens, "labels": labels}


def on_two(fn):  # type: ignore[no-untyped-def]
    def run(rank: int, transport: ThreadTransport) -> object:
        return fn(ProcessMesh({"dp": 2, "tp": 1}, rank, transport))

    return run_threads(2, run, timeout_s=30)


def test_a_repeated_step_draws_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pm, _ = make(ProcessMesh({"dp": 1, "tp": 1}))
    drawn: list[torch.Tensor] = []
    failing = [False, True, False]
    train = Program.train

    def noisy(program: Program, *args: Any, **options: Any) -> tuple[torch.Tensor, Any]:
        drawn.append(draw("normal", pm.rng, "noise", (4,)))
        if failing[len(drawn) - 1]:
            raise MemoryError
        return train(program, *args, **options)

    monkeypatch.setattr(Program, "train", noisy)
    pm.train_step(batch())
    with pytest.raises(MemoryError):
        pm.train_step(batch())
    pm.train_step(batch())
    assert pm.rng.step == 2
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[1], drawn[2])


def test_ranks_step_together_with_one_program_per_signature() -> None:
    def run(mesh: ProcessMesh) -> tuple[object, ...]:
        pm, made = make(mesh)
        assert [n for n, _ in pm.named_parameters()] == list(toy.shapes())
        loss = pm.train_step(batch())
        assert not loss.requires_grad
        loss, outputs = pm.train_step(batch(), outputs=True)
        assert not outputs["twice"].requires_grad
        pm.zero_grad()
        pm.train_step(batch(3))
        pm.eval_step(batch())
        assert pm.rng.step == 3
        return loss, len(made), pm.eval_step(batch())["twice"]

    want, _ = toy.dense_step(toy.full_state(), *toy.batch())
    for loss, programs, twice in on_two(run):
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(twice, want * 2)
        assert programs == 3


def test_different_batches_are_refused() -> None:
    def values(mesh: ProcessMesh) -> None:
        data = batch()
        data["labels"][0, 5] += mesh.rank
        make(mesh)[0].train_step(data)

    with pytest.raises(BatchError, match=r"data of ranks \[1\] differ") as caught:
        on_two(values)
    assert "batch['labels']" in str(caught.value)

    def shapes(mesh: ProcessMesh) -> None:
        make(mesh)[0].train_step(batch(5 + mesh.rank))

    with pytest.raises(BatchError, match="shapes, dtypes or plain values"):
        on_two(shapes)


def test_a_state_dict_is_gathered_and_loaded_on_all_ranks() -> None:
    pm, _ = make(ProcessMesh({"dp": 1, "tp": 1}))
    with pytest.raises(ProgramError, match="gather_state_dict"):
        pm.state_dict()
    with pytest.raises(ProgramError, match="train_step"):
        pm(batch())
    pm.load_state_dict(toy.full_state(4))
    got = pm.gather_state_dict()
    assert all(torch.equal(got[n], t) for n, t in toy.full_state(4).items())
    pm.train_step(batch())
    assert pm.gather_gradients()["unused"] is None


def test_signatures_contain_shapes_dtypes_and_values() -> None:
    t = torch.ones(2)
    assert signature({"a": t}) == signature({"a": t + 1})
    assert signature({"a": t}) != signature({"a": t.double()})
    assert signature((t, True)) != signature((t, False))


@pytest.mark.parametrize(
    "backward",
    [
        lambda loss: loss.backward(),
        lambda loss: (loss / 2).backward(),
        lambda loss: sum([loss, loss]).backward(),
        lambda loss: torch.stack([loss, loss]).mean().backward(),
        lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(),
        lambda loss: torch.autograd.backward(loss),
        lambda loss: torch.autograd.backward([torch.ones((), requires_grad=True), loss / 2]),
        lambda loss: torch.autograd.grad(loss, [torch.ones(1, requires_grad=True)]),
    ],
)
def test_a_second_backward_of_a_loss_explains_the_alternative(
    backward: Callable[[Any], Any],
) -> None:
    module, _ = make(ProcessMesh({"dp": 1, "tp": 1}))
    loss = module.train_step(batch())
    with pytest.raises(ProgramError, match="backward has already run"):
        backward(loss)


def test_a_returned_loss_is_used_like_any_tensor(tmp_path: Path) -> None:
    module, _ = make(ProcessMesh({"dp": 1, "tp": 1}))
    loss = module.train_step(batch())
    value = loss.item()
    assert f"{loss:.3f}" == f"{value:.3f}"
    assert repr(loss) == repr(torch.tensor(value, dtype=loss.dtype))
    torch.save({"loss": loss, "copy": copy.deepcopy(loss)}, tmp_path / "loss.pt")
    assert torch.load(tmp_path / "loss.pt", weights_only=True)["loss"] == value
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(ProgramError, match="compute the term in the model's forward"):
        loss + weight.sum()
