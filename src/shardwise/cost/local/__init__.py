"""The runtime's functions as local computations, with what they would say to other ranks noted.

Enters: a `Signature` of an `rt.*` call. Leaves: a function on plain tensors that computes what one
rank computes, forward and backward. Layers below the runtime cannot import it: tests compare
the kernels of the functions here with those of the runtime's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from shardwise.cost.local import losses, norms, others, reductions
from shardwise.cost.local.talks import Talks
from shardwise.cost.signature import Signature

__all__ = ["Talks", "function", "known"]


def function(signature: Signature) -> Callable[..., Any]:
    """What a call of the runtime computes."""
    name = signature.op.removeprefix("rt.")
    if name in _OF_RESULTS:
        return _OF_RESULTS[name](signature.results)
    if name not in _FUNCTIONS:
        raise LookupError(f"{signature.op} is not known to the cost model")
    return _FUNCTIONS[name]


def known() -> frozenset[str]:
    """The names of the runtime's functions that are known here."""
    return frozenset(_FUNCTIONS) | frozenset(_OF_RESULTS) | {"attention"}


_OF_RESULTS: dict[str, Callable[[others.Results], Callable[..., Any]]] = {
    "arange": others.factory,
    "draw": others.draw,
    "draw_like": others.draw,
    "eye": others.factory,
    "linspace": others.factory,
    "one_hot": others.one_hot,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    # products whose weight gradients can wait
    "addmm": torch.addmm,
    "conv": torch.convolution,
    "embedding": torch.embedding,
    "linear": torch.nn.functional.linear,
    "matmul": torch.matmul,
    # statistics over cut dims
    "all_true": partial(reductions.any_true, op="min"),
    "amax": reductions.amax,
    "amin": partial(reductions.amax, op="min"),
    "any_true": reductions.any_true,
    "batch_norm": norms.batch_norm,
    "layer_norm": norms.layer_norm,
    "logsumexp": reductions.logsumexp,
    "partial_mean": reductions.partial_mean,
    "rms_norm": partial(norms.layer_norm, center=False),
    "std": reductions.std,
    "std_mean": reductions.std_mean,
    "var": reductions.var,
    "var_mean": reductions.var_mean,
    "vector_norm": reductions.vector_norm,
    "weight_norm": norms.weight_norm,
    # softmax and losses
    "cross_entropy": losses.cross_entropy,
    "log_softmax": partial(losses.softmax, log=True),
    "nll_loss": losses.nll_loss,
    "partial_loss": losses.partial_loss,
    "softmax": losses.softmax,
    # the rest
    "alpha_dropout": others.alpha_dropout,
    "attention": others.attention,
    "bernoulli": others.bernoulli,
    "dropout": others.dropout,
    "embedding_rows": others.embedding_rows,
    "empty_result": others.empty_result,
    "empty_results": others.empty_results,
    "grouped_mm": others.grouped_mm,
    "multinomial": others.multinomial,
    "native_dropout": others.native_dropout,
    "no_channels": others.no_channels,
    "nothing": others.nothing,
    "tril": others.triangle,
    "triu": others.triangle,
}
