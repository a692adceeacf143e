"""Guards: values of the batch that Python looked at while a step was captured.

`if mask.all():` chooses the code that runs, so the captured graph is valid only for batches in
which the answer is the same. `Guards` has a small graph that computes these values from the inputs
of the full batch, and the answers. A batch is checked in the order in which Python asked: a later
value may be defined only if the earlier answers are the same.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.ir.graph import Buffer, Graph, Input, format_arg
from shardwise.ir.operators import run_nodes

Tensors = Mapping[str, torch.Tensor]


def _contents(tensor: torch.Tensor) -> Any:
    """Return the contents of a tensor as a number or nested tuples."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return frozen(tensor.tolist())


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": bool,
    "int": int,
    "contents": _contents,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A question that Python asked about a value, and the answer for which the graph is valid."""

    value: str  # in the graph of the guards
    question: str  # a key of `QUESTIONS`
    answer: Any  # a number or nested tuples of numbers
    source: str  # the user's line: "model.py:41: if mask.all():"

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the answer is still the same; NaN equals NaN."""
        return repr(QUESTIONS[self.question](tensor)) == repr(self.answer)

    def __str__(self) -> str:
        return f"{self.question}(%{self.value}) is {format_arg(self.answer)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """The guards of a captured step, and the graph that computes their values."""

    graph: Graph
    checks: tuple[Guard, ...]

    def __len__(self) -> int:
        return len(self.checks)

    @property
    def sources(self) -> frozenset[str]:
        """Return the names of the inputs and buffers that the values depend on."""
        sources: list[Input | Buffer] = [*self.graph.inputs, *self.graph.buffers]
        return frozenset(source.name for source in sources)

    def find_broken(self, inputs: Tensors, buffers: Tensors) -> Guard | None:
        """Return the first guard that does not hold for a full batch, or None if all hold.

        Tensors are moved to the device of the first input, and converted to the dtypes that the
        step was captured with.
        """
        pending: defaultdict[str, list[Guard]] = defaultdict(list)
        for guard in self.checks:
            pending[guard.value].append(guard)
        device = next((inputs[i.name].device for i in self.graph.inputs), torch.device("cpu"))

        def convert(source: Input | Buffer, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(device, self.graph.values[source.value].dtype)

        with torch.no_grad():
            inputs = {i.name: convert(i, inputs[i.name]) for i in self.graph.inputs}
            buffers = {b.name: convert(b, buffers[b.name]) for b in self.graph.buffers}
            for values in run_nodes(self.graph, {}, buffers, inputs):
                for name in [name for name in pending if name in values]:
                    for guard in pending.pop(name):
                        if not guard.holds(values[name]):
                            return guard
        return None
