"""What a stack that computes products in float8 does differently.

Enters: the `Workload` of a model in bfloat16. Leaves: the same with the products of its layers in
float8, as Transformer Engine has them on Hopper: every operand is converted, and copied once more
with its columns as rows, for the gradient of the weight. Norms write float8 themselves, and what
is gathered is converted before. The last product and all sums stay wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.cost.kernels import MEMORY, Kernel
from shardwise.ir import Graph
from shardwise.simulation.work import FORWARD, WEIGHT, Launch, NodeCollective, Workload

FLOAT8 = "float8_e4m3fn"
# Of an element: read in bfloat16 and written twice; or read in float8 and written once.
_CONVERTED_BYTES = 2 + 1 + 1
_COPIED_BYTES = 1 + 1


class Float8:
    """How the products of a graph's layers change; `blocks` names each node's layer, or ""."""

    def __init__(self, graph: Graph, blocks: tuple[str, ...], gathered: int | None) -> None:
        self.graph, self.blocks = graph, blocks
        self.gathered = gathered  # columns of gradients that are gathered, if any are
        self.norms = {node.name for node in graph.nodes if "norm" in node.op}

    def change(self, work: Workload) -> Workload:
        """Return the work in float8."""
        converted: set[str] = set()
        return replace(
            work,
            launches=tuple(new for old in work.launches for new in self._launches(old, converted)),
            collectives=tuple(_talk(talk) for talk in work.collectives),
        )

    def _launches(self, launch: Launch, converted: set[str]) -> Iterator[Launch]:
        kernel = launch.kernel
        if kernel.kind != "matmul" or kernel.shape[0] > 1 or not self.blocks[launch.node]:
            yield launch
            return
        num_bytes = self._converted_bytes(launch, converted)
        if num_bytes:
            yield replace(launch, kernel=_conversion(kernel, num_bytes), product=False)
        _, m, n, k = kernel.shape
        moved = float(m * k + k * n + 2 * m * n)
        yield replace(launch, kernel=replace(kernel, dtype=FLOAT8, bytes=moved))

    def _converted_bytes(self, launch: Launch, converted: set[str]) -> int:
        """What is read and written before the product; its weight is converted once a step."""
        _, rows, _, columns = launch.kernel.shape
        if launch.phase == WEIGHT:
            return 0  # the other two have converted both
        if launch.phase != FORWARD:
            only_copied = columns == self.gathered
        else:
            operand = self.graph.nodes[launch.node].inputs[0]
            if operand in converted:
                return 0
            converted.add(operand)
            only_copied = operand in self.norms
        return rows * columns * (_COPIED_BYTES if only_copied else _CONVERTED_BYTES)


def _conversion(product: Kernel, num_bytes: int) -> Kernel:
    _, rows, _, columns = product.shape
    return replace(
        product,
        op="to_float8",
        kind=MEMORY,
        flops=0.0,
        bytes=float(num_bytes),
        shape=(rows, columns),
    )


def _talk(talk: NodeCollective) -> NodeCollective:
    """Operands travel in float8; sums in the type of the model."""
    return replace(talk, num_bytes=talk.num_bytes / 2) if talk.op == "all_gather" else talk
