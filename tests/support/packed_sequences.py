"""Recurrent models over packed sequences, by name: `rnn_lstm`, `rnn_gru`, `rnn_labels`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

VOCAB, LENGTH, WIDTH = 11, 7, 6


class Encoder(nn.Module):
    """An LSTM over sorted lengths; its outputs and its final cell states are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.LSTM(WIDTH, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
        packed, (_, cells) = self.layer(packed)
        output, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)
        best = output.max(1).values + torch.cat([cells[-2], cells[-1]], -1)
        return F.cross_entropy(self.head(best / lengths[:, None]), labels)


class Unsorted(nn.Module):
    """A GRU with time first over lengths in any order, padded to a fixed length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = nn.Linear(WIDTH, 2 * 4)
        self.layer = nn.GRU(WIDTH, 4, num_layers=2)
        self.head = nn.Linear(4, 5)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids.t())
        hidden = self.first(x.mean(0)).unflatten(1, (2, 4)).transpose(0, 1).contiguous()
        packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False)
        packed, hidden = self.layer(packed, hidden)
        output, _ = pad_packed_sequence(packed, total_length=LENGTH + 2)
        return F.cross_entropy(self.head(output.sum(0) + hidden[0]), labels)


class Labelled(nn.Module):
    """A label per item: the loss is a mean over the rows of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.RNN(WIDTH, 8, batch_first=True)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        options = {"batch_first": True, "enforce_sorted": False}
        packed = pack_padded_sequence(self.embed(ids), lengths, **options)
        targets = pack_padded_sequence((ids + labels[:, None]) % VOCAB, lengths, **options)
        rows = self.layer(packed)[0].data
        return F.cross_entropy(self.head(torch.tanh(rows)), targets.data)


def make(name: str, batch: int = 7) -> tuple[nn.Module, dict[str, Any]]:
    """Return a float64 model and a batch with unequal lengths."""
    kinds = {"rnn_lstm": Encoder, "rnn_gru": Unsorted, "rnn_labels": Labelled}
    lengths = 1 + (torch.arange(batch) * 3) % LENGTH
    lengths[batch // 2] = LENGTH
    if name == "rnn_lstm":
        lengths = lengths.sort(descending=True).values
    ids = (torch.arange(batch * LENGTH).view(batch, LENGTH) * 5) % VOCAB
    return kinds[name]().double(), {
        "ids": ids,
        "lengths": lengths,
        "labels": torch.arange(batch) % 5,
    }
