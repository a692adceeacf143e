"""Ways to break a parallel program, each a fault that has been made before.

Program mutations take and give a frozen `Program`; runtime faults patch the runtime while a test
runs. `why_equivalent` says which mutants compute the same: those must pass the check, all others
fail it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from shardwise.ir import Ref, map_refs
from shardwise.program import Program, RankProgram, Step
from shardwise.runtime import grad_sync as reducer
from shardwise.runtime import parameters as flat
from shardwise.runtime import store
from shardwise.sharding.placements import Layout, Shard

# Moves that look alike: the same forward and another backward, or a sum left out.
SAME_FORWARD = {
    "rt.reduce": "rt.reduce_fanout",
    "rt.reduce_fanout": "rt.reduce",
    "rt.gather": "rt.gather_fanout",
    "rt.gather_fanout": "rt.gather",
    "rt.shard": "rt.take",
    "rt.take": "rt.shard",
}
OTHER_FORWARD = {
    "rt.reduce_scatter": "rt.shard",  # a partial sum taken for a whole value
    "rt.as_partial": "rt.fanout",  # a bias added on every rank
    "rt.pad": "rt.gather",
}


@dataclass(frozen=True)
class Mutant:
    name: str
    program: Program
    equivalent: str | None = None  # why it computes the same, if it does


def move_mutants(program: Program) -> Iterator[Mutant]:
    """Every move left out, and every move replaced by one that looks alike."""
    for index, step in enumerate(program.rank_programs[0].steps):
        if not step.is_move:
            continue
        label = f"{index} {step.fn} of %{step.inputs[0]} over {'.'.join(step.axes)}"
        yield Mutant(f"drop {label}", drop_step(program, index), why_droppable(program, step))
        for table in (SAME_FORWARD, OTHER_FORWARD):
            other = table.get(step.fn)
            if other is not None and "op" not in dict(step.kwargs):
                broken = change_step(program, index, fn=other)
                reason = why_same(program, step) if table is SAME_FORWARD else None
                yield Mutant(f"{label} as {other}", broken, reason)


def why_same(program: Program, step: Step) -> str | None:
    """When a move with the same forward and another backward changes nothing."""
    first = program.rank_programs[0]
    if first.values[step.inputs[0]].value not in first.carries_grad:
        return "no gradient flows through it"
    return None


def why_droppable(program: Program, step: Step) -> str | None:
    """When leaving a move out changes nothing."""
    first = program.rank_programs[0]
    value = first.values[step.inputs[0]].value
    if step.fn == "rt.fanout" and value not in first.carries_grad:
        return "no gradient flows through it, and its forward does nothing"
    used = {name for s in (*first.steps, *first.output_steps) for name in s.inputs}
    used |= {first.loss or "", *(name for _, name in first.mutations)}
    return None if step.outputs[0] in used else "nothing uses it"


# ------------------------------------------------ single steps, in all rank programs


def each(program: Program, change: Callable[[RankProgram], RankProgram]) -> Program:
    return replace(program, rank_programs=tuple(change(p) for p in program.rank_programs))


def change_step(program: Program, index: int, **fields: Any) -> Program:
    def change(ranks: RankProgram) -> RankProgram:
        steps = list(ranks.steps)
        steps[index] = replace(steps[index], **fields)
        return replace(ranks, steps=tuple(steps))

    return each(program, change)


def drop_step(program: Program, index: int) -> Program:
    """Leave a move out: its uses take what it was given."""

    def change(ranks: RankProgram) -> RankProgram:
        gone = ranks.steps[index]
        old, new = gone.outputs[0], gone.inputs[0]

        def renamed(arg: Any) -> Any:
            return map_refs(arg, lambda ref: Ref(new) if ref.name == old else ref)

        def step(s: Step) -> Step:
            return replace(s, args=renamed(s.args), kwargs=renamed(s.kwargs))

        return replace(
            ranks,
            steps=tuple(step(s) for i, s in enumerate(ranks.steps) if i != index),
            output_steps=tuple(step(s) for s in ranks.output_steps),
            outputs=renamed(ranks.outputs),
            loss=new if ranks.loss == old else ranks.loss,
            mutations=tuple((n, new if v == old else v) for n, v in ranks.mutations),
        )

    return each(program, change)


def find_step(program: Program, fn: str) -> int:
    return next(i for i, s in enumerate(program.rank_programs[0].steps) if s.fn == fn)


def change_keyword(program: Program, fn: str, name: str, change: Callable[[Any], Any]) -> Program:
    """Another value of a keyword of the first step that calls `fn`: a wrong count, a wrong size."""
    index = find_step(program, fn)
    step = program.rank_programs[0].steps[index]
    kwargs = tuple((k, change(v) if k == name else v) for k, v in step.kwargs)
    assert kwargs != step.kwargs
    return change_step(program, index, kwargs=kwargs)


def wrong_rows(program: Program) -> Program:
    """A vocabulary shard that begins at the wrong row."""
    index = find_step(program, "rt.embedding_rows")
    args = program.rank_programs[0].steps[index].args
    return change_step(program, index, args=(*args[:3], args[3] + 2))


def untied(program: Program, name: str) -> Program:
    """The gradient of a tied parameter's last use is lost."""
    value = next(p.value for p in program.graph.parameters if name in (p.name, *p.aliases))

    def change(ranks: RankProgram) -> RankProgram:
        steps = list(ranks.steps)
        last = max(i for i, s in enumerate(steps) if value in s.inputs)
        cut = f"{value}_cut"
        args = map_refs(steps[last].args, lambda r: Ref(cut) if r.name == value else r)
        detach = replace(
            steps[last], outputs=(cut,), fn="aten.detach.default", args=(Ref(value),), kwargs=()
        )
        steps[last : last + 1] = [
            replace(detach, needs=(), axes=()),
            replace(steps[last], args=args),
        ]
        values = {**ranks.values, cut: ranks.values[value]}
        return replace(ranks, steps=tuple(steps), values=values)

    return each(program, change)


