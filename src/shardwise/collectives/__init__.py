"""Collectives solved for a network into programs of messages, with bounds."""

from shardwise.collectives.demand import OPERATIONS
from shardwise.collectives.network import Network, Send
from shardwise.collectives.solution import Solution
from shardwise.collectives.solve import solve

__all__ = ["OPERATIONS", "Network", "Send", "Solution", "solve"]
