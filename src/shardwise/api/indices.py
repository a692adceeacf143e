"""Token ids, labels and other indices of a batch, checked before a step begins.

Enters: a `Graph`. Leaves: a check of whole batches. Every rank has the whole batch and finds the
same mistake, so that all raise together and none is left waiting in a collective; a rank's own
operators would only see its rows. Indices that are computed from other things than integers of
the batch are checked by the operators that use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise import runtime as rt
from shardwise.errors import BatchError
from shardwise.ir import Graph, Node, Ref
from shardwise.ir.interpret import interpret, is_random
from shardwise.ir.schema import bind, indexed_dim, op_name
from shardwise.program.beforehand import restrict

LONGEST = 12  # operators between the batch and an index; longer chains cost more than they save
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexUse:
    """A value of the graph as an index: what it may hold, who uses it, where it comes from."""

    value: str
    low: int
    size: int
    ignored: int | None
    operator: str
    origin: str
    sources: tuple[str, ...]  # inputs of the batch

    def check(self, indices: Tensor) -> None:
        """Raise a `BatchError` if an index is out of range."""
        names = " and ".join(self.sources)
        try:
            rt.require_in_range(
                indices,
                self.size,
                f"{self.operator} of {names}",
                low=self.low,
                ignored=self.ignored,
            )
        except BatchError as error:
            raise BatchError(
                error.message, where=f"{names}, used in {self.origin}", hint=error.hint
            ) from None


class BatchIndices:
    """Checks the integers of whole batches against what a graph indexes with them."""

    def __init__(self, graph: Graph) -> None:
        found: dict[tuple[str, int, int, int | None], IndexUse] = {}
        for use in _uses(graph):
            found.setdefault((use.value, use.low, use.size, use.ignored), use)
        self.uses = tuple(found.values())
        self.part = restrict(graph, tuple({use.value: None for use in self.uses}))

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise a `BatchError` if an index in the batch's tensors is out of range."""
        if not self.uses:
            return
        with torch.no_grad():
            values = interpret(self.part, {}, {}, inputs)
            for use in self.uses:
                use.check(values[use.value])


def _uses(graph: Graph) -> Iterator[IndexUse]:
    """Uses of integers that follow from the batch alone, in a few steps."""
    producers = graph.producers
    inputs = {i.value: i.name for i in graph.inputs}
    constants = {c.value for c in graph.constants}
    for node in graph.nodes:
        for value, low, size, ignored in _indices(graph, node):
            sources: list[str] = []
            pending, nodes = [value], 0
            while pending and nodes <= LONGEST:
                name = pending.pop()
                maker = producers.get(name)
                if graph.values[name].dtype.is_floating_point:
                    break
                if name in inputs:
                    sources.append(inputs[name])
                elif maker is not None and not is_random(maker):
                    nodes += 1
                    pending += maker.inputs
                elif name not in constants:
                    break
            else:
                if sources and nodes <= LONGEST:
                    yield IndexUse(
                        value=value,
                        low=low,
                        size=size,
                        ignored=ignored,
                        operator=op_name(node),
                        origin=node.origin,
                        sources=tuple(sorted(set(sources))),
                    )


def _indices(graph: Graph, node: Node) -> Iterator[tuple[str, int, int, int | None]]:
    """The values that a node takes as indices: the least, how many there are, what is ignored."""
    for name in dict.fromkeys(node.inputs):
        if graph.values[name].dtype in (torch.bool, torch.uint8):
            continue
        table = indexed_dim(node, name)
        if table is not None:
            shape = graph.values[table[0]].shape
            if shape:
                size = shape[table[1]]
                yield name, -size if op_name(node) == "index" else 0, size, None
    given = bind(node) if op_name(node) in (*_LOSSES, "one_hot") else {}
    if op_name(node) == "one_hot" and given.get("num_classes", -1) > 0:
        yield given["self"].name, 0, given["num_classes"], None
    elif op_name(node) in _LOSSES and isinstance(given["target"], Ref):
        target = given["target"].name
        if not graph.values[target].dtype.is_floating_point:
            scores = graph.values[given["self"].name].shape
            size = scores[1 if len(scores) > 1 else 0]
            yield target, 0, size, given.get("ignore_index", -100)
