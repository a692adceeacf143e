"""What is asked of one mesh axis, and what was decided for it.

Enters: a plan's decisions. Leaves: `Task` and `Assignment`, the values between plans, search and
lowering.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.sharding.candidates import Candidate
from shardwise.sharding.placements import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked of one mesh axis.

    `parameters` fixes placements by value name; others are whole, or chosen when `split` is set.
    `inputs` fixes which cut of an input may be taken; None leaves all inputs free. `choices` forces
    nodes to a candidate, by its text. `weight` is the cost of holding one element of a parameter.
    """

    axis: str
    ranks: int
    parameters: Mapping[str, Placement] = field(default_factory=dict)
    split: bool = False
    inputs: Mapping[str, Placement] | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1e4
    beam: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The choice of every node and the storage of every parameter on one mesh axis."""

    axis: str
    ranks: int
    nodes: Mapping[str, Candidate]
    parameters: Mapping[str, Placement]
    cost: float
