"""Define the program of each rank: local calls, redistributions, parameters and their storage.

Ranks with the same local sizes share one `RankProgram`. Code that depends on more than these, such
as the first row of a vocabulary shard, asks the mesh at run time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.cluster import Mesh
from shardwise.errors import ProgramError
from shardwise.inexact import Inexact
from shardwise.ir import Graph, TensorType, format_arg, iter_refs
from shardwise.layouts.moves import by_expert, kind, same_placement
from shardwise.plans import Plan, Sync
from shardwise.redistribution import REDISTRIBUTIONS
from shardwise.sharding.placements import Layout, Placement, same_on_axis
from shardwise.sharding.rule import MeshAxis
from shardwise.shares import AxisSize


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalValue:
    """A value on one rank: the graph value, its layout and its local type."""

    value: str
    layout: Layout
    type: TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One statement: the local computation of a node, or the redistribution of a value."""

    outputs: tuple[str, ...]
    fn: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    node: str = ""  # the node that it computes, or for which it redistributes a value
    needs: tuple[Layout, ...] = ()  # layouts of a computation's tensor operands, in order
    axes: tuple[str, ...] = ()  # mesh axes of a redistribution
    module: str = ""
    module_class: str = ""
    source: str = ""
    grad_enabled: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    recompute: str | None = None

    @property
    def is_move(self) -> bool:
        return self.fn in REDISTRIBUTIONS

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(r.name for r in iter_refs((self.args, self.kwargs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A parameter: its layout on the mesh and how its gradient is synchronized."""

    value: str
    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    sync: tuple[str, ...]  # mesh axes on which the gradient arrives as a partial sum
    zero: int
    unit: str
    requires_grad: bool
    borrowed: bool = False  # a replica: another stage owns it
    form: Sync = field(default_factory=Sync)  # how it is synchronized, other than by its level
    inexact: Inexact | None = None  # how it differs from synchronous training


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInput:
    """An input of the program: the rank's local part under `layout`."""

    value: str
    name: str
    path: tuple[str | int, ...]
    layout: Layout
    shape: tuple[int, ...]  # of the full input
    kind: str = "batch"  # or "received", "precomputed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """The program of the ranks in `ranks`."""

    ranks: tuple[int, ...]
    inputs: tuple[LocalInput, ...]
    parameters: tuple[Storage, ...]
    steps: tuple[Step, ...]
    values: Mapping[str, LocalValue]
    loss: str | None
    outputs: tuple[Any, ...]  # leaves: Ref to a replicated local value, or a constant
    output_steps: tuple[Step, ...]  # redistributions that only the outputs need
    mutations: tuple[tuple[str, str], ...]  # buffer name -> local value of its new content
    carries_grad: frozenset[str] = frozenset()  # graph values through which gradients flow
    sends: tuple[str, ...] = ()  # local values that later stages use


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The parallel program of all ranks for one graph and one plan."""

    graph: Graph
    plan: Plan
    rank_programs: tuple[RankProgram, ...]
    notes: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    def of_rank(self, rank: int) -> RankProgram:
        """Return the program that `rank` runs."""
        for program in self.rank_programs:
            if rank in program.ranks:
                return program
        raise ProgramError(f"rank {rank} is not in {self.mesh} of {self.mesh.size} ranks")

    def verify(self) -> None:
        """Raise unless every value is used in its layout and every redistribution is legal."""
        sizes = dict(self.mesh.axes)
        for program in self.rank_programs:
            for step in (*program.steps, *program.output_steps):
                if step.is_move:
                    _verify_move(program, step, sizes)
                    self._verify_time(program, step)
                else:
                    _verify_needs(program, step, sizes)
                    _verify_gives(program, step)
            _verify_ends(program, sizes, self.time_axis)

    @property
    def time_axis(self) -> str | None:
        """The mesh axis of micro-batches, if there is one."""
        return next((axis for axis, role in self.plan.roles.items() if role == "time"), None)

    def _verify_time(self, program: RankProgram, step: Step) -> None:
        move = REDISTRIBUTIONS[step.fn]
        # Micro-batches cannot communicate, and each uses a shared value for different work, so
        # along their axis no value is R.
        if self.time_axis in step.axes and not (move.is_local and move.source != "R"):
            value = program.values[step.inputs[0]].value
            raise ProgramError(
                f"{step.fn} of %{value} would communicate between micro-batches: {step}"
            )

    def __str__(self) -> str:
        return "\n\n".join(format_rank_program(p, self.mesh) for p in self.rank_programs)


def _verify_move(program: RankProgram, step: Step, sizes: Mapping[str, AxisSize]) -> None:
    source = program.values[step.inputs[0]]
    target = program.values[step.outputs[0]]
    expects, gives = REDISTRIBUTIONS[step.fn].source, REDISTRIBUTIONS[step.fn].target
    for axis, before in source.layout.axes:
        after = target.layout[axis]
        if axis not in step.axes:
            if not same_placement(before, after, sizes[axis]):
                raise ProgramError(f"{step.fn} changes axis {axis} of %{source.value}: {step}")
            continue
        _verify_rows(step, before, after)
        # Without a gradient, R and R~ are equal.
        without_grad = source.value not in program.carries_grad
        expected = {expects, "R", "R~"} if without_grad and expects in ("R", "R~") else {expects}
        if kind(before) not in expected or not (kind(after) == gives or without_grad):
            raise ProgramError(
                f"{step.fn} of %{source.value} over {axis} must be {expects} -> {gives}, "
                f"but is {before} -> {after}"
            )


def _verify_rows(step: Step, before: Placement, after: Placement) -> None:
    """Raise unless an exchange of rows moves them from tokens to experts, or back."""
    if step.fn in ("rt.to_experts", "rt.to_tokens"):
        forth = step.fn == "rt.to_experts"
        if (by_expert(before), by_expert(after)) != (not forth, forth):
            raise ProgramError(f"{step.fn} turns {before} into {after}: {step}")


def _verify_needs(program: RankProgram, step: Step, sizes: Mapping[str, AxisSize]) -> None:
    if not step.needs:
        return
    for name, needed in zip(step.inputs, step.needs, strict=True):
        local = program.values[name]
        for axis, need in needed.axes:
            placement = local.layout[axis]
            if same_on_axis(local.layout, needed, axis, sizes):
                continue
            both_full = {kind(placement), kind(need)} == {"R", "R~"}
            if both_full and (local.value not in program.carries_grad or not step.grad_enabled):
                continue
            raise ProgramError(
                f"node {step.node} needs %{local.value} as {axis}:{need}, not {axis}:{placement}"
            )


def _verify_gives(program: RankProgram, step: Step) -> None:
    """Check that a result has a partial gradient only where the step's operands have one too."""
    if not step.needs or not step.grad_enabled:
        return
    results = [program.values[n] for n in step.outputs]
    flowing = [v.layout for v in results if v.value in program.carries_grad]
    operands = [
        needed
        for name, needed in zip(step.inputs, step.needs, strict=True)
        if program.values[name].value in program.carries_grad
    ]
    for axis, _ in step.needs[0].axes:
        result_kinds = {kind(layout[axis]) for layout in flowing}
        operand_kinds = {kind(layout[axis]) for layout in operands}
        if "R~" in result_kinds and result_kinds | operand_kinds != {"R~"}:
            raise ProgramError(
                f"node {step.node} has results in {axis}:{'+'.join(sorted(result_kinds))}, whose "
                f"gradients are partial, and operands in {axis}:{'+'.join(sorted(operand_kinds))}"
            )


def _verify_ends(program: RankProgram, sizes: Mapping[str, AxisSize], time: str | None) -> None:
    """Check that the loss and new buffer contents are replicated and that no partial sum is sent.

    The loss of a micro-batch is one term of the batch's loss: along the time axis it is partial.
    """
    ends = [("the loss", program.loss)] if program.loss else []
    ends += [(f"buffer {name}", value) for name, value in program.mutations]
    for label, name in ends:
        for axis, placement in program.values[name or ""].layout.axes:
            expected = ("P",) if axis == time and label == "the loss" else ("R", "R~")
            if sizes[axis] != 1 and kind(placement) not in expected:
                raise ProgramError(
                    f"{label} ends as {axis}:{placement}, but every rank needs all of it"
                )
    for name in program.sends:
        for axis, placement in program.values[name].layout.axes:
            if axis != time and sizes[axis] != 1 and kind(placement) not in ("R", "S"):
                raise ProgramError(f"%{name} is sent as {axis}:{placement}")


def format_rank_program(program: RankProgram, mesh: Mesh) -> str:
    """Return a rank program as text, one line per parameter and step."""
    lines = [f"program of ranks {', '.join(map(str, program.ranks))} on {mesh}"]
    lines += [f"  input {item.name}: {item.layout} of {item.shape}" for item in program.inputs]
    for storage in program.parameters:
        sync = f" sync {'.'.join(storage.sync)} zero {storage.zero}" if storage.sync else ""
        sync += f" ({storage.form})" if storage.sync and storage.form != Sync() else ""
        lines.append(f"  parameter {storage.name}: {storage.layout} {storage.local_shape}{sync}")
    lines += [f"  {format_step(program, step)}" for step in program.steps]
    return "\n".join([*lines, f"  loss %{program.loss}"])


def format_step(program: RankProgram, step: Step) -> str:
    """Return a step as text: `%y: dp:S(0) tp:R [2, 16] = rt.reduce(%x, tp)`."""
    outs = ", ".join(
        f"%{o}: {program.values[o].layout} {list(program.values[o].type.shape)}"
        for o in step.outputs
    )
    args = [_format(a) for a in step.args] + [f"{k}={_format(v)}" for k, v in step.kwargs]
    return f"{outs} = {step.fn}({', '.join(args)})"


def _format(arg: Any) -> str:
    return ".".join(arg.names) if isinstance(arg, MeshAxis) else format_arg(arg)


# ---------------------------------------------------------------- ranks with the same program
def merge_equal(programs: Iterable[RankProgram]) -> tuple[RankProgram, ...]:
    """Return the distinct programs, each with all ranks that run it."""
    merged: list[RankProgram] = []
    for program in programs:
        for index, other in enumerate(merged):
            if replace(other, ranks=program.ranks) == program:
                merged[index] = replace(other, ranks=(*other.ranks, *program.ranks))
                break
        else:
            merged.append(program)
    return tuple(replace(p, ranks=tuple(sorted(p.ranks))) for p in merged)
