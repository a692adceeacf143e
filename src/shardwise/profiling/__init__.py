"""Measure this machine: `profile(num_ranks)` returns it as a cluster."""

from shardwise.profiling.machine import profile
