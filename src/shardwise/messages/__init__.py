"""Collectives as lists of messages: data that are checked, interpreted, drawn and run."""

from shardwise.messages.check import Facts, check
from shardwise.messages.choice import CollectiveChoice
from shardwise.messages.interpret import interpret
from shardwise.messages.picture import svg, trees_text
from shardwise.messages.program import Chunk, Instruction, MessageProgram

__all__ = [
    "Chunk",
    "CollectiveChoice",
    "Facts",
    "Instruction",
    "MessageProgram",
    "check",
    "interpret",
    "svg",
    "trees_text",
]
