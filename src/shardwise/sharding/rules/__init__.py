"""The rule table, by family of operators. Importing this package registers all of them."""

from shardwise.sharding.rules import (
    convolutions,
    elementwise,
    factories,
    indexing,
    norms_losses,
    products,
    reductions,
    routing,
    slices,
    views,
)
