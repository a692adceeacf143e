"""The rule table, by family of operators. Importing this package registers all of them."""

from shardwise.sharding.rules import (
    elementwise,
    factories,
    indexing,
    layers,
    norms_losses,
    products,
    reductions,
    slices,
    views,
)

__all__ = [
    "elementwise",
    "factories",
    "indexing",
    "layers",
    "norms_losses",
    "products",
    "reductions",
    "slices",
    "views",
]
