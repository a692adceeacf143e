"""Recurrent layers over padded sequences of unequal lengths.

A packed sequence has no dims that could be sharded. Captured graphs contain the padded batch and
the lengths instead; the layer packs its rows itself, so every rank may have other lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.utils import rnn

PACKED_LAYER = "autograd_function.shardwise.packed.PackedLayer"


class PackedLayer(torch.autograd.Function):
    """Run `torch.lstm` and the like on rows `[b, t, f]`, each up to its length.

    `tensors` are the initial states and the weights. Results are the outputs, which are zero beyond
    the lengths, and the states after the last position of each row.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: str, layers: int, bidirectional: bool, has_biases: bool, x: Tensor,
        lengths: Tensor, *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        states = tensors[: 2 if kind == "lstm" else 1]
        size = states[0].shape[-1] * (1 + bidirectional)
        ctx.leaves, ctx.results = (x, *tensors), None
        if isinstance(x, FakeTensor) or not x.shape[0]:
            return x.new_zeros(*x.shape[:2], size), *(state.clone() for state in states)
        needed = (ctx.needs_input_grad[4], *ctx.needs_input_grad[6:])
        with torch.enable_grad():
            pairs = zip(ctx.leaves, needed, strict=True)
            ctx.leaves = tuple(t.detach().requires_grad_(grad) for t, grad in pairs)
            packed = rnn.pack_padded_sequence(
                ctx.leaves[0], lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            _, *leaves = ctx.leaves
            first = [s.index_select(1, packed.sorted_indices) for s in leaves[: len(states)]]
            rows, *last = getattr(torch, kind)(
                packed.data, packed.batch_sizes, first if kind == "lstm" else first[0],
                leaves[len(states) :], has_biases, layers, 0.0, True, bidirectional,
            )  # fmt: skip
            padded, _ = rnn.pad_packed_sequence(
                packed._replace(data=rows), batch_first=True, total_length=x.shape[1]
            )
            ctx.results = padded, *(s.index_select(1, packed.unsorted_indices) for s in last)
        return tuple(result.detach() for result in ctx.results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        trained = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        if ctx.results is None:
            results = iter([torch.zeros_like(leaf) for leaf in trained])
        else:
            results = iter(torch.autograd.grad(ctx.results, trained, gradients, allow_unused=True))
        x, *tensors = (next(results) if leaf.requires_grad else None for leaf in ctx.leaves)
        return None, None, None, None, x, None, *tensors
