"""Plans: the decisions, their files, and the layouts that follow from them."""

from shardwise.plans.plan import ParameterEntry, Plan, model_fingerprint
from shardwise.plans.resolve import Resolved, resolve

__all__ = ["ParameterEntry", "Plan", "Resolved", "model_fingerprint", "resolve"]
