"""Mutations of parallel programs, each modelled on a fault that occurred before.

Program mutations map a frozen `Program` to another one; runtime faults patch the runtime during a
test. A mutant that computes the same gives its reason in `equivalent` and must pass the check; all
others must fail it.
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

# Redistributions that are easily confused: same forward and different backward, or no sum.
SAME_FORWARD = {
    "rt.reduce": "rt.reduce_fanout",
    "rt.reduce_fanout": "rt.reduce",
    "rt.gather": "rt.gather_fanout",
    "rt.gather_fanout": "rt.gather",
    "rt.shard": "rt.take",
    "rt.take": "rt.shard",
}
OTHER_FORWARD = {
    "rt.reduce_scatter": "rt.shard",  # a partial sum treated as the full value
    "rt.as_partial": "rt.fanout",  # a bias added on every rank
    "rt.pad": "rt.gather",
    "rt.to_experts": "rt.to_tokens",
    "rt.to_tokens": "rt.to_experts",
}


@dataclass(frozen=True)
class Mutant:
    name: str
    program: Program
    equivalent: str | None = None  # why it computes the same, if it does


def move_mutants(program: Program) -> Iterator[Mutant]:
    """Yield the program without each redistribution, and with each replaced by a similar one."""
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
    """Return why a redistribution with a different backward changes nothing, if so."""
    first = program.rank_programs[0]
    if first.values[step.inputs[0]].value not in first.carries_grad:
        return "no gradient flows through it"
    return None


def why_droppable(program: Program, step: Step) -> str | None:
    """Return why dropping a redistribution changes nothing, if so."""
    first = program.rank_programs[0]
    value = first.values[step.inputs[0]].value
    if step.fn == "rt.fanout" and value not in first.carries_grad:
        return "no gradient flows through it, and its forward does nothing"
    used = {name for s in (*first.steps, *first.output_steps) for name in s.inputs}
    used |= {first.loss or "", *(name for _, name in first.mutations)}
    return None if step.outputs[0] in used else "nothing uses it"


# ------------------------------------------------ single steps, in all rank programs


def change_ranks(program: Program, change: Callable[[RankProgram], RankProgram]) -> Program:
    return replace(program, rank_programs=tuple(change(p) for p in program.rank_programs))


def change_step(program: Program, index: int, **fields: Any) -> Program:
    def change(ranks: RankProgram) -> RankProgram:
        steps = list(ranks.steps)
        steps[index] = replace(steps[index], **fields)
        return replace(ranks, steps=tuple(steps))

    return change_ranks(program, change)


def drop_step(program: Program, index: int) -> Program:
    """Drop a redistribution: its users read its input."""

    def change(ranks: RankProgram) -> RankProgram:
        dropped = ranks.steps[index]
        old, new = dropped.outputs[0], dropped.inputs[0]

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

    return change_ranks(program, change)


def find_step(program: Program, fn: str) -> int:
    return next(i for i, s in enumerate(program.rank_programs[0].steps) if s.fn == fn)


def change_keyword(program: Program, fn: str, name: str, change: Callable[[Any], Any]) -> Program:
    """Change a keyword argument, such as a count, of the first step that calls `fn`."""
    index = find_step(program, fn)
    step = program.rank_programs[0].steps[index]
    kwargs = tuple((k, change(v) if k == name else v) for k, v in step.kwargs)
    assert kwargs != step.kwargs
    return change_step(program, index, kwargs=kwargs)


def wrong_rows(program: Program) -> Program:
    """Let a vocabulary shard begin at the wrong row."""
    index = find_step(program, "rt.embedding_rows")
    args = program.rank_programs[0].steps[index].args
    return change_step(program, index, args=(*args[:3], args[3] + 2))


def untied(program: Program, name: str) -> Program:
    """Lose the gradient of a tied parameter's last use."""
    value = next(p.value for p in program.graph.parameters if name in (p.name, *p.aliases))

    def change(ranks: RankProgram) -> RankProgram:
        steps = list(ranks.steps)
        last = max(i for i, s in enumerate(steps) if value in s.inputs)
        detached = f"{value}_detached"
        args = map_refs(steps[last].args, lambda r: Ref(detached) if r.name == value else r)
        detach = replace(
            steps[last],
            outputs=(detached,),
            fn="aten.detach.default",
            args=(Ref(value),),
            kwargs=(),
        )
        steps[last : last + 1] = [
            replace(detach, needs=(), axes=()),
            replace(steps[last], args=args),
        ]
        values = {**ranks.values, detached: ranks.values[value]}
        return replace(ranks, steps=tuple(steps), values=values)

    return change_ranks(program, change)


def stale_buffers(program: Program) -> Program:
    return change_ranks(program, lambda ranks: replace(ranks, mutations=()))


def change_storage(program: Program, name: str, **fields: Any) -> Program:
    def change(ranks: RankProgram) -> RankProgram:
        assert any(s.name == name for s in ranks.parameters), name
        storages = tuple(replace(s, **fields) if s.name == name else s for s in ranks.parameters)
        return replace(ranks, parameters=storages)

    return change_ranks(program, change)


def unsynced(program: Program, name: str) -> Program:
    """Do not sum the gradient of a parameter over ranks."""
    return change_storage(program, name, sync=(), zero=0)


def contiguous_shard(program: Program, name: str, axis: str) -> Program:
    """Shard a fused dim into plain ranges instead of by heads: same sizes, different rows."""
    storage = next(s for s in program.rank_programs[0].parameters if s.name == name)
    shard = storage.layout[axis]
    assert isinstance(shard, Shard)
    assert shard.of[0][0] > 1
    plain = Shard(shard.dim, ((1, storage.shape[shard.dim], 1),))
    return change_storage(program, name, layout=Layout(((axis, plain),)))


# ------------------------------------------------ faults of the runtime


def average_gradients(patch: pytest.MonkeyPatch) -> None:
    """Average gradients over ranks, as if each rank had a separate loss."""
    launch = reducer.Reduction.launch

    def averaged(self: reducer.Reduction) -> None:
        for entry in self.entries:
            if entry.leaf.grad is not None:
                entry.leaf.grad = entry.leaf.grad / self.axis.size
        launch(self)

    patch.setattr(reducer.Reduction, "launch", averaged)


def skip_last_bucket(patch: pytest.MonkeyPatch) -> None:
    """Never reduce the last, partly filled bucket."""
    form = reducer.Reducer._form

    def formed(self: reducer.Reducer, entries: list[Any]) -> list[reducer.Reduction]:
        reductions = form(self, entries)
        if reductions:
            last = reductions[-1]
            patch.setattr(last, "launch", lambda: setattr(last, "launched", True), raising=False)
            patch.setattr(last, "finish", lambda: None, raising=False)
        return reductions

    patch.setattr(flat, "BUCKET_BYTES", 1 << 12)
    patch.setattr(reducer.Reducer, "_form", formed)


def swap_shards(patch: pytest.MonkeyPatch, name: str, axis: str) -> None:
    """Let the ranks of an axis load each other's shard of one parameter."""
    load_rows = store.ParameterStore.load_rows

    def swapped(self: store.ParameterStore, loaded: str, begin: int, rows: torch.Tensor) -> None:
        coordinates = self.mesh.coordinates
        if loaded == name:
            self.mesh.coordinates = {
                **coordinates,
                axis: self.mesh.axes[axis] - 1 - coordinates[axis],
            }
        load_rows(self, loaded, begin, rows)
        self.mesh.coordinates = coordinates

    patch.setattr(store.ParameterStore, "load_rows", swapped)
