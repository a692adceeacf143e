"""A plain module and any optimizer, saved and loaded in one process."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import save as saving_module
from shardwise.checkpoint.write import Staging
from shardwise.errors import CheckpointError


class Strange(nn.Module):
    """A module with tensors of all kinds, a tied one and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(2).bfloat16(), requires_grad=False)
        for name, value in {
            "count": torch.tensor(3),
            "flags": torch.tensor([True, False]),
            "wave": torch.randn(3, dtype=torch.complex64),
            "small": torch.randn(4).to(torch.float8_e4m3fn),
            "wide": torch.randn(2, dtype=torch.float64),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x) @ self.a.weight) * self.scale).square().sum() + self.none.sum()


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def train(model: Strange, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(steps)]  # type: ignore


def trained_parameters(model: Strange) -> list[nn.Parameter]:
    """Return trained parameters that are not empty: Adafactor divides by the number of elements."""
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_continues_bit_equal(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Strange()
    optimizer = OPTIMIZERS[kind](trained_parameters(model))
    train(model, optimizer, 2)
    sw.save_checkpoint(tmp_path / "c", model, optimizer, step=2)
    saved = copy.deepcopy(model.state_dict())
    after = train(model, optimizer, 3)
    torch.manual_seed(1)
    other = Strange()
    moved = OPTIMIZERS[kind](trained_parameters(other))
    loaded = sw.load_checkpoint(tmp_path / "c", other, moved)
    assert loaded.step == 2
    for name, tensor in other.state_dict().items():
        assert torch.equal(as_bytes(tensor), as_bytes(saved[name])), name
    assert train(other, moved, 3) == after


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_loading_without_a_module_returns_the_state_dict(tmp_path: Path) -> None:
    model = Strange()
    sw.save_checkpoint(tmp_path / "c", model, extra={"x": [1, {"y": None}]})
    loaded = sw.load_checkpoint(tmp_path / "c")
    assert set(loaded.state_dict) == set(model.state_dict())
    assert loaded.state_dict["b.weight"] is loaded.state_dict["a.weight"]
    assert loaded.extra == {"x": [1, {"y": None}]}
    Strange().load_state_dict(loaded.state_dict)


def test_a_meta_module_is_allocated_when_it_is_filled(tmp_path: Path) -> None:
    model = Strange()
    sw.save_checkpoint(tmp_path / "c", model)
    with torch.device("meta"):
        empty = nn.Linear(4, 3)
        pair = nn.ModuleDict({"a": empty, "b": nn.Linear(4, 3, bias=False)})
    pair["b"].weight = empty.weight
    sw.load_checkpoint(tmp_path / "c", pair, strict=False)
    assert torch.equal(pair["a"].weight, model.a.weight)
    assert pair["b"].weight is pair["a"].weight


def test_groups_are_identified_by_their_parameters(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    first = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], 0.1)
    sw.save_checkpoint(tmp_path / "c", model, first)
    swapped = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], 7.0)
    sw.load_checkpoint(tmp_path / "c", model, swapped)
    assert [g["lr"] for g in swapped.param_groups] == [0.1, 0.5]
    joined = torch.optim.SGD(model.parameters(), 7.0)
    with pytest.raises(CheckpointError, match=r"were in groups \[0, 1\]"):
        sw.load_checkpoint(tmp_path / "c", model, joined)


def test_copies_may_share_names_with_the_module(tmp_path: Path) -> None:
    model = nn.ModuleDict({"ema": nn.Linear(2, 2, bias=False), "w": nn.Linear(2, 2, bias=False)})
    ema = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    model.register_parameter("ema_w", nn.Parameter(torch.ones(1)))
    sw.save_checkpoint(tmp_path / "c", model, copies={"ema": ema})
    filled = {name: torch.zeros_like(value) for name, value in ema.items()}
    sw.load_checkpoint(tmp_path / "c", model, copies={"ema": filled})
    for name, value in ema.items():
        assert torch.equal(filled[name], value)
    with pytest.raises(CheckpointError, match="no copies 'average'"):
        sw.load_checkpoint(tmp_path / "c", model, copies={"average": filled})
    with pytest.raises(CheckpointError, match="cannot be the name"):
        sw.save_checkpoint(tmp_path / "d", model, copies={"../up": ema})


