"""Runs emitted source, a thread per rank, for one training step.

Enters: a `Program`, its sources, weights and inputs. Leaves: one `Outcome` per rank. What runs is
the emitted code with the runtime's own reducer and optimizer; only the transport is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from shardwise import runtime as rt
from shardwise.equivalence.reference import LEARNING_RATE
from shardwise.messages import MessageProgram, interpret
from shardwise.plans import Plan
from shardwise.program import Program
from shardwise.runtime.loader import build, load
from shardwise.runtime.transport.threads import Collective

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank has after a training step; full tensors, gathered from all."""

    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor | None]
    state_after: Mapping[str, torch.Tensor]
    borrowed: Mapping[str, torch.Tensor]  # copies of other stages' parameters, after the step


def run_ranks(
    program: Program,
    sources: Sequence[str],
    state: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    *,
    timeout_s: float = TIMEOUT_S,
    records: Sequence[rt.Records] | None = None,
) -> list[Outcome]:
    """One training step of every rank, in threads; `records` collects what probes see."""
    modules = [load(source, program.graph.functions) for source in sources]
    by_rank = {
        rank: module
        for module, ranks in zip(modules, program.rank_programs, strict=True)
        for rank in ranks.ranks
    }

    def run(rank: int, transport: Any) -> Outcome:
        mesh = rt.ProcessMesh(dict(program.mesh.axes), rank, transport)
        if records is None:
            return _train_once(by_rank[rank], mesh, program, state, inputs)
        with rt.recording(records[rank]):
            return _train_once(by_rank[rank], mesh, program, state, inputs)

    collective = along_trees(program.plan)
    return rt.run_threads(program.mesh.size, run, timeout_s=timeout_s, collective=collective)


def along_trees(plan: Plan) -> Collective | None:
    """Do the collectives for which a plan has trees as these say, whatever the size of the data."""
    trees = [replace(choice, min_bytes=0) for choice in plan.collectives if choice.has_trees]
    if not trees:
        return None
    from shardwise.collectives.derive import derive

    known: dict[object, MessageProgram | None] = {}

    def run(
        operation: str, ranks: tuple[int, ...], inputs: list[torch.Tensor], counts: tuple[int, ...]
    ) -> list[torch.Tensor] | None:
        chosen = [c for c in trees if c.operation == operation and ranks in c.groups]
        numel = sum(counts) if counts else inputs[0].numel()
        if not chosen or not numel or inputs[0].dtype != torch.float64:
            return None
        key = (operation, ranks, numel, counts)
        if key not in known:
            known[key] = derive(chosen[0], ranks, numel, inputs[0].element_size(), counts)
        program = known[key]
        if program is None:
            return None
        results = interpret(program, [tensor.numpy() for tensor in inputs])
        return [torch.from_numpy(result) for result in results]

    return run


def _train_once(
    generated: Any,
    mesh: rt.ProcessMesh,
    program: Program,
    state: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
) -> Outcome:
    rng = rt.Rng(program.plan.seed, program.plan.rng, mesh)
    module = build(generated, mesh, rng, "cpu", program.graph)
    store = rt.ParameterStore(module, mesh, generated.PARAMETERS, generated.BUFFERS)
    store.load_with(lambda name: state[name])
    local = [
        rt.take_local(inputs[name], splits, mesh.coordinates, mesh.axes)
        for name, splits in generated.INPUTS.items()
    ]
    with rt.hooked(store, program.graph.hooks), store.step():
        with store.forward():
            loss, outputs = module(*local, outputs=True)
        with store.backward(last=True):
            loss.backward()
    return step_outcome(store, loss, outputs)


def step_outcome(store: rt.ParameterStore, loss: torch.Tensor, outputs: Sequence[Any]) -> Outcome:
    """What is there after backward, and after an AdamW step."""
    gradients = rt.share(store.mesh, store.gather_gradients())
    holder = SimpleNamespace(store=store)
    rt.optimizer(holder, torch.optim.AdamW, lr=LEARNING_RATE).step()
    after: dict[str, Any] = dict(store.gather_state_dict())
    after |= {name: buffer.clone() for name, buffer in store.buffers.items()}
    shared = rt.share(store.mesh, after)
    after = {name: tensor for name, tensor in shared.items() if tensor is not None}
    borrowed = {
        e.spec.name: store.gather_full(e, store.local_value(e), piece=False)
        for e in store.entries
        if e.spec.borrowed
    }
    return Outcome(
        loss=loss.detach(),
        outputs=tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outputs),
        gradients=gradients,
        state_after=after,
        borrowed=borrowed,
    )
