"""What a group of ranks needs at least before its optimizer runs: the bound on a point's time.

Enters: a group's stages, computing alone, and how a step runs. Leaves: seconds, of which the
simulator (`simulation.play`) never takes fewer.

- With zero 3 a pass takes at least as long as its parameters travel.
- Gradients are summed from the last backward of a stage on. What one of them hides of the sums is
  at most its own length; with several stages a group's last backwards may hide as much twice.
- With zero 1 and 2 new parameters travel after the optimizer.

Messages count as one: several take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.simulation.passes import SIZES
from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import Layers
from shardwise.simulation.times import Clock, Group


@dataclass(frozen=True, slots=True)
class Wire:
    """Seconds that parameters and gradients of a group's stages travel, once each."""

    gather: float = 0.0  # before a pass (zero 3)
    reduce: float = 0.0
    update: float = 0.0  # after the optimizer (zero 1 and 2)


def least_wire(
    ranges: Sequence[tuple[int, int]], layers: Layers, group: Group, setting: Setting, clock: Clock
) -> Wire:
    """The messages of the stages of positions `ranges`."""
    wire = SIZES.get(setting.precision.reduce or setting.precision.gradients, 0)
    gather = reduce = update = 0.0
    for (axes, zero), share in layers.parameters(setting).items():
        numel = sum(float(share.numel[end] - share.numel[first]) for first, end in ranges)
        if not numel or group.along(axes).shape[-1] < 2:
            continue
        op = "reduce_scatter" if zero >= 2 else "all_reduce"
        reduce += clock.talk(op, group, axes, numel * (wire or share.itemsize))
        whole = clock.talk("all_gather", group, axes, numel * share.itemsize) if zero else 0.0
        gather += whole if zero == 3 else 0.0
        update += whole if zero in (1, 2) else 0.0
    return Wire(gather, reduce, 0.0 if setting.prefetch else update)


def least_end(
    computed: float,
    ranges: Sequence[tuple[int, int]],
    layers: Layers,
    microbatches: int,
    wire: Wire,
) -> float:
    """When gradients are summed, if computing alone would end at `computed`."""
    forward, backward = (
        sum(layers.total(name, *mine) for mine in ranges) for name in ("forward", "backward")
    )
    slower = max(0.0, wire.gather - forward) + max(0.0, wire.gather - backward)
    end = computed + microbatches * slower
    hidden = max(backward, wire.gather) * (1 if len(ranges) == 1 else 2)
    return max(end, end - hidden + wire.gather + wire.reduce)