class Slow:
    """A staging that waits for an event."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        copy_all = Staging.copy

        def delayed(staging: Staging) -> None:
            assert self.go.wait(20)
            copy_all(staging)

        monkeypatch.setattr(Staging, "copy", delayed)


def test_the_next_step_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, slow = Strange(), Slow(monkeypatch)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer, 1)
    before = copy.deepcopy(model.state_dict())
    saving = sw.save_checkpoint(tmp_path / "c", model, optimizer, wait=False)
    assert not saving.done()
    assert not (tmp_path / "c").exists()
    threading.Timer(0.2, slow.go.set).start()
    train(model, optimizer, 1)
    assert saving.blocked_s > 0.1
    assert saving.wait(20) == tmp_path / "c"
    loaded = sw.load_checkpoint(tmp_path / "c").state_dict
    assert torch.equal(loaded["a.weight"], before["a.weight"])
    assert not torch.equal(loaded["a.weight"], model.a.weight)


def test_a_change_during_the_copy_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, slow = nn.Linear(2, 2), Slow(monkeypatch)
    optimizer = torch.optim.SGD(model.parameters())
    saving = sw.save_checkpoint(tmp_path / "c", model, optimizer, wait=False)
    with torch.no_grad():
        model.weight.mul_(2)
    slow.go.set()
    with pytest.raises(CheckpointError, match=r"weight .* was changed while it was copied"):
        saving.wait(20)
    assert list(tmp_path.iterdir()) == []


def test_without_an_optimizer_the_state_is_copied_immediately(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    saving = sw.save_checkpoint(tmp_path / "c", model, wait=False)
    with torch.no_grad():
        model.weight.mul_(2)
    saving.wait(20)
    assert torch.equal(sw.load_checkpoint(tmp_path / "c").state_dict["weight"], before)


def test_strict_loading(tmp_path: Path) -> None:
    sw.save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    wrong = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"shape \(2, 3\) here and \(2, 2\)"):
        sw.load_checkpoint(tmp_path / "c", wrong)
    more = nn.ModuleDict({"weigh": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match=r"has no weigh\.weight, weigh\.bias; did you mean"):
        sw.load_checkpoint(tmp_path / "c", more)
    loaded = sw.load_checkpoint(tmp_path / "c", more, strict=False)
    assert loaded.missing == ("weigh.weight", "weigh.bias")
    assert loaded.unexpected == ("weight", "bias")
    fewer = nn.Linear(2, 2, bias=False)
    with pytest.raises(CheckpointError, match="module has no bias"):
        sw.load_checkpoint(tmp_path / "c", fewer)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        sw.load_checkpoint(tmp_path / "c", nn.Linear(2, 2), torch.optim.SGD(fewer.parameters()))
    integers = nn.Linear(2, 2)
    integers.weight = nn.Parameter(integers.weight.detach().long(), requires_grad=False)
    with pytest.raises(CheckpointError, match="saved as floating-point"):
        sw.load_checkpoint(tmp_path / "c", integers)


def test_unsupported_state_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        sw.save_checkpoint(tmp_path / "c", model, extra={"x": object()})
    with pytest.raises(CheckpointError, match="is a meta tensor"):
        sw.save_checkpoint(tmp_path / "c", model.to("meta"))
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(CheckpointError, match="that the module does not have"):
        sw.save_checkpoint(tmp_path / "c", nn.Linear(2, 2), foreign)
    assert list(tmp_path.iterdir()) == []


def test_other_folders_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("notes")
    with pytest.raises(CheckpointError, match="refusing to overwrite"):
        sw.save_checkpoint(tmp_path / "notes", nn.Linear(2, 2))
    assert (tmp_path / "notes" / "a.txt").read_text() == "notes"
    for value in (1.0, 2.0):
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        sw.save_checkpoint(tmp_path / "c", model)
    assert sw.load_checkpoint(tmp_path / "c").state_dict["weight"][0, 0] == 2.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "notes"]
    assert saving_module.TIMEOUT_S > 0
