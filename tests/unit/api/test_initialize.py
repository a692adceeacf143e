"""Models on meta get the values that they have on a device, or an explanation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.api import weights
from shardwise.api.weights import initialize


def values(make: Any, init: Any = None, seed: int = 3) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the initial values of a model built on meta, and why others are missing."""
    with torch.device("meta"):
        model = make()
    names = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    tensors: dict[str, Tensor] = {}
    with torch.random.fork_rng():
        reasons = initialize(
            model, names, names, seed, lambda n, t: tensors.update({n: t.clone()}), init
        )
    assert set(tensors) | set(reasons) == set(names)
    assert not set(tensors) & set(reasons)
    return tensors, reasons


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 30, padding_idx=2)
        self.attention = nn.MultiheadAttention(30, 3)
        self.norm = nn.BatchNorm1d(30)
        self.first, self.second = nn.Linear(30, 40), nn.Linear(30, 40)
        self.first.weight = self.second.weight
        self.lstm = nn.LSTM(30, 4)


def test_reset_parameters_is_repeated() -> None:
    tensors, reasons = values(lambda: Plain().double())
    assert not reasons
    assert tensors["table.weight"][1].any()
    assert not tensors["attention.out_proj.bias"].any()  # set by the enclosing module
    assert (tensors["norm.running_var"] == 1).all()
    assert tensors["table.weight"].dtype == torch.float64
    again, _ = values(lambda: Plain().double())
    assert all(torch.equal(again[name], value) for name, value in tensors.items())
    other, _ = values(lambda: Plain().double(), seed=4)
    assert not torch.equal(other["table.weight"], tensors["table.weight"])


def test_tensors_that_do_not_fit_in_memory_get_the_same_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = values(Plain)
    monkeypatch.setattr(weights, "FREE_SHARE", 0.0)
    tensors, reasons = values(Plain)
    assert not reasons
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())


class Applied(nn.Module):
    """As in nanoGPT: `_init_weights` is applied, then some weights are set once more."""

    def __init__(self, *, scaled: bool = False, data: bool = False) -> None:
        super().__init__()
        self.data = data
        self.table, self.up, self.down = nn.Embedding(50, 40), nn.Linear(40, 60), nn.Linear(60, 40)
        self.apply(self._init_weights)
        if scaled:
            nn.init.normal_(self.down.weight, std=1e-4)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            weight = module.weight.data if self.data else module.weight
            nn.init.normal_(weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


@pytest.mark.parametrize("data", [False, True])
def test_init_weights_is_applied_again(data: bool) -> None:
    tensors, reasons = values(lambda: Applied(data=data))
    assert not reasons
    for name in ("table.weight", "up.weight", "down.weight"):
        assert 0.018 < tensors[name].std() < 0.022, name
    assert not tensors["up.bias"].any()


def test_weights_set_again_in_init_are_reported() -> None:
    tensors, reasons = values(lambda: Applied(scaled=True))
    assert list(reasons) == ["down.weight"]
    assert "it was written 3x" in reasons["down.weight"]
    assert "up.weight" in tensors


class Tied(nn.Module):
    """A shared weight: only a function applied to both modules tells how it was initialized."""

    def __init__(self, *, applied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 40), nn.Linear(40, 50, bias=False)
        self.table.weight = self.head.weight
        if applied:
            self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


def test_shared_weights_need_one_initialization() -> None:
    tensors, reasons = values(lambda: Tied(applied=True))
    assert not reasons
    assert 0.018 < tensors["table.weight"].std() < 0.022
    _, reasons = values(lambda: Tied(applied=False))
    assert set(reasons) == {"table.weight"}


class Inline(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.line = nn.Linear(3, 5)
        if how == "parameter":
            self.line.bias = nn.Parameter(torch.zeros(5))
        elif how == "own":
            self.own = nn.Parameter(torch.ones(4))
        elif how == "buffer":
            self.register_buffer("places", torch.arange(7), persistent=False)
        elif how == "data":
            self.line.bias.data.fill_(3.0)
        elif how == "outside":
            with torch.no_grad():
                self.line.weight[0].mul_(2)


@pytest.mark.parametrize(
    ("how", "name", "reason"),
    [
        ("parameter", "line.bias", "written 0x"),
        ("own", "own", "nothing is known to set it: Inline has no reset_parameters"),
        ("buffer", "places", "nothing is known to set it"),
        ("data", "line.bias", "through .data, at"),
        ("outside", "line.weight", "written 2x"),
    ],
)
def test_initialization_that_cannot_be_repeated_is_reported(
    how: str, name: str, reason: str
) -> None:
    _, reasons = values(lambda: Inline(how))
    assert reason in reasons[name]


def test_a_layer_copied_from_another_is_reported() -> None:
    layer = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2)  # noqa: E731
    _, reasons = values(layer)
    assert "layers.1.linear1.weight" in reasons


def test_a_function_initializes_each_module() -> None:
    def init(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            nn.init.constant_(parameter, 2.0 if name == "weight" else 0.5)

    tensors, reasons = values(lambda: Inline("own"), init)
    assert not reasons
    assert (tensors["line.weight"] == 2).all()
    assert (tensors["own"] == 0.5).all()
    _, reasons = values(lambda: Inline("buffer"), init)
    assert reasons == {"places": "init(Inline) does not set it"}


def test_transformers_models_are_initialized_by_their_own_function() -> None:
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 60, "n_layer": 8, "n_head": 2, "vocab_size": 90}
    tensors, reasons = values(lambda: GPT2LMHeadModel(GPT2Config(**sizes)))
    assert not reasons
    expected = 0.02 / (2 * 8) ** 0.5  # an enclosing module rescales its children's weights
    assert 0.9 < tensors["transformer.h.0.mlp.c_proj.weight"].std() / expected < 1.1
    assert 0.019 < tensors["transformer.wte.weight"].std() < 0.021
    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    tensors, reasons = values(lambda: BertModel(config))
    assert not reasons
    assert tensors["embeddings.position_ids"].flatten()[5] == 5
