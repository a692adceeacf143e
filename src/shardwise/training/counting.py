"""What a batch weighs: the number that its mean loss was divided by, its tokens, its flops.

Enters: a captured graph. Leaves: numbers and functions of a batch. The mean over an evaluation is
exact because each batch counts by its own denominator, which the graph knows: the labels that are
not ignored, the sum of a mask, or the elements of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.ir import Graph, Node, Ref, TensorType
from shardwise.ir.interpret import interpret
from shardwise.layouts.microbatch_axis import values_of_inputs
from shardwise.program.beforehand import restrict
from shardwise.program.means import separate_means
from shardwise.simulation.works import batch_rows

__all__ = ["LossWeight", "count_flops", "count_tokens"]

CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.clone.default", "aten.alias.default")


class LossWeight:
    """What the loss of one kind of batch is divided by: a number, or a function of some inputs."""

    def __init__(self, graph: Graph) -> None:
        parts = separate_means(graph)
        self._found = _denominator(parts)
        self._graph = restrict(parts, (self._found,)) if isinstance(self._found, str) else None
        self.rows = float(batch_rows(graph))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that it depends on."""
        return () if self._graph is None else tuple(i.name for i in self._graph.inputs)

    def of(self, inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> float:
        """The weight of a whole batch; a loss that is no mean counts by its rows."""
        if self._graph is None:
            return float(self._found) if isinstance(self._found, float) else self.rows
        wanted = {b.name for b in self._graph.buffers}
        held = {name: value.cpu() for name, value in buffers.items() if name in wanted}
        if wanted - set(held):  # another pipeline stage has it
            return self.rows
        assert isinstance(self._found, str)
        return float(interpret(self._graph, {}, held, inputs)[self._found])


def _denominator(graph: Graph) -> str | float | None:
    """The value that the loss is divided by, or its constant; None where the loss is no mean."""
    made: dict[str, Node] = {name: node for node in graph.nodes for name in node.outputs}
    known, loss = values_of_inputs(graph), graph.loss
    while loss in made and made[loss].op in CASTS:
        loss = made[loss].inputs[0]
    node = made.get(loss or "")
    if node is None:
        return None
    if node.op in ("aten.mean.default", "aten.mse_loss.default", "aten.l1_loss.default"):
        return float(max(graph.values[name].numel for name in node.inputs))
    if node.op != "aten.div.Tensor":
        return None
    by = node.args[1]
    if isinstance(by, Ref):
        scalar = graph.values[by.name].numel == 1
        return by.name if scalar and by.name in known else None
    return float(by)


def count_tokens(graph: Graph) -> int | None:
    """The elements of the first input that is a matrix of whole numbers."""
    for source in graph.inputs:
        kind = graph.values[source.value]
        whole = not kind.dtype.is_floating_point and not kind.dtype.is_complex
        if whole and kind.dtype.itemsize > 1 and len(kind.shape) == 2:
            return math.prod(kind.shape)
    return None


def count_flops(graph: Graph) -> float | None:
    """The flops of products in a step's forward and backward, without any computed again.

    None where the graph cannot be run without data.
    """
    meta: Callable[[str], Tensor] = lambda name: _empty(graph.values[name])  # noqa: E731
    trained = {p.name: meta(p.value).requires_grad_(p.requires_grad) for p in graph.parameters}
    buffers = {b.name: meta(b.value) for b in graph.buffers}
    inputs = {i.name: meta(i.value) for i in graph.inputs}
    counter: Any = FlopCounterMode(display=False)
    try:
        with counter, torch.device("meta"):
            values = interpret(graph, trained, buffers, inputs)
            if graph.loss is not None and values[graph.loss].requires_grad:
                values[graph.loss].backward()  # type: ignore[no-untyped-call]
    except Exception:
        return None
    return float(counter.get_total_flops()) or None


def _empty(kind: TensorType) -> Tensor:
    return torch.empty(kind.shape, dtype=kind.dtype, device="meta")
