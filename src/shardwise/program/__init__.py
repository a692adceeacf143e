"""Lowering: from decisions to what each rank runs."""

from shardwise.program.lower import lower
from shardwise.program.program import LocalValue, Program, RankProgram, Step, Storage

__all__ = ["LocalValue", "Program", "RankProgram", "Step", "Storage", "lower"]
