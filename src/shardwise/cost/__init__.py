"""Predict the cost of local computation and of communication, in seconds and bytes."""

from shardwise.cost.collectives import CollectiveModel, collective_model
from shardwise.cost.kernels import CallCost, Kernel, kernel_seconds, kernels_seconds
from shardwise.cost.meta_run import cost_of
from shardwise.cost.signature import Signature, call_signature
from shardwise.cost.table import OpTable, call_seconds
from shardwise.cost.timing import measure
