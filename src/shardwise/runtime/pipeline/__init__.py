"""The description of a pipelined step that all ranks share: a generated file as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.runtime.mesh import ProcessMesh, mesh_of
from shardwise.runtime.splits import Split
from shardwise.runtime.transport import Transport
from shardwise.schedules import Action, Links, MessageOrder, order_messages
from shardwise.shares import axes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """The ranks of a stage, arranged along axes; `{"dp": (2, 1)}` gives them unequal shares."""

    ranks: tuple[int, ...]
    axes: Mapping[str, Any]  # converted to numbers of ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", axes_of(self.axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpec:
    """A value that stage `source` computes and stage `target` uses, and its splits on each."""

    value: str
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: str
    gradient: bool = False
    sent: tuple[Split, ...] = ()
    received: tuple[Split, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSpec:
    """A parameter of several stages, and its splits on each of them; its owner comes first."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stages: tuple[int, ...]
    splits: tuple[tuple[Split, ...], ...]
    trained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """One leaf of the model's output: its stage, and how micro-batches' leaves are joined."""

    stage: int
    shape: tuple[int, ...]
    dtype: str
    split: Split | None = None
    summed: bool = False
    averaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """The description of a step that all ranks share."""

    stages: tuple[StageSpec, ...]
    transfers: tuple[TransferSpec, ...]
    outputs: tuple[Any, ...]  # OutputSpec, or a constant
    tied: tuple[TiedSpec, ...]
    num_microbatches: int
    timed: bool  # whether micro-batches are parts of one batch, or separate batches
    batch_dims: Mapping[str, int]  # inputs with a dim of samples
    actions: tuple[tuple[Action, ...], ...]
    loss_stage: int | None
    loss_dtype: str

    @staticmethod
    def of(generated: Any) -> PipelineSpec:
        """Return the spec of a generated pipeline file."""
        lines = [line.split()[2:] for line in generated.SCHEDULE.strip().splitlines()]
        rows = [[text for text in row if text != "."] for row in lines]
        return PipelineSpec(
            stages=generated.STAGES,
            transfers=generated.TRANSFERS,
            outputs=generated.OUTPUTS,
            tied=generated.TIED,
            num_microbatches=generated.MICROBATCHES,
            timed=generated.TIMED,
            actions=tuple(tuple(Action.parse(text) for text in row) for row in rows),
            batch_dims=generated.BATCH_DIMS,
            loss_stage=generated.LOSS_STAGE,
            loss_dtype=generated.LOSS_DTYPE,
        )

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    def mesh(self, rank: int, transport: Transport | None = None) -> ProcessMesh:
        """Return the mesh of a rank's group, as that rank sees it."""
        stages, count = ((s.ranks, s.axes) for s in self.stages), self.num_microbatches
        return mesh_of(rank, stages, transport, num_microbatches=count, timed=self.timed)

    def message_order(self, kinds: str) -> MessageOrder:
        """Return the order of actions of these kinds and of the messages between them."""
        edges = dict.fromkeys((t.source, t.target) for t in self.transfers)
        within = [(t.source, t.target) for t in self.transfers if t.sent != t.received]
        return order_messages(
            [[action for action in actions if action.kind in kinds] for actions in self.actions],
            [self.groups.index(stage.ranks) for stage in self.stages],
            Links.of(len(self.stages), edges),
            within,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModules:
    """One stage's generated modules: one for each micro-batch, mostly the same one.

    `generated` are their files; `precompute` is the module that computes values of the full batch
    for all micro-batches, and its file.
    """

    modules: Sequence[nn.Module]
    generated: Sequence[Any]
    precompute: tuple[nn.Module, Any] | None = None
