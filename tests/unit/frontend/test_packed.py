"""Packed sequences in captured models: what is computed on their rows, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import shardwise as sw
from shardwise.errors import CaptureError

BATCH = {"x": torch.linspace(-1, 1, 120).view(6, 5, 4), "n": torch.tensor([3, 5, 1, 2, 5, 4])}


class Layers(nn.Module):
    """Two layers with dropout between them, and dropout on the rows."""

    def __init__(self, used: str = "pad") -> None:
        super().__init__()
        self.used = used
        self.layers = nn.LSTM(4, 6, 2, dropout=0.3, batch_first=True, proj_size=3)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        rows, sizes, *orders = self.layers(packed)[0]
        packed = PackedSequence(nn.functional.dropout(rows, 0.2), sizes, *orders)
        if self.used == "pad":
            return pad_packed_sequence(packed, total_length=5)[0].square().mean()
        if self.used == "rows":
            return packed.data.square().mean()
        if self.used == "count":
            return x.sum() * packed.data.shape[0]
        return x.sum() * packed.batch_sizes[1]


def test_layers_with_dropout_are_sharded_by_rows() -> None:
    model = Layers()
    graph = sw.capture(model, BATCH)
    assert graph.guards is None  # the padded length is fixed
    plan = sw.strategies.fsdp(graph, sw.Cluster.local(4))
    assert sw.verify(model, BATCH, plan).ok
    assert "rt.gather(" not in sw.compile(graph, plan).source(0)


@pytest.mark.parametrize(
    ("used", "line"),
    [("rows", "square()"), ("count", "shape[0]"), ("sizes", "packed.batch_sizes[1]")],
)
def test_the_layout_of_rows_is_refused(used: str, line: str) -> None:
    with pytest.raises(CaptureError, match="layout depends on the lengths") as caught:
        sw.capture(Layers(used), BATCH)
    assert re.search(re.escape(line), str(caught.value.where))
