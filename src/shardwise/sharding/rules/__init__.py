"""The rule table, by family of operators. Importing this package registers all of them."""

from shardwise.sharding.rules import (
    attention,
    concat,
    elementwise,
    expand,
    factories,
    indexing,
    layers,
    losses,
    matmul,
    norms,
    permutations,
    random,
    reductions,
    scatter,
    slices,
    views,
)

__all__ = [
    "attention",
    "concat",
    "elementwise",
    "expand",
    "factories",
    "indexing",
    "layers",
    "losses",
    "matmul",
    "norms",
    "permutations",
    "random",
    "reductions",
    "scatter",
    "slices",
    "views",
]
