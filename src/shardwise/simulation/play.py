"""Two lanes: a stage computes while parameters and gradients travel.

Enters: the units of a stage. Leaves: how long a pass takes, and what communication is left when
it ends. A unit's parameters are gathered while the unit before it computes; a unit's gradients are
summed as soon as they are there, one message after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.simulation.stages import UnitCost


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a forward or backward, of which `waiting` for parameters; what is left then."""

    seconds: float
    waiting: float
    left: float = 0.0  # communication after the last computation
    talking: float = 0.0  # communication in all, beside what nodes wait for


def simulate_forward(
    units: Sequence[UnitCost], loss: float = 0.0, shared: bool = False
) -> PassTime:
    """A forward; `loss` is what computing loses of the time in which a message travels.

    Where the same cores do both (`shared`), the message takes as much longer.
    """
    return _play([(u.forward, u.gather, 0.0) for u in units], loss, shared)


def simulate_backward(
    units: Sequence[UnitCost],
    *,
    reduce: bool,
    weight: bool = True,
    loss: float = 0.0,
    shared: bool = False,
) -> PassTime:
    """A backward; with `reduce` the last one of a step, without `weight` that of inputs alone."""
    rows = [
        (u.backward - (0.0 if weight else u.weight), u.gather, u.reduce if reduce else 0.0)
        for u in reversed(units)
    ]
    return _play(rows, loss, shared)


def simulate_weight(
    units: Sequence[UnitCost], *, reduce: bool, loss: float = 0.0, shared: bool = False
) -> PassTime:
    """What is left of a backward: the gradients of parameters."""
    rows = [(u.weight, 0.0, u.reduce if reduce else 0.0) for u in reversed(units)]
    return _play(rows, loss, shared)


def _play(rows: Sequence[tuple[float, float, float]], loss: float, shared: bool) -> PassTime:
    """Each row: seconds of computing, of the gather before it, of the sum after it."""
    if not any(gather or reduce for _, gather, reduce in rows):
        return PassTime(sum(compute for compute, _, _ in rows), 0.0)
    now = wire = waiting = 0.0  # when computing and the wire are free
    here = rows[0][1]  # when the parameters of the next unit have come
    wire = here
    for at, (compute, _, reduce) in enumerate(rows):
        start = max(now, here)
        waiting += start - now
        gather = rows[at + 1][1] if at + 1 < len(rows) else 0.0
        if gather:
            wire = max(wire, start) + gather
        lost = loss * min(compute, max(0.0, wire - start))
        now = start + compute + lost
        wire += lost if shared else 0.0
        if gather:
            here = wire
        if reduce:
            wire = max(wire, now) + reduce
    talking = sum(gather + reduce for _, gather, reduce in rows)
    return PassTime(now, waiting, max(0.0, wire - now), talking)
