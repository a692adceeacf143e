"""The rule table, by family of operators. Importing this package registers all of them."""

from shardwise.sharding.rules import elementwise, matmul, views

__all__ = ["elementwise", "matmul", "views"]
