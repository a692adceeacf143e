"""The captured graph on one device: the reference of models that draw random numbers.

Random nodes draw by key from the same source as every rank's program. The run also gives every
value and its gradient (`Truth`), which the values of the program are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise import runtime as rt
from shardwise.batch import flatten_batch
from shardwise.equivalence.reference import LEARNING_RATE, Reference, join_outputs
from shardwise.equivalence.rounding import Jitter, jittered
from shardwise.ir import Graph, Node, Ref, map_refs, node_keys
from shardwise.ir.interpret import interpret, is_random
from shardwise.plans import Plan
from shardwise.sharding.placements import Layout
from shardwise.sharding.registry import rule_for
from shardwise.sharding.rule import Call, Local

NOWHERE = Layout(())


def draws(graph: Graph) -> bool:
    """Whether the graph has nodes that draw random numbers."""
    return any(is_random(node) for node in graph.nodes)


def keyed_random(graph: Graph, rng: rt.Rng) -> Callable[..., Any]:
    """For `interpret(random=…)`: runs a random node as one rank would, keyed by its place."""
    keys = node_keys(graph)

    def run(node: Node, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = Call.of(node, graph.values)
        found = rule_for(call)
        if found is None or found.localize is None:
            return function(*args, **kwargs)
        shapes = [graph.values[name].shape for name in node.outputs]
        local = Local(
            cuts={},
            operands=call.operands,
            results=tuple(shapes),
            result_layouts=tuple(NOWHERE for _ in shapes),
            operand_layouts=tuple(NOWHERE for _ in node.inputs),
            coordinate={},
        )
        written = found.localize(call, local)
        if not written.fn.startswith("rt."):
            return function(*args, **kwargs)
        given = dict(_pairs(node.args, args)) | dict(
            _pairs(tuple(v for _, v in node.kwargs), tuple(kwargs[k] for k, _ in node.kwargs))
        )
        bound = map_refs((written.args, written.kwargs), lambda ref: given[ref.name])
        options = dict(bound[1])
        if "key" in options:
            options |= {"key": keys[node.name], "rng": rng}
        return getattr(rt, written.fn.removeprefix("rt."))(*bound[0], **options)

    return run


def _pairs(names: Any, values: Any) -> list[tuple[str, torch.Tensor]]:
    """Value names with the tensors given for them."""
    if isinstance(names, Ref):
        return [(names.name, values)]
    if isinstance(names, tuple | list):
        return [p for n, v in zip(names, values, strict=True) for p in _pairs(n, v)]
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The graph's own values in its first micro-batch, and the gradients of the loss by them."""

    values: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


def run_graph_reference(
    graph: Graph,
    plan: Plan,
    state: Mapping[str, torch.Tensor],
    batch: Any,
    *,
    more: Sequence[Any] = (),
) -> Reference:
    """Forward, backward and one AdamW step of the graph itself, on one device."""
    batches = [flatten_batch(batch)[0] for batch in (batch, *more)]
    return run_graph(graph, plan, state, batches)[0]


def run_graph(
    graph: Graph,
    plan: Plan,
    state: Mapping[str, torch.Tensor],
    batches: Sequence[Mapping[str, torch.Tensor]],
    jitter: Jitter | None = None,
) -> tuple[Reference, Truth]:
    """One training step of the graph on one device, with every value of the first micro-batch."""
    if jitter is not None:
        state = {name: jitter.change(tensor.detach()) for name, tensor in state.items()}
        batches = [{n: jitter.change(t.detach()) for n, t in b.items()} for b in batches]
    parameters = {
        p.name: state[p.name].detach().clone().requires_grad_(p.requires_grad)
        for p in graph.parameters
    }
    buffers = {b.name: state[b.name].detach().clone() for b in graph.buffers}
    count = len(batches)
    mesh = rt.ProcessMesh({}, num_microbatches=count, timed=False)
    random = keyed_random(graph, rt.Rng(plan.seed, plan.rng, mesh))
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients: dict[str, torch.Tensor | None] = dict.fromkeys(parameters)
    truth: Truth | None = None
    assert graph.loss is not None
    losses, outputs = [], []
    for mesh.microbatch, inputs in enumerate(batches):
        with jittered(jitter):
            values = interpret(graph, parameters, buffers, inputs, random=random)
            loss = values[graph.loss] / count
            named = {n: v for n, v in values.items() if v.requires_grad and truth is None}
            targets = [*trained.values(), *named.values()]
            found = torch.autograd.grad(loss, targets, allow_unused=True)
        for name, gradient in zip(trained, found, strict=False):
            gradients[name] = _added(gradients[name], _dense(gradient))
        by_value = zip(named, found[len(trained) :], strict=True)
        truth = truth or Truth(
            values={n: v.detach() for n, v in values.items()},
            gradients={n: g for n, gradient in by_value if (g := _dense(gradient)) is not None},
        )
        losses.append(loss.detach())
        outputs.append([values[x.name] if isinstance(x, Ref) else x for x in graph.outputs])
        buffers = {b.name: values[b.mutation or b.value].detach() for b in graph.buffers}
    for hook in graph.hooks:
        known, held = gradients[hook.parameter], parameters[hook.parameter]
        if known is not None:
            gradients[hook.parameter] = hook.function(known.clone(), held.detach())
    after = {name: p.detach().clone() for name, p in parameters.items()}
    for name in trained:
        after[name].grad = gradients[name]
    if trained:
        torch.optim.AdamW([after[name] for name in trained], lr=LEARNING_RATE).step()
    after |= {name: value.clone() for name, value in buffers.items()}
    assert truth is not None
    reference = Reference(
        state=dict(state),
        loss=torch.stack(losses).sum(),
        outputs=tuple(join_outputs(leaf) for leaf in zip(*outputs, strict=True)),
        gradients=gradients,
        state_after=after,
        batches=tuple(batches),
    )
    return reference, truth


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _added(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b
