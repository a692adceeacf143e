"""Ordinary modules of torch.nn and idioms of user code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.capture import assert_captured

F64 = torch.float64


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(4, 5, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.cell(x)[0]


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.other = nn.LSTMCell(4, 4), nn.GRUCell(4, 4)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            h = self.other(x[:, t], h)
        return h


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask)[0]


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, padding_idx=0)
        self.bag = nn.EmbeddingBag(10, 4, mode="sum")

    def forward(self, x):
        ids = (x.detach().abs() * 3).long()[..., 0].clamp(max=9)
        return self.table(ids).sum(1) + self.bag(ids)


class Mapped(nn.Module):
    """`torch.vmap` inside forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.vmap(lambda row: self.linear(row) * row.sum())(x)


class Complex(nn.Module):
    """Rotary embedding by complex numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.view_as_complex(self.linear(x).unflatten(-1, (2, 2)))
        turn = torch.polar(torch.ones(3, 2, dtype=F64), torch.arange(6.0, dtype=F64).view(3, 2))
        return torch.view_as_real(y * turn).flatten(-2)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(lambda module, args, out: out * 2)
        self.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.register_forward_hook(lambda module, args, out: out.tanh())

    def forward(self, x):
        return self.linear(x)


class Repeated(nn.Module):
    """One module called twice, an op with several unused results, an einsum, a loop."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x).relu_()
        best, _ = x.max(dim=-1)
        parts = torch.einsum("btd,bsd->bts", x, x).softmax(-1).unbind(1)
        return torch.stack([*parts, best]) * x.std()


MODULES = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "cells": Cells,
    "attention": Attention,
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "decoder": lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, 0.0, norm_first=True)),
    "bag": Bag,
    "vmap": Mapped,
    "complex": Complex,
    "hooks": Hooked,
    "repeated": Repeated,
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.RMSNorm(4), nn.PReLU()),
    "convolution": lambda: nn.Sequential(
        nn.Conv1d(3, 6, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 6),
        nn.Hardswish(inplace=True),
        nn.MaxPool1d(2),
        nn.InstanceNorm1d(6, affine=True),
        nn.Conv1d(6, 4, 1, bias=False),
        nn.Flatten(),
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_captured_exactly(name):
    torch.manual_seed(0)
    model = MODULES[name]().to(F64)
    assert_captured(model, (torch.randn(2, 3, 4, dtype=F64),), lambda y, b: (y * y.cos()).sum())
