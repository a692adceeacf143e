"""`nn.Transformer` and its parts with masks of every kind, and values known while tracing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import CaptureError
from tests.support.capture import assert_captured
from tests.support.tiers import thinned

# torch remarks on layouts without a fast path, and on a bool padding beside a float mask:
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:Support for mismatched"
)
ROWS, LENGTH, WIDTH, WORDS = 4, 6, 8, 16
PLANS = {
    "ddp": lambda graph: sw.strategies.ddp(graph, sw.Cluster.local(2)),
    "tensor": lambda graph: sw.strategies.tensor(graph, sw.Cluster.local(2)),
    "hybrid": lambda graph: sw.strategies.hybrid(graph, sw.Cluster.local(4), dp=2, tp=2),
    "pipeline": lambda graph: sw.strategies.pipeline(
        graph, sw.Cluster.local(2), pp=2, num_microbatches=2
    ),
}


def causal(length: int = LENGTH) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


class Encoder(nn.Module):
    """Classify every token; `mask` says where the attention mask comes from."""

    def __init__(self, mask: str = "none", batch_first: bool = True, **options) -> None:
        super().__init__()
        options = {"dropout": 0.0, **options}
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first, **options)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)
        self.mask, self.batch_first = mask, batch_first
        self.register_buffer("hidden", causal().isinf())

    def forward(self, tokens, labels, padding=None, given=None):
        x = self.words(tokens)
        x = x if self.batch_first else x.transpose(0, 1)
        masks = {
            "none": {},
            "float": {"mask": causal(tokens.shape[1])},
            "bool": {"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)},
            "window": {"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(3)},
            "hint": {"mask": causal(tokens.shape[1]), "is_causal": True},
            "buffer": {"mask": self.hidden},
            "batch": {"mask": given},
        }
        x = self.encoder(x, src_key_padding_mask=padding, **masks[self.mask])
        x = x if self.batch_first else x.transpose(0, 1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Translator(nn.Module):
    def __init__(self, batch_first: bool, hint: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, WORDS)
        self.batch_first, self.hint = batch_first, hint

    def forward(self, source, target, source_padding=None, target_padding=None):
        x, y = self.words(source), self.words(target)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        out = self.transformer(
            x,
            y,
            tgt_mask=causal(target.shape[1]),
            tgt_is_causal=True if self.hint else None,
            src_key_padding_mask=source_padding,
            memory_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
        )
        out = out if self.batch_first else out.transpose(0, 1)
        return F.cross_entropy(self.head(out).flatten(0, 1), target.flatten())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, memory, seen):
        out = self.decoder(self.words(tokens), memory, tgt_mask=causal(), memory_mask=seen)
        return F.cross_entropy(self.head(out).flatten(0, 1), tokens.flatten())


def tokens() -> Tensor:
    return torch.arange(ROWS * LENGTH).mul(7).remainder(WORDS).view(ROWS, LENGTH)


def padding(dtype: torch.dtype = torch.bool) -> Tensor:
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    mask[1, 4:] = mask[2, 5:] = True
    return mask if dtype == torch.bool else torch.zeros(mask.shape).masked_fill(mask, -1e9)


def encoder_batch(mask: str, padded: torch.dtype | None) -> dict[str, Tensor]:
    batch = {"tokens": tokens(), "labels": tokens().flip(0)}
    if padded is not None:
        batch["padding"] = padding(padded)
    if mask == "batch":
        batch["given"] = causal()
    return batch


MASKS = ("none", "float", "bool", "window", "hint", "buffer", "batch")


@pytest.mark.parametrize(
    ("mask", "padded", "batch_first"),
    # Every mask once, with one of the four combinations of the rest.
    thinned(product(MASKS, (None, torch.bool), (True, False)), lambda i, _: i % 4 == i // 4 % 4),
)
def test_an_encoder_is_captured_with_any_mask(mask, padded, batch_first):
    torch.manual_seed(0)
    model = Encoder(mask, batch_first)
    assert_captured(model, encoder_batch(mask, padded), tolerance=1e-4)


def test_a_float_padding_mask_a_norm_first_and_dropout_are_captured():
    torch.manual_seed(0)
    batch = encoder_batch("float", torch.float32)
    assert_captured(Encoder("float", norm_first=True, dropout=0.1), batch, tolerance=1e-4)


@pytest.mark.parametrize(
    ("batch_first", "hint"),
    thinned(product((True, False), (False, True)), lambda _, case: case[0] != case[1]),
)
def test_a_transformer_is_captured_with_masks_and_padding(batch_first, hint):
    torch.manual_seed(0)
    batch = {"source": tokens(), "target": tokens().flip(0)}
    assert_captured(Translator(batch_first, hint), batch, tolerance=1e-4)
    batch |= {"source_padding": padding(), "target_padding": padding().flip(0)}
    assert_captured(Translator(batch_first, hint), batch, tolerance=1e-4)


def test_a_causal_mask_of_forward_is_detected_as_in_eager_mode():
    graph = sw.capture(Encoder("float"), encoder_batch("float", None))
    attention = [node for node in graph.nodes if "scaled_dot_product" in node.op]
    assert len(attention) == 2
    assert all(node.args[3:6] == (None, 0.0, True) for node in attention)


CASES = {
    "encoder_length_first": (
        Encoder("float", batch_first=False),
        encoder_batch("float", torch.bool),
    ),
    "encoder_mask_in_batch": (Encoder("batch"), encoder_batch("batch", None)),
    "transformer": (
        Translator(batch_first=True),
        {
            "source": tokens(),
            "target": tokens().flip(0),
            "source_padding": padding(),
            "target_padding": padding(),
        },
    ),
    "decoder": (
        Decoder(),
        {
            "tokens": tokens(),
            "memory": torch.linspace(-1, 1, ROWS * 5 * WIDTH).view(ROWS, 5, WIDTH),
            "seen": torch.zeros(LENGTH, 5).index_fill(1, torch.tensor([4]), -1e9),
        },
    ),
}


@pytest.mark.parametrize(
    ("case", "strategy"), thinned(product(CASES, PLANS), lambda i, _: i in (2, 5, 11, 12))
)
def test_plans_of_masked_transformers_are_verified(case, strategy):
    model, batch = CASES[case]
    plan = PLANS[strategy](sw.capture(model, batch))
    assert sw.verify(model, batch, plan).ok


def test_a_frozen_encoder_in_eval_mode_takes_the_ordinary_path():
    torch.manual_seed(0)
    model = Encoder("none")
    model.encoder.requires_grad_(False).eval()
    fast_path = torch.backends.mha.get_fastpath_enabled()
    graph = sw.capture(model, encoder_batch("none", torch.bool))
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert not any("_transformer_encoder_layer_fwd" in node.op for node in graph.nodes)


class Asks(nn.Module):
    """Let a question about a tensor decide what is computed."""

    def __init__(self, question) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.question = question

    def forward(self, x):
        return (x * self.weight * (3.0 if self.question(x) else 1.0)).sum()


def written(x: Tensor) -> Tensor:
    """Return a value that writes to a view of it decide."""
    table = torch.zeros(3, 3)
    table[1].fill_(1.0)
    table.add_(1.0)
    return table


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (lambda x: torch.arange(x.shape[1]).sum() == 6, True),
        (lambda x: torch.ones(3, 3).tril().sum().item() > 6, False),
        (lambda x: int(torch.arange(5).max()) == 4, True),
        (lambda x: torch.arange(3).tolist() == [0, 1, 2], True),
        (lambda x: written(x).sum() == 12.0, True),
        (lambda x: written(x)[0].sum() == 6.0, False),
        (lambda x: torch.tensor([1, 2]).to(x.device).sum() > 2, True),
    ],
    ids=["bool", "item", "int", "tolist", "views", "other_row", "literal"],
)  # fmt: skip
def test_python_may_ask_for_values_that_no_input_changes(question, answer):
    batch = torch.ones(2, 4, dtype=torch.float64)
    model = Asks(question)
    assert bool(question(batch)) == answer
    assert_captured(model, (batch,))


def test_random_values_are_refused():
    with pytest.raises(CaptureError, match="depends on a tensor's value"):
        sw.capture(Asks(lambda x: torch.randn(3).sum() > 0), torch.ones(2, 4, dtype=torch.float64))
