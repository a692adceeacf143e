"""What each rank runs: local calls, explicit moves between layouts, parameters and their sharing.

A `RankProgram`
holds for all ranks with the same local sizes; what depends on the rank beyond that (the first row
of a vocabulary shard) is asked of the mesh at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.cluster import Mesh
from shardwise.errors import ProgramError
from shardwise.ir import Graph, Ref, TensorType, format_arg, iter_refs
from shardwise.layouts.costs import kind, same_placement
from shardwise.plans import Plan, Resolved
from shardwise.program.sources import Sources
from shardwise.redistribution import REDISTRIBUTIONS
from shardwise.sharding.placements import Layout, same_on_axis
from shardwise.sharding.rule import MeshAxis
from shardwise.shares import lengths, part


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalValue:
    """A value as one rank holds it: which graph value, its layout, its local type."""

    value: str
    layout: Layout
    type: TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One statement: a local computation of a node, or a move of a value between layouts."""

    outputs: tuple[str, ...]
    fn: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    node: str = ""  # the graph node computed, or the one a move serves
    needs: tuple[Layout, ...] = ()  # of the tensor operands in order, for computations
    axes: tuple[str, ...] = ()  # mesh axes a move works on
    module: str = ""
    module_class: str = ""
    source: str = ""
    source_text: str = ""
    grad_enabled: bool = True
    autocast: tuple[str, torch.dtype, bool] | None = None
    recompute: str | None = None

    @property
    def is_move(self) -> bool:
        return self.fn in REDISTRIBUTIONS

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(r.name for r in iter_refs((self.args, tuple(v for _, v in self.kwargs))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A parameter: how it lies on the mesh and how its gradient is synchronized."""

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
    borrowed: bool = False  # its home is another stage


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalInput:
    """An input as the program takes it: the rank's part under `layout`."""

    value: str
    name: str
    path: tuple[str | int, ...]
    layout: Layout
    shape: tuple[int, ...]  # of the whole input
    kind: str = "batch"  # or "received", "beforehand"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgram:
    """The program of the ranks in `ranks`."""

    ranks: tuple[int, ...]
    inputs: tuple[LocalInput, ...]
    parameters: tuple[Storage, ...]
    steps: tuple[Step, ...]
    values: Mapping[str, LocalValue]
    loss: str | None
    outputs: tuple[Any, ...]  # leaves: Ref to a local value that is whole, or a constant
    output_steps: tuple[Step, ...]  # moves that only the outputs need
    mutations: tuple[tuple[str, str], ...]  # buffer name -> local value with its new content
    carries_grad: frozenset[str] = frozenset()  # graph values through which gradients flow
    sends: tuple[str, ...] = ()  # local values that later stages use


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The parallel program of all ranks for one graph and one plan."""

    graph: Graph
    plan: Plan
    rank_programs: tuple[RankProgram, ...]
    notes: tuple[str, ...] = field(default=())

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
        """Raise unless every value is used in the layout it has, and every move is a legal one."""
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
        # Micro-batches send nothing to each other, and what one computes with a value the others
        # do not: there is no R along their axis.
        if self.time_axis in step.axes and not (move.is_local and move.held != "R"):
            value = program.values[step.inputs[0]].value
            raise ProgramError(f"{step.fn} of %{value} would need other micro-batches: {step}")

    def __str__(self) -> str:
        return "\n\n".join(format_rank_program(p, self.mesh) for p in self.rank_programs)


def _verify_move(program: RankProgram, step: Step, sizes: Mapping[str, int]) -> None:
    source = program.values[step.inputs[0]]
    target = program.values[step.outputs[0]]
    held, given = REDISTRIBUTIONS[step.fn].held, REDISTRIBUTIONS[step.fn].given
    for axis, before in source.layout.axes:
        after = target.layout[axis]
        if axis not in step.axes:
            if not same_placement(before, after, sizes[axis]):
                raise ProgramError(f"{step.fn} changes axis {axis} of %{source.value}: {step}")
            continue
        loose = source.value not in program.carries_grad  # without a gradient both R are one
        expected = {held, "R", "R~"} if loose and held in ("R", "R~") else {held}
        if kind(before) not in expected or not (kind(after) == given or loose):
            raise ProgramError(
                f"{step.fn} of %{source.value} over {axis} is {held} -> {given}, "
                f"found {before} -> {after}"
            )


def _verify_needs(program: RankProgram, step: Step, sizes: Mapping[str, int]) -> None:
    if not step.needs:
        return
    for name, needed in zip(step.inputs, step.needs, strict=True):
        local = program.values[name]
        for axis, need in needed.axes:
            held = local.layout[axis]
            if same_on_axis(local.layout, needed, axis, sizes):
                continue
            both = {kind(held), kind(need)} == {"R", "R~"}
            if both and (local.value not in program.carries_grad or not step.grad_enabled):
                continue
            raise ProgramError(
                f"node {step.node} needs %{local.value} as {axis}:{need}, it is {axis}:{held}"
            )


def _verify_gives(program: RankProgram, step: Step) -> None:
    """A result has a partial gradient only where the step's operands have one too."""
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
        given = {kind(layout[axis]) for layout in flowing}
        taken = {kind(layout[axis]) for layout in operands}
        if "R~" in given and given | taken != {"R~"}:
            raise ProgramError(
                f"node {step.node} leaves {axis}:{'+'.join(sorted(given))} with partial gradients "
                f"of operands in {axis}:{'+'.join(sorted(taken))}"
            )


def _verify_ends(program: RankProgram, sizes: Mapping[str, int], time: str | None) -> None:
    """The loss and the new contents of buffers are whole on every rank; no partial sum is sent.

    The loss of a micro-batch is a term of the batch's.
    """
    ends = [("the loss", program.loss)] if program.loss else []
    ends += [(f"buffer {name}", value) for name, value in program.mutations]
    for what, name in ends:
        for axis, held in program.values[name or ""].layout.axes:
            wanted = ("P",) if axis == time and what == "the loss" else ("R", "R~")
            if sizes[axis] > 1 and kind(held) not in wanted:
                raise ProgramError(f"{what} is left as {axis}:{held}, every rank needs it whole")
    for name in program.sends:
        for axis, held in program.values[name].layout.axes:
            if axis != time and sizes[axis] > 1 and kind(held) not in ("R", "S"):
                raise ProgramError(f"%{name} is sent as {axis}:{held}")


def format_rank_program(program: RankProgram, mesh: Mesh) -> str:
    """Return a rank program as text, one line per parameter and step."""
    lines = [f"program of ranks {', '.join(map(str, program.ranks))} on {mesh}"]
    for item in program.inputs:
        lines.append(f"  input {item.name}: {item.layout} of {item.shape}")
    for storage in program.parameters:
        sync = f" sync {'.'.join(storage.sync)} zero {storage.zero}" if storage.sync else ""
        lines.append(f"  parameter {storage.name}: {storage.layout} {storage.local_shape}{sync}")
    for step in program.steps:
        lines.append(f"  {format_step(program, step)}")
    lines.append(f"  loss %{program.loss}")
    return "\n".join(lines)


def format_step(program: RankProgram, step: Step) -> str:
    """`%y: dp:S(0) tp:R [2, 16] = rt.reduce(%x, tp)`."""
    outs = ", ".join(
        f"%{o}: {program.values[o].layout} {list(program.values[o].type.shape)}"
        for o in step.outputs
    )
    args = [_format(a) for a in step.args] + [f"{k}={_format(v)}" for k, v in step.kwargs]
    return f"{outs} = {step.fn}({', '.join(args)})"


def _format(arg: Any) -> str:
    if isinstance(arg, MeshAxis):
        return ".".join(arg.names)
    if isinstance(arg, Ref):
        return str(arg)
    return format_arg(arg)


# Places that run the same program: ranks of a mesh, and micro-batches, with equal local sizes.


def merge_equal(programs: Iterable[RankProgram]) -> tuple[RankProgram, ...]:
    """Return the programs, with equal ones of several classes as one."""
    found: list[RankProgram] = []
    for program in programs:
        for index, known in enumerate(found):
            if replace(known, ranks=program.ranks) == program:
                found[index] = replace(known, ranks=(*known.ranks, *program.ranks))
                break
        else:
            found.append(program)
    return tuple(replace(p, ranks=tuple(sorted(p.ranks))) for p in found)


def rank_classes(resolved: Resolved, sources: Sources) -> list[tuple[int, ...]]:
    """Ranks with the same local sizes, in rank order."""
    mesh = resolved.plan.mesh
    extents: dict[str, set[int]] = {axis: set() for axis in mesh.names}
    layouts = [sources.layouts[name] for name in sources.layouts]
    for node in resolved.graph.nodes:
        layouts += [*resolved.operand_layouts(node.name), *resolved.result_layouts(node.name)]
    for layout in layouts:
        for axis, shard in layout.shards:
            extents[axis] |= {size for _, size, _ in shard.of}
    known: set[int] = set()
    for axis, ranks in mesh.axes:  # what earlier axes leave of an extent may be cut again
        extents[axis] |= known
        known |= {length for size in extents[axis] for length in lengths(size, ranks)}
    classes: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for rank in range(mesh.size):
        place = mesh.coordinate(rank)
        key = tuple(
            tuple(part(size, ranks, place[axis])[1] for size in sorted(extents[axis]))
            for axis, ranks in mesh.axes
        )
        classes.setdefault(key, []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]
