"""Plans: the decisions, their files, and the layouts that follow from them."""

from shardwise.plans.execution import TIME, Precision, Stage
from shardwise.plans.plan import ParameterEntry, Plan, model_fingerprint, used_devices
from shardwise.plans.resolve import Resolved, resolve
from shardwise.plans.sync import Sync
