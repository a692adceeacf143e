"""Operators on sharded dims that communicate or need special care inside."""

from shardwise.runtime.operators.attention import attention, log_softmax, softmax
from shardwise.runtime.operators.embedding import embedding_rows, grouped_mm
from shardwise.runtime.operators.losses import cross_entropy, nll_loss, partial_loss
from shardwise.runtime.operators.norms import batch_norm, layer_norm, rms_norm, weight_norm
from shardwise.runtime.operators.reductions import (
    all_true,
    amax,
    amin,
    any_true,
    logsumexp,
    partial_mean,
    std,
    std_mean,
    var,
    var_mean,
    vector_norm,
)
from shardwise.runtime.operators.support import (
    empty_result,
    empty_results,
    no_channels,
    require_in_range,
)

__all__ = [
    "all_true",
    "amax",
    "amin",
    "any_true",
    "attention",
    "batch_norm",
    "cross_entropy",
    "embedding_rows",
    "empty_result",
    "empty_results",
    "grouped_mm",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "nll_loss",
    "no_channels",
    "partial_loss",
    "partial_mean",
    "require_in_range",
    "rms_norm",
    "softmax",
    "std",
    "std_mean",
    "var",
    "var_mean",
    "vector_norm",
    "weight_norm",
]
