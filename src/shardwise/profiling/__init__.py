"""Measuring this machine: `profile(num_ranks)` gives the cluster that plans are made for."""

from shardwise.profiling.machine import profile

__all__ = ["profile"]
