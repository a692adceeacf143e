"""Runs an emitted program, a thread per rank, and compares it with the model.

Enters: a `Program` and a `Reference`. Leaves: a `Certificate`. What runs is the emitted code with the
runtime's own reducer and optimizer; only the transport is in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shardwise import runtime as rt
from shardwise.emit import emit, load
from shardwise.equivalence.certificate import Certificate, Comparison, compare
from shardwise.equivalence.reference import LEARNING_RATE, Reference
from shardwise.errors import ShardwiseError
from shardwise.frontend.batch import flatten_batch
from shardwise.program import Program

TIMEOUT_S = 60.0
NEGLIGIBLE = 1e-4  # of the largest gradient: smaller ones are measured against this


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the ranks computed; equal on all of them where `ranks_agree`."""

    loss: torch.Tensor
    outputs: tuple[Any, ...]
    gradients: Mapping[str, torch.Tensor | None]
    state_after: Mapping[str, torch.Tensor]


def check(
    program: Program,
    reference: Reference,
    batch: Any,
    *,
    sources: Sequence[str] | None = None,
    timeout: float = TIMEOUT_S,
) -> Certificate:
    """Run the program and compare everything a training step leaves behind.

    `sources` replaces the emitted text of each rank program, for code that was edited by hand.
    """
    texts = list(sources or (emit(program, p.ranks[0]) for p in program.rank_programs))
    comparisons: list[Comparison] = []
    try:
        outcomes = run_ranks(program, texts, reference.state, batch, timeout)
    except ShardwiseError as error:
        comparisons.append(Comparison("the run", float("inf"), str(error)))
    except Exception as error:
        comparisons.append(Comparison("the run", float("inf"), f"{type(error).__name__}: {error}"))
    else:
        comparisons += compare_outcome(program, outcomes[0], reference)
        comparisons += _agreement(outcomes)
    return Certificate(
        plan=program.plan.name,
        model=program.graph.name,
        mesh=str(program.mesh),
        comparisons=tuple(comparisons),
    )


def run_ranks(
    program: Program,
    sources: Sequence[str],
    state: Mapping[str, torch.Tensor],
    batch: Any,
    timeout: float = TIMEOUT_S,
) -> list[Outcome]:
    """One training step of every rank, in threads."""
    inputs, _ = flatten_batch(batch)
    modules = [load(source, program.graph.functions) for source in sources]
    by_rank = {
        rank: module
        for module, ranks in zip(modules, program.rank_programs, strict=True)
        for rank in ranks.ranks
    }
    constants = {c.value: c.data for c in program.graph.constants}

    def run(rank: int, transport: Any) -> Outcome:
        mesh = rt.ProcessMesh(dict(program.mesh.axes), rank, transport)
        return _train_once(by_rank[rank], mesh, program, constants, state, inputs)

    return rt.run_threads(program.mesh.size, run, timeout=timeout)


def _train_once(
    generated: Any,
    mesh: rt.ProcessMesh,
    program: Program,
    constants: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
) -> Outcome:
    rng = rt.Rng(program.plan.seed, program.plan.rng, mesh) if hasattr(rt, 'Rng') else None
    module = build(generated, mesh, rng, "cpu", constants)
    store = rt.ParameterStore(module, mesh, generated.PARAMETERS, generated.BUFFERS)
    store.load_with(lambda name: state[name])
    local = [
        rt.take_local(inputs[name], splits, mesh.coordinates, mesh.axes)
        for name, splits in generated.INPUTS.items()
    ]
    with store.step():
        loss, outputs = module(*local, outputs=True)
        loss.backward()
    gradients = store.gather_gradients()
    optimizer = rt.optimizer(SimpleNamespace(store=store), torch.optim.AdamW, lr=LEARNING_RATE)
    optimizer.step()
    after = store.gather_state_dict()
    after |= {name: buffer.clone() for name, buffer in store.buffers.items()}
    return Outcome(
        loss=loss.detach(),
        outputs=tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in outputs),
        gradients=gradients,
        state_after=after,
    )


def build(
    generated: Any, mesh: rt.ProcessMesh, rng: Any, device: Any, constants: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """The generated module; constants are passed where it takes some."""
    takes = "constants" in generated.Model.__init__.__code__.co_varnames
    extra = {"constants": constants} if takes else {}
    module: torch.nn.Module = generated.Model(mesh, rng, device, **extra)
    return module


def compare_outcome(program: Program, found: Outcome, expected: Reference) -> list[Comparison]:
    """Loss, outputs, every gradient, parameters and buffers after the step."""
    result = [compare("loss", found.loss.reshape(()), expected.loss.reshape(()))]
    for index, (a, b) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
        if isinstance(b, torch.Tensor):
            result.append(compare(f"output of leaf {index}", a, b))
        elif a != b:
            result.append(Comparison(f"output of leaf {index}", float("inf"), f"{a!r} != {b!r}"))
    sizes = [g.abs().max().item() for g in expected.gradients.values() if g is not None and g.numel()]
    floor = NEGLIGIBLE * max(sizes, default=0.0)
    for name, gradient in expected.gradients.items():
        mine = found.gradients.get(name)
        result.append(compare(f"gradient of {name}", mine, gradient, floor=floor))
    for name in sorted(set(found.gradients) - set(expected.gradients)):
        result.append(Comparison(f"gradient of {name}", float("inf"), "no such parameter"))
    for name, tensor in expected.state_after.items():
        trained = name in expected.gradients
        what = f"{'parameter' if trained else 'buffer'} of {name} after a step"
        floor = LEARNING_RATE if trained else 0.0  # how far a step can move a parameter
        result.append(compare(what, found.state_after[name], tensor, floor=floor))
    return result


def _agreement(outcomes: Sequence[Outcome]) -> list[Comparison]:
    """All ranks must report the same loss."""
    first = outcomes[0].loss
    return [
        compare(f"loss of rank {rank}", outcome.loss, first)
        for rank, outcome in enumerate(outcomes)
        if rank
    ]
