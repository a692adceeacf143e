"""Collectives as lists of messages: data that are checked, interpreted, drawn and run."""

from shardwise.collectives.messages.choice import CollectiveChoice, svg, trees_text
from shardwise.collectives.messages.program import Chunk, Instruction, MessageProgram

__all__ = [
    "Chunk",
    "CollectiveChoice",
    "Instruction",
    "MessageProgram",
    "svg",
    "trees_text",
]
