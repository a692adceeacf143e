"""Check a plan that is too large for this machine on a smaller twin of its graph."""

from shardwise.equivalence.twin.build import (
    Twin,
    available_bytes,
    build_twin,
    certify_twin,
    needed_bytes,
    parameter_bytes,
    prepare_twin,
)
