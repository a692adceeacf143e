"""Plans: the decisions, their files, and the layouts that follow from them."""

from shardwise.plans.devices import used_devices
from shardwise.plans.execution import TIME, Precision, Stage
from shardwise.plans.fingerprint import model_fingerprint
from shardwise.plans.plan import ParameterEntry, Plan
from shardwise.plans.resolve import Resolved, resolve

__all__ = [
    "TIME",
    "ParameterEntry",
    "Plan",
    "Precision",
    "Resolved",
    "Stage",
    "model_fingerprint",
    "resolve",
    "used_devices",
]
