"""The cost of every stage: its units, each with the time of a pass and the messages it sends.

A unit is a run of positions in one block: what is gathered, recomputed and synchronized together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.simulation.costs import ClusterCosts, ExecutionConfig, Group, NodeTimes
from shardwise.simulation.folded_graph import FoldedGraph
from shardwise.simulation.gradient_traffic import (
    PURPOSES,
    Key,
    ParamClass,
    Traffic,
    before,
    sent,
    shares,
)
from shardwise.simulation.workload import Floats, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """Seconds of one unit for one micro-batch; `reduce` once a step."""

    name: str
    first: int
    end: int
    forward: float
    backward: float
    weight: float
    forward_talk: float  # waiting for collectives between nodes
    backward_talk: float
    again: float  # of backward: computing forward again
    gather: float = 0.0  # parameters of a block, before forward and before backward (zero 3)
    reduce: float = 0.0  # gradients, in the last backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The units of a stage on its group's slowest rank, and the bytes that it passes on."""

    index: int
    group: int
    units: tuple[UnitCost, ...]
    send_bytes: float  # to the next stage, for one micro-batch; a gradient comes back
    numel: float  # parameters that the optimizer of a rank updates, and
    tensors: int  # in how many pieces
    update_gather: float  # seconds to give all ranks the new parameters (zero 1 and 2)
    root_gather: float = 0.0  # seconds for parameters outside of blocks, before a step (zero 3)
    update_s: float | None = None  # of the optimizer, where more is known than `numel`

    @property
    def forward(self) -> float:
        return sum(unit.forward for unit in self.units)

    @property
    def backward(self) -> float:
        return sum(unit.backward for unit in self.units)

    @property
    def weight(self) -> float:
        return sum(unit.weight for unit in self.units)

    @property
    def forward_talk(self) -> float:
        return sum(unit.forward_talk for unit in self.units)

    @property
    def backward_talk(self) -> float:
        return sum(unit.backward_talk for unit in self.units)

    @property
    def again(self) -> float:
        return sum(unit.again for unit in self.units)

    @property
    def computing(self) -> float:
        """Seconds of a micro-batch without communication."""
        return self.forward + self.backward - self.forward_talk - self.backward_talk


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A parameter of one position that is used at others, too, as a rank holds it."""

    numel: float
    num_bytes: float
    users: NDArray[np.int64]  # positions, ascending


class Layers:
    """What every position of a model costs on one rank: sums over any range are differences."""

    def __init__(
        self,
        fold: FoldedGraph,
        work: Workload,
        times: NodeTimes,
        setting: ExecutionConfig,
        shared: dict[object, Any] | None = None,
    ) -> None:
        self.fold, self.work, self.device = fold, work, times.device
        again = _again(fold, work, times, setting)
        spread = fold.spread
        forward = spread(times.forward + times.forward_talk)
        backward = spread(times.backward + times.backward_talk) + again
        self.sums = {
            "forward": before(forward),
            "backward": before(backward),
            "weight": before(spread(times.weight)),
            "forward_talk": before(spread(times.forward_talk)),
            "backward_talk": before(spread(times.backward_talk)),
            "again": before(again),
        }
        self._shared = {} if shared is None else shared  # of all that have these parameters
        self.passes: dict[object, Any] = {}  # what `passes` remembers

    def parameters(self, setting: ExecutionConfig) -> dict[Key, ParamClass]:
        """The trained parameters by how their gradients are summed and shared."""
        key = (id(self.work.parameters), setting.sums)
        if key not in self._shared:
            self._shared[key] = shares(self.fold, self.work, setting)
        found: dict[Key, ParamClass] = self._shared[key]
        return found

    def sent(self, first: int, end: int, setting: ExecutionConfig) -> tuple[Traffic, ...]:
        """The messages of parameters and gradients of the units among positions `first:end`."""
        key = (id(self.work.parameters), setting.sums, first, end)
        if key not in self._shared:
            runs = self.fold.runs(first, end)
            self._shared[key] = tuple(sent(self.parameters(setting), runs, setting))
        found: tuple[Traffic, ...] = self._shared[key]
        return found

    def whole(self, name: str) -> Floats:
        """An array of the work at every position of the model."""
        key = ("whole", name)
        if key not in self.passes:
            self.passes[key] = self.fold.spread(getattr(self.work, name))
        found: Floats = self.passes[key]
        return found

    @property
    def tied(self) -> list[Tied]:
        """The trained parameters that are used at several positions."""
        if "tied" not in self.passes:
            self.passes["tied"] = [
                Tied(
                    numel=float(held.numel),
                    num_bytes=float(held.numel * held.itemsize),
                    users=np.flatnonzero(np.isin(self.fold.index, (held.node, *held.others))),
                )
                for held in self.work.parameters
                if held.others and held.requires_grad and self.fold.copies[held.node] == 1
            ]
        found: list[Tied] = self.passes["tied"]
        return found

    def total(self, name: str, first: int, end: int) -> float:
        """The sum over positions `first:end`."""
        sums = self.sums[name]
        return float(sums[end] - sums[first])


def _again(fold: FoldedGraph, work: Workload, times: NodeTimes, setting: ExecutionConfig) -> Floats:
    """What backward computes again, at every position."""
    if setting.recompute == "none":
        return np.zeros(fold.size)
    inside = _repeated(fold, work)
    if setting.recompute == "selective":
        return fold.spread(times.again + times.forward_talk) * inside
    if not isinstance(setting.recompute, str):
        modules = [place.rpartition(".")[0] for place in fold.places]
        globs = setting.recompute
        inside &= np.array([any(_under(m, g) for g in globs) for m in modules])
    return fold.spread(times.forward + times.forward_talk) * inside


def _repeated(fold: FoldedGraph, work: Workload) -> NDArray[np.bool_]:
    """The positions of each block up to the last whose result the block's own backward needs.

    The second forward ends there (torch's checkpoint stops early): the last product of a block,
    and the collective after it, are not repeated.
    """
    found = np.zeros(fold.size, dtype=bool)
    needed = fold.spread(work.saved - work.saved_full) > 0
    for name, first, end in fold.runs(0, fold.size):
        here = np.flatnonzero(needed[first:end])
        if name and here.size:
            found[first : first + int(here[-1]) + 1] = True
    return found


def _under(module: str, glob: str) -> bool:
    """Whether a module is one that matches, or inside it."""
    pieces = module.split(".")
    return any(fnmatchcase(".".join(pieces[: i + 1]), glob) for i in range(len(pieces)))


def stage_cost(
    index: int,
    first: int,
    end: int,
    layers: Layers,
    group: Group,
    setting: ExecutionConfig,
    costs: ClusterCosts,
) -> StageCost:
    """The cost of the stage of positions `first:end`."""
    runs = layers.fold.runs(first, end)
    seconds = _messages(layers, first, end, group, setting, costs)
    units = [
        UnitCost(
            name=name,
            first=a,
            end=b,
            **{n: layers.total(n, a, b) for n in layers.sums},
            gather=gather,
            reduce=reduce,
        )
        for (name, a, b), gather, reduce in zip(
            runs, seconds["gather"], seconds["reduce"], strict=True
        )
    ]
    numel, tensors, squares = 0.0, 0.0, 0.0
    for (axes, zero, _), share in layers.parameters(setting).items():
        mine = float(share.numel[end] - share.numel[first])
        ranks = group.along(axes).shape[-1]
        numel += mine / (ranks if zero else 1)
        tensors += float(share.tensors[end] - share.tensors[first])
        squares += float(share.squares[end] - share.squares[first]) / (ranks**2 if zero else 1)
    last = index + 1 == len(setting.cuts)
    crossing = 0.0 if last else float(layers.whole("crossing")[end])
    return StageCost(
        index=index,
        group=setting.placement[index],
        units=tuple(units),
        send_bytes=crossing,
        numel=numel,
        tensors=round(tensors),
        update_gather=sum(seconds["update"]),
        root_gather=sum(seconds["root"]),
        update_s=costs.update(layers.device, numel, squares / numel if numel else 0.0, tensors),
    )


def tied_bytes(layers: Sequence[Layers], setting: ExecutionConfig) -> dict[tuple[int, int], float]:
    """What a rank holds of parameters that groups share: by their home, the group whose stage uses
    them first, and the other group. `layers` are those of every group.
    """
    found: dict[tuple[int, int], float] = {}
    if len(layers) < 2:
        return found
    for number, tied in enumerate(layers[0].tied):
        stages = np.searchsorted(setting.cuts, tied.users, side="right") - 1
        home, *others = dict.fromkeys(setting.placement[stage] for stage in stages.tolist())
        for other in others:
            mine = layers[home].tied[number].num_bytes
            found[home, other] = found.get((home, other), 0.0) + mine
    return found


def with_offload(cost: StageCost, seconds: float) -> StageCost:
    """A stage whose activations go to host memory and back: what of it nothing hides.

    The way there is hidden behind forward as far as that lasts; the way back is not.
    """
    unit = UnitCost(
        name="",
        first=cost.units[-1].end,
        end=cost.units[-1].end,
        forward=max(0.0, seconds - cost.forward),
        backward=seconds,
        weight=0.0,
        forward_talk=0.0,
        backward_talk=0.0,
        again=0.0,
    )
    return replace(cost, units=(*cost.units, unit))


def _messages(
    layers: Layers,
    first: int,
    end: int,
    group: Group,
    setting: ExecutionConfig,
    costs: ClusterCosts,
) -> dict[str, list[float]]:
    """Seconds of every unit's messages, by their purpose."""
    runs = layers.fold.runs(first, end)
    found = {purpose: [0.0] * len(runs) for purpose in PURPOSES}
    for kind in layers.sent(first, end, setting):
        rows = group.along(kind.axes)
        if rows.shape[-1] < 2:
            continue
        spent = kind.seconds(costs.collective(kind.op, rows).seconds)
        found[kind.purpose] = [a + b for a, b in zip(found[kind.purpose], spent, strict=True)]
    return found
