"""Rules for sharding nodes, and the layouts of values that follow from them."""

from shardwise.sharding import rules
from shardwise.sharding.placements import Layout, Partial, Replicate, Shard
from shardwise.sharding.registry import register_rule
from shardwise.sharding.rule import Call, NodeRule
