"""Check in one process that an emitted program computes what the model computes."""

from shardwise.equivalence.certificate import Certificate
from shardwise.equivalence.check import check
from shardwise.equivalence.reference import double, run_reference
