"""A model with its repeated layers folded: the small graph of its distinct nodes.

Costs and decisions are computed on the small graph; `order` maps every position of the model to the
node of the small graph that represents it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby

import numpy as np

from shardwise.arrays import Floats, Ints
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph, node_keys
from shardwise.ir.blocks import ConstraintKey, fold_blocks, node_blocks

GONE = -1  # marks a position that no node of the small graph represents


@dataclass(frozen=True, kw_only=True)
class FoldedGraph:
    """A model of `len(order)` nodes, of which `graph` has one or two of every kind of block."""

    graph: Graph
    order: tuple[int, ...]  # position in the model -> index of a node of `graph`, or GONE
    places: tuple[str, ...]  # position -> the node's place, as stages of a plan name it
    blocks: tuple[str, ...]  # position -> the block it is in, "" outside of all

    @staticmethod
    def of(
        graph: Graph, keep: Collection[str] = (), constraint_key: ConstraintKey | None = None
    ) -> FoldedGraph:
        """Fold a full graph; see `drop_blocks` for `keep` and `constraint_key`."""
        small, _, representatives = fold_blocks(graph, keep, constraint_key)
        index = {node.name: i for i, node in enumerate(small.nodes)}
        keys = node_keys(graph)
        return FoldedGraph(
            graph=small,
            order=tuple(index.get(representatives.get(n.name, n.name), GONE) for n in graph.nodes),
            places=tuple(keys[n.name] for n in graph.nodes),
            blocks=_blocks(graph),
        )

    @staticmethod
    def repeated(graph: Graph, layers: int) -> FoldedGraph:
        """Return a model of `layers` equal blocks, given a graph with the first two or more."""
        blocks = _blocks(graph)
        paths = list(dict.fromkeys(path for path in blocks if path))
        if not paths or layers < 1:
            raise ShardwiseError(
                f"cannot make {layers} layers of the {len(paths)} blocks of {graph.name}",
                hint="numbered modules are blocks: nn.ModuleList",
            )
        at = {path: [i for i, b in enumerate(blocks) if b == path] for path in paths}
        parent = paths[0].rpartition(".")[0]
        first, last = at[paths[0]][0], at[paths[-1]][-1]
        keys = list(node_keys(graph).values())
        order, names, places = list(range(first)), list(blocks[:first]), keys[:first]
        for layer in range(layers):
            path = f"{parent}.{layer}" if parent else str(layer)
            model = paths[min(layer, len(paths) - 1)]
            order += at[model]
            names += [path] * len(at[model])
            places += [keys[i].replace(model, path, 1) for i in at[model]]
        after = range(last + 1, len(graph.nodes))
        return FoldedGraph(
            graph=graph,
            order=(*order, *after),
            places=(*places, *(keys[i] for i in after)),
            blocks=(*names, *(blocks[i] for i in after)),
        )

    @property
    def size(self) -> int:
        """The number of positions."""
        return len(self.order)

    @cached_property
    def index(self) -> Ints:
        """`order` as an array, in which `GONE` points behind the last node."""
        order = np.array(self.order, dtype=np.int64)
        return np.where(order == GONE, len(self.graph.nodes), order)

    @cached_property
    def copies(self) -> Ints:
        """The number of positions that each node of the small graph represents."""
        count = len(self.graph.nodes)
        return np.bincount(self.index, minlength=count + 1)[:count]

    @cached_property
    def _runs(self) -> tuple[list[tuple[str, int, int]], list[int]]:
        lengths = [(block, len(list(run))) for block, run in groupby(self.blocks)]
        starts = list(accumulate((length for _, length in lengths), initial=0))
        runs = [(b, first, first + n) for (b, n), first in zip(lengths, starts, strict=False)]
        return runs, starts[:-1]

    def runs(self, first: int, end: int) -> list[tuple[str, int, int]]:
        """Return the units of positions `first:end`: maximal runs in one block."""
        runs, starts = self._runs
        low, high = bisect_right(starts, first) - 1, bisect_left(starts, end)
        return [(name, max(a, first), min(b, end)) for name, a, b in runs[low:high]]

    def parameter_uses(self, graph: Graph) -> dict[str, tuple[int, str]]:
        """Return the first position that uses each parameter, and its name in the small graph.

        `graph` is the full model.
        """
        names = {p.value: p.name for p in self.graph.parameters}
        parameters = {p.value for p in graph.parameters}
        uses: dict[str, tuple[int, str]] = {}
        for position, (node, index) in enumerate(zip(graph.nodes, self.order, strict=True)):
            if index != GONE:
                for value, other in zip(node.inputs, self.graph.nodes[index].inputs, strict=True):
                    if value in parameters and other in names:
                        uses.setdefault(value, (position, names[other]))
        return uses

    def spread(self, values: Floats) -> Floats:
        """Return an array of the small graph's nodes at every position of the model."""
        return np.append(values, 0.0)[self.index]


def _blocks(graph: Graph) -> tuple[str, ...]:
    return tuple(path or "" for path in node_blocks(graph.nodes))
