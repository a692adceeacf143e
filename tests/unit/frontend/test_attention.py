"""`flex_attention` and `varlen_attn` are captured as attention under a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import shardwise as sw
from shardwise.errors import CaptureError
from shardwise.frontend.attention import masked_attention
from tests.support import packed

FUSED = "aten.scaled_dot_product_attention.default"


@pytest.mark.parametrize(
    "kind",
    [
        "flex",
        "varlen",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("compiled", "scores")),
    ],
)
def test_packed_documents_equal_attention_of_each(kind: str) -> None:
    model, batch = packed.make(kind, 1 if kind == "varlen" else 3)
    expected = getattr(model, "_documents_with_scores" if kind == "scores" else "_documents")
    rows = batch["ids"].shape[0]
    operands = [torch.randn(rows, heads, 11, 4, requires_grad=True) for heads in (4, 2, 2)]
    with masked_attention():
        actual = getattr(model, f"_{kind}")(*operands, batch["ends"])
    torch.testing.assert_close(actual, expected(*operands, batch["ends"]))
    graph = sw.capture(model, batch)
    if kind == "flex":  # tables are read without indices, so that plans can shard them
        assert not any(node.op.startswith("aten.index") for node in graph.nodes)
    fused = [node for node in graph.nodes if node.op == FUSED]
    assert len(fused) == (kind != "scores")
    if fused:
        assert graph.values[fused[0].inputs[3]].shape[-2:] == (11, 11)


class Flex(nn.Module):
    """Attention of a tensor to itself by a function of the test."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.attend = nn.Linear(4, 4), attend

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        return self.attend(self.linear(x).unsqueeze(1), document).square().mean()


def capture(attend: Callable[[Tensor, Tensor], Any]) -> sw.Graph:
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 2]])
    return sw.capture(Flex(attend), {"x": torch.randn(2, 5, 4), "document": documents})


def masked(mask_mod: Callable[..., Tensor], x: Tensor) -> Any:
    mask = create_block_mask(mask_mod, 2, None, 5, 5, device=x.device)
    return flex_attention(x, x, x, block_mask=mask)


def test_rows_that_see_nothing_give_zeros() -> None:
    x = torch.randn(2, 1, 5, 4)
    with masked_attention():
        for score_mod in (None, lambda s, b, h, i, j: s * 2):
            mask = create_block_mask(lambda b, h, i, j: i > j, 2, None, 5, 5, device="cpu")
            out = flex_attention(x, x, x, score_mod, block_mask=mask)
            assert torch.equal(out[:, :, 0], torch.zeros(2, 1, 4))
            assert out.isfinite().all()


def without_mask_mod(x: Tensor, document: Tensor) -> Any:
    counts, blocks = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2)
    mask = BlockMask.from_kv_blocks(counts, blocks.int(), BLOCK_SIZE=3, seq_lengths=(5, 5))
    return flex_attention(x, x, x, block_mask=mask)


REFUSED = {
    "table[b, i]": lambda x, doc: masked(lambda b, h, i, j: doc[b][i] == doc[b][j], x),
    "elementwise": lambda x, doc: masked(lambda b, h, i, j: i >= j.max(), x),
    "create_block_mask": without_mask_mod,
    "return_lse": lambda x, doc: flex_attention(x, x, x, return_lse=True)[0],
}


@pytest.mark.parametrize("cure", REFUSED)
def test_what_has_no_mask_is_refused_at_the_users_line(cure: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture(REFUSED[cure])
    assert cure in str(error.value.hint)
    assert "test_attention.py" in str(error.value.where)
