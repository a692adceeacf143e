"""What a group of ranks needs at least before its optimizer runs: the bound on a point's time.

Enters: a group's stages, computing alone, and how a step runs. Leaves: seconds, of which the
simulator (`simulation.play`) never takes fewer.

- With zero 3 a pass takes at least as long as the parameters of its blocks travel; those outside of
  blocks travel before.
- Gradients are summed from the last backward of a stage on. What one of them hides of the sums is
  at most its own length; with several stages a group's last backwards may hide as much twice.
- With zero 1 and 2 new parameters travel after the optimizer.

Messages count as one: several take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import Layers
from shardwise.simulation.sums import PURPOSES
from shardwise.simulation.times import Clock, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Seconds that parameters and gradients of a group's stages travel, once each."""

    gather: float = 0.0  # blocks before a pass (zero 3)
    reduce: float = 0.0
    update: float = 0.0  # after the optimizer (zero 1 and 2)
    root: float = 0.0  # before the step (zero 3)


def least_wire(
    ranges: Sequence[tuple[int, int]], layers: Layers, group: Group, setting: Setting, clock: Clock
) -> Wire:
    """The messages of the stages of positions `ranges`."""
    found: dict[tuple[str, str, tuple[str, ...]], float] = {}
    for first, end in ranges:
        for kind in layers.sent(first, end, setting):
            key = (kind.purpose, kind.op, kind.axes)
            found[key] = found.get(key, 0.0) + float(kind.num_bytes.sum())
    seconds = dict.fromkeys(PURPOSES, 0.0)
    for (purpose, op, axes), num_bytes in found.items():
        seconds[purpose] += clock.talk(op, group, axes, num_bytes)
    return Wire(
        gather=seconds["gather"],
        reduce=seconds["reduce"],
        update=0.0 if setting.prefetch else seconds["update"],
        root=seconds["root"],
    )


def least_end(
    computed: float,
    ranges: Sequence[tuple[int, int]],
    layers: Layers,
    num_microbatches: int,
    wire: Wire,
) -> float:
    """When gradients are summed, if computing alone would end at `computed`."""
    forward, backward = (
        sum(layers.total(name, *mine) for mine in ranges) for name in ("forward", "backward")
    )
    slower = max(0.0, wire.gather - forward) + max(0.0, wire.gather - backward)
    waits = wire.root if ranges[0][0] == 0 else 0.0  # later stages do it while they wait
    end = waits + computed + num_microbatches * slower
    hidden = max(backward, wire.gather) * (1 if len(ranges) == 1 else 2)
    return max(end, end - hidden + wire.gather + wire.reduce)
