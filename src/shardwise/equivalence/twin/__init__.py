"""A smaller twin of a graph and its decisions, for plans too large for this machine."""

from shardwise.equivalence.twin.build import Twin, build_twin
from shardwise.equivalence.twin.certify import certify_twin, prepare_twin
from shardwise.equivalence.twin.memory import available_bytes, needed_bytes, parameter_bytes

__all__ = [
    "Twin",
    "available_bytes",
    "build_twin",
    "certify_twin",
    "needed_bytes",
    "parameter_bytes",
    "prepare_twin",
]
