"""A plan's step as it was simulated: what all details are worked out from.

Enters: a graph, its fold, the work of its ranks, and the setting of a plan. Leaves: `Subject`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.cluster import Mesh
from shardwise.ir import Graph
from shardwise.simulation.estimate import Estimate, Evaluator
from shardwise.simulation.fold import Fold
from shardwise.simulation.setting import Setting
from shardwise.simulation.stages import Layers, StageCost
from shardwise.simulation.work import Floats
from shardwise.simulation.works import Works

KEPT = {"none": "saved", "selective": "saved_selective"}
TIMES = ("forward", "backward", "forward_talk", "backward_talk", "again")


@dataclass(frozen=True, kw_only=True)  # no slots: columns are computed on first use
class Subject:
    """One simulated step; `graph` has a node at every position of the evaluator's fold."""

    graph: Graph
    works: Mapping[Mesh, Works] | Works
    setting: Setting
    evaluator: Evaluator
    estimate: Estimate

    @property
    def fold(self) -> Fold:
        return self.evaluator.fold

    @property
    def bounds(self) -> tuple[int, ...]:
        """The positions at which stages begin, and the end."""
        return (*self.setting.cuts, self.fold.size)

    def works_of(self, group: int) -> Works:
        """The work of a group's ranks."""
        if isinstance(self.works, Works):
            return self.works
        return self.works[self.setting.groups[group].mesh]

    @cached_property
    def layers(self) -> tuple[Layers, ...]:
        """Of every stage: what its slowest kind of rank does, as `Evaluator` chooses it."""
        found = []
        for stage in self.estimate.stages:
            first, end = self.span(stage)
            classes = self.evaluator.group_layers(self.works, self.setting, stage.group)
            found.append(
                max(
                    classes,
                    key=lambda c: c.total("forward", first, end) + c.total("backward", first, end),
                )
            )
        return tuple(found)

    def span(self, stage: StageCost) -> tuple[int, int]:
        """The positions of a stage."""
        return self.bounds[stage.index], self.bounds[stage.index + 1]

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """Seconds of a micro-batch and kept bytes at every position, on a rank of its stage."""
        found = {name: np.zeros(self.fold.size) for name in (*TIMES, "saved")}
        kept = KEPT.get(str(self.setting.recompute), "saved_full")
        for stage, layers in zip(self.estimate.stages, self.layers, strict=True):
            first, end = self.span(stage)
            for name in TIMES:
                found[name][first:end] = np.diff(layers.sums[name])[first:end]
            found["saved"][first:end] = self.fold.spread(getattr(layers.work, kept))[first:end]
        return found

    @cached_property
    def stage_of(self) -> np.ndarray:
        """The stage of every position."""
        sizes = np.diff(np.array(self.bounds))
        return np.repeat(np.arange(len(sizes)), sizes)
