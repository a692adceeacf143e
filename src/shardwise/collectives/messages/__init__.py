"""Collectives as lists of messages, as data: checked, interpreted, drawn, and stored in plans."""

from shardwise.collectives.messages.choice import CollectiveChoice
from shardwise.collectives.messages.program import Chunk, Instruction, MessageProgram
