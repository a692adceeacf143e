"""Layout problems and their solutions, for both searches.

`Task` asks for one mesh axis and is answered by an `Assignment`: the choice of every node and the
storage of every parameter. `LayoutTask` asks for all mesh axes at once, with `Prices` in seconds,
and is answered by a `LayoutSolution`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph, Node
from shardwise.sharding.candidates import Candidate
from shardwise.sharding.placements import REPLICATE, Placement, Shard, format_shard


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


Placements = tuple[Placement, ...]  # of one value: one per mesh axis, in mesh order
Choices = dict[str, dict[str, str]]  # node or parameter name -> mesh axis -> text of a plan

AXIS_ROLES = ("batch", "parameters", "sequence")


class Prices(Protocol):
    """Costs in seconds of one step on one rank; a whole value counts once, `copies` multiply.

    `held` and `needed` are placements in mesh order. `move` is asked for one move of
    `program.moves.plan_moves` at a time, so that moves which several uses share are paid once; it
    is asked once for all values of a type.
    """

    def node(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Forward and backward of a node on its local shapes, one candidate per mesh axis."""

    def move(self, value: str, held: Placements, needed: Placements, grad: bool) -> float:
        """Forward communication, with `grad` that of backward too; inf where it is impossible."""

    def hold(self, parameter: str, stored: Placements) -> float:
        """Return what storing a parameter so costs per step: gradient synchronization, optimizer.

        On an axis with R~ every rank has a term of the gradient; with R all have the same one.
        """

    def stored_bytes(self, parameter: str, stored: Placements) -> float:
        """Memory of a parameter stored so, with its gradient and optimizer state."""

    def saved_bytes(self, node: Node, choice: tuple[Candidate, ...]) -> float:
        """Memory of what a node keeps for backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAxis:
    """A mesh axis and what it is for.

    - "batch": parameters are whole; inputs may be cut as `inputs` says, and other values only as
      follows from that.
    - "sequence": the same, where `inputs` cut along the sequence.
    - "parameters": anything may be cut.

    `inputs` maps a value to the one cut that may be taken of it; None leaves all inputs free.
    """

    name: str
    ranks: int
    role: str = "parameters"
    inputs: Mapping[str, Placement] | None = None

    def __post_init__(self) -> None:
        if self.role not in AXIS_ROLES:
            raise PlanError(
                f"role {self.role!r} of axis {self.name!r}{did_you_mean(self.role, AXIS_ROLES)}",
                hint=" or ".join(AXIS_ROLES),
            )

    @property
    def follows_inputs(self) -> bool:
        """Whether cuts begin at inputs only."""
        return self.role != "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTask:
    """A joint problem over all mesh axes.

    `parameters` fixes placements by value name and mesh axis, `nodes` choices (their text) by node
    name and mesh axis. `copies` says how many layers a node or a parameter of a folded graph stands
    for: its costs count so often; `moves` how often what moves a value counts, where that is not
    as its producer does. `alike` maps a node to an earlier one with which it must agree on every
    axis; the parameters that they use in the same place are stored alike. Memory counts as
    `memory_weight` seconds per byte; `memory_limit_bytes` bounds it.

    A parameter is stored as its use needs it, or as one of its several uses does. With
    `move_parameters` it may be stored otherwise and moved in every step.
    """

    axes: tuple[LayoutAxis, ...]
    parameters: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    nodes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)
    moves: Mapping[str, int] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)
    memory_weight: float = 0.0
    memory_limit_bytes: float | None = None
    move_parameters: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.ranks for axis in self.axes}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSolution:
    """The cheapest layouts found, with the bound that says how far they may be from the best.

    `cost_s` counts time and weighted memory; `seconds` is how long the search took. `restricted`
    says what was left out of the problem that was solved; then the bound holds for that alone.
    """

    graph: Graph = field(repr=False, compare=False)
    assignments: tuple[Assignment, ...]
    cost_s: float
    bound_s: float
    memory_bytes: float
    num_variables: int
    restricted: str = ""
    seconds: float = field(compare=False)

    @property
    def gap(self) -> float:
        """How much cheaper, as a part of the cost, another solution could be at most."""
        if self.cost_s <= self.bound_s:
            return 0.0
        return (self.cost_s - self.bound_s) / max(abs(self.cost_s), 1e-30)

    def as_choices(self) -> tuple[Choices, Choices]:
        """Entries for `Plan.nodes` and for the layouts of `Plan.parameters`.

        A plan with these resolves to the same assignments: every node and parameter is named.
        """
        nodes: Choices = {
            node.name: {a.axis: str(a.nodes[node.name].choice) for a in self.assignments}
            for node in self.graph.nodes
        }
        parameters: Choices = {}
        for parameter in self.graph.parameters:
            parameters[parameter.name] = {
                a.axis: _cut_text(a.parameters.get(parameter.value, REPLICATE))
                for a in self.assignments
            }
        return nodes, parameters


def _cut_text(placement: Placement) -> str:
    return format_shard(placement) if isinstance(placement, Shard) else "whole"