def stale_buffers(program: Program) -> Program:
    return each(program, lambda ranks: replace(ranks, mutations=()))


def change_storage(program: Program, name: str, **fields: Any) -> Program:
    def change(ranks: RankProgram) -> RankProgram:
        assert any(s.name == name for s in ranks.parameters), name
        found = tuple(replace(s, **fields) if s.name == name else s for s in ranks.parameters)
        return replace(ranks, parameters=found)

    return each(program, change)


def unsynced(program: Program, name: str) -> Program:
    """A parameter whose gradient nobody sums."""
    return change_storage(program, name, sync=(), zero=0)


def contiguous_shard(program: Program, name: str, axis: str) -> Program:
    """A fused dim cut into plain ranges instead of by heads: the same sizes, other rows."""
    storage = next(s for s in program.rank_programs[0].parameters if s.name == name)
    shard = storage.layout[axis]
    assert isinstance(shard, Shard)
    assert shard.of[0][0] > 1
    plain = Shard(shard.dim, ((1, storage.shape[shard.dim], 1),))
    return change_storage(program, name, layout=Layout(((axis, plain),)))


# ------------------------------------------------ faults of the runtime


def average_gradients(patch: pytest.MonkeyPatch) -> None:
    """Gradients are averaged over ranks, as if each had a loss of its own."""
    launch = reducer.Reduction.launch

    def averaged(self: reducer.Reduction) -> None:
        for entry in self.entries:
            if entry.leaf.grad is not None:
                entry.leaf.grad = entry.leaf.grad / self.axis.size
        launch(self)

    patch.setattr(reducer.Reduction, "launch", averaged)


def skip_last_bucket(patch: pytest.MonkeyPatch) -> None:
    """The last, partly filled bucket is never reduced."""
    form = reducer.Reducer._form

    def formed(self: reducer.Reducer, entries: list[Any]) -> list[reducer.Reduction]:
        found = form(self, entries)
        if found:
            last = found[-1]
            patch.setattr(last, "launch", lambda: setattr(last, "launched", True), raising=False)
            patch.setattr(last, "finish", lambda: None, raising=False)
        return found

    patch.setattr(flat, "FIRST_BUCKET_BYTES", 1 << 12)
    patch.setattr(flat, "BUCKET_BYTES", 1 << 12)
    patch.setattr(reducer.Reducer, "_form", formed)


def swap_shards(patch: pytest.MonkeyPatch, name: str, axis: str) -> None:
    """The ranks of an axis load each other's part of one parameter."""
    load_rows = store.ParameterStore.load_rows

    def swapped(self: store.ParameterStore, loaded: str, begin: int, rows: torch.Tensor) -> None:
        here = self.mesh.coordinates
        if loaded == name:
            self.mesh.coordinates = {**here, axis: self.mesh.axes[axis] - 1 - here[axis]}
        load_rows(self, loaded, begin, rows)
        self.mesh.coordinates = here

    patch.setattr(store.ParameterStore, "load_rows", swapped)
