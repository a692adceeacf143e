"""What a plan's file tells of its step beyond the search: modules, traffic, machines, what-if."""

from shardwise.planner.search.details.contents import details, figures
from shardwise.planner.search.details.subject import Subject

__all__ = ["Subject", "details", "figures"]
