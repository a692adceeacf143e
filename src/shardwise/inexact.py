"""Synchronization that differs from synchronous training, as data: compression, local steps, delay.

Compiler and runtime share these values. `equivalence/reference_sync.py` defines what each of them
computes, in plain PyTorch for a single process.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from shardwise.errors import PlanError
from shardwise.formatting import counted
from shardwise.schema import OneOf, Range, check_fields

BITS = {"bf16": 16, "fp16": 16, "int8": 8, "fp8": 8, "onebit": 1}
QUANTIZED = tuple(BITS)
COMPRESSIONS = (*QUANTIZED, "topk", "randomk", "powersgd")
INDEX_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How messages of gradients, or of the differences of a round, are made smaller.

    "bf16", "fp16", "int8" and "fp8" round stochastically, "onebit" sends signs and a mean
    magnitude; ranks add up parts of the decoded messages, and send the sum compressed again. "topk"
    sends the largest elements with their indices and "randomk" the same random ones on all ranks,
    a fraction `ratio` of each parameter. "powersgd" sends factors of rank `rank` of each matrix.
    With `error_feedback`, everything that a message omits is added to the next one. The first
    `warmup` sums are not compressed. Random numbers depend on `seed`, parameter and step.
    """

    kind: Annotated[str, OneOf(COMPRESSIONS, "compression")]
    ratio: Annotated[float, Range(0, 1, above=True)] = 0.01
    rank: Annotated[int, Range(1)] = 4
    error_feedback: bool = True
    warmup: Annotated[int, Range(0)] = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, PlanError, where="compression")

    def count(self, numel: int) -> int:
        """Return the number of elements of a tensor that "topk" and "randomk" send."""
        return min(numel, math.ceil(self.ratio * numel))

    def is_factored(self, shape: Sequence[int]) -> bool:
        """Return whether "powersgd" sends factors of such a tensor, because they are smaller."""
        rows = shape[0] if shape else 1
        columns = math.prod(shape[1:])
        return len(shape) > 1 and self.rank * (rows + columns) < rows * columns

    def __str__(self) -> str:
        words = [self.kind]
        if self.kind in ("topk", "randomk"):
            words.append(f"{self.ratio:.3g} of elements")
        if self.kind == "powersgd":
            words.append(f"rank {self.rank}")
        if not self.error_feedback:
            words.append("without error feedback")
        return " ".join(words) + (f" after {counted(self.warmup, 'step')}" if self.warmup else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterOptimizer:
    """SGD on the difference between the parameters of the last round and the mean of replicas."""

    lr: Annotated[float, Range(0, above=True)] = 0.7
    momentum: Annotated[float, Range(0, 1)] = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        check_fields(self, PlanError, where="outer")
        if self.nesterov and not self.momentum:
            raise PlanError("outer: nesterov without momentum", hint="momentum=0.9")

    def __str__(self) -> str:
        nesterov = " Nesterov" if self.nesterov else ""
        return f"outer SGD of lr {self.lr:g},{nesterov} momentum {self.momentum:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inexact:
    """How the synchronization of a parameter differs from synchronous training.

    With `every` > 1, each rank updates its own replica. After `every` updates, a round replaces
    the replicas by their mean or, with `outer`, by a step of that optimizer. Parameters form
    `fragments`, whose rounds are spread over the interval. A round takes effect `overlap` updates
    after it was sent; each replica keeps the updates that it made meanwhile. A gradient takes
    effect `stale` steps after the one that computed it.
    """

    every: Annotated[int, Range(1)] = 1
    outer: OuterOptimizer | None = None
    fragments: Annotated[int, Range(1)] = 1
    overlap: Annotated[int, Range(0)] = 0
    stale: Annotated[int, Range(0)] = 0
    compression: Compression | None = None

    def __post_init__(self) -> None:
        check_fields(self, PlanError, where="sync")
        for name, kind in (("compression", Compression), ("outer", OuterOptimizer)):
            if not isinstance(value := getattr(self, name), kind | None):
                raise PlanError(f"sync {name}={value!r}", hint=f"{name}=sw.{kind.__name__}(…)")
        if self.every == 1 and (self.outer or self.fragments > 1 or self.overlap):
            values = {name: getattr(self, name) for name in ("outer", "fragments", "overlap")}
            given = ", ".join(f"{name}={v}" for name, v in values.items() if v not in (1, 0))
            raise PlanError(f"sync every=1 with {given}: there are no rounds", hint="every=50, …")
        if self.every > 1 and self.stale:
            raise PlanError(
                f"sync every={self.every} with stale={self.stale}: between rounds, no gradient is "
                "sent that could be late",
                hint=f"every={self.every}, overlap={self.stale} delays the result of a round",
            )
        if self.every > 1 and self.fragments > self.every:
            raise PlanError(
                f"sync fragments={self.fragments} in every={self.every} updates",
                hint=f"fragments={self.every} or fewer",
            )
        if self.overlap >= self.every > 1:
            raise PlanError(
                f"sync overlap={self.overlap}: a round would end after the next one begins",
                hint=f"overlap={self.every - 1} or less",
            )

    @property
    def is_local(self) -> bool:
        """Whether ranks update their own replicas between rounds."""
        return self.every > 1

    @property
    def state_copies(self) -> int:
        """The tensors of a parameter's size that outlive a step, besides those of its optimizer.

        They are residuals, late gradients, and the last round, momentum and messages of replicas.
        """
        compressed = self.compression is not None and self.compression.error_feedback
        momentum = self.outer is not None and self.outer.momentum > 0
        return compressed + self.stale + self.is_local + momentum + 2 * (self.overlap > 0)

    def __bool__(self) -> bool:
        """Return whether anything differs from synchronous training."""
        return any(getattr(self, f.name) != f.default for f in fields(self))

    def words(self) -> Iterable[str]:
        """Yield what differs, in a few words each."""
        if self.every > 1:
            yield f"a round every {self.every} updates"
        if self.outer is not None:
            yield str(self.outer)
        if self.fragments > 1:
            yield f"{self.fragments} fragments"
        if self.overlap:
            yield f"applied {counted(self.overlap, 'update')} later"
        if self.stale:
            yield f"gradients {counted(self.stale, 'step')} late"
        if self.compression is not None:
            yield str(self.compression)
