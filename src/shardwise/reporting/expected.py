"""The predicted step of each group of ranks, in the words of a recording.

Enters: an `Estimate`. Leaves: seconds by cause, with computing by kind of pass; and by stage.
"""

from __future__ import annotations

import numpy as np

from shardwise.reporting.steps import PASSES
from shardwise.simulation import Estimate

__all__ = ["predicted_causes", "predicted_passes"]


def predicted_causes(estimate: Estimate, group: int) -> dict[str, float]:
    """Seconds of a group by cause, with those of computing by pass."""
    found = dict(estimate.timeline.by_group[group])
    passes = dict.fromkeys(("forward", "backward", "weight"), 0.0)
    for (kind, _), seconds in predicted_passes(estimate, group).items():
        passes[kind] += seconds
    total, computed = sum(passes.values()), found.pop("compute")
    scale = computed / total if total else 0.0
    return {**{kind: seconds * scale for kind, seconds in passes.items()}, **found}


def predicted_passes(estimate: Estimate, group: int) -> dict[tuple[str, int], float]:
    """Seconds of computing by kind of pass and stage."""
    found: dict[tuple[str, int], float] = {}
    timeline = estimate.timeline
    computing = timeline.ends - timeline.starts - timeline.waits
    computing = np.maximum(0.0, computing - timeline.collectives - timeline.recompute)
    begin = sum(map(len, timeline.schedule.actions[:group]))
    for at, action in enumerate(timeline.schedule.actions[group], start=begin):
        key = (PASSES[action.kind], action.stage)
        found[key] = found.get(key, 0.0) + float(computing[at])
    return found
