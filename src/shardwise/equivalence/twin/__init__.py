"""A smaller twin of a graph and its decisions, for plans too large for this machine."""

from shardwise.equivalence.twin.build import (
    Twin,
    available_bytes,
    build_twin,
    certify_twin,
    needed_bytes,
    parameter_bytes,
    prepare_twin,
)

__all__ = [
    "Twin",
    "available_bytes",
    "build_twin",
    "certify_twin",
    "needed_bytes",
    "parameter_bytes",
    "prepare_twin",
]
