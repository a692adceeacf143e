"""The automatic planner: a joint search over meshes, layouts, stages and savings."""

from shardwise.planner.search.plan import plan

__all__ = ["plan"]
