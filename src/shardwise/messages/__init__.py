"""Collectives as lists of messages: data that are checked, interpreted, drawn and run."""

from shardwise.messages.choice import CollectiveChoice
from shardwise.messages.program import Chunk, Instruction, MessageProgram
from shardwise.messages.trees import svg, trees_text

__all__ = [
    "Chunk",
    "CollectiveChoice",
    "Instruction",
    "MessageProgram",
    "svg",
    "trees_text",
]
