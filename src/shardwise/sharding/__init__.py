"""How nodes may be split, and what follows for the layouts of values."""

from shardwise.sharding import rules
from shardwise.sharding.placements import Layout, Partial, Replicate, Shard
from shardwise.sharding.registry import register_rule
from shardwise.sharding.rule import Call, NodeRule

__all__ = ["Call", "Layout", "NodeRule", "Partial", "Replicate", "Shard", "register_rule", "rules"]
