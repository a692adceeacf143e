"""The compiled programs of a parallel module: one per kind of batch, the latest used ones.

A program is made when a batch of a new kind comes. A training whose every batch has a size or a
plain value of its own would make one in each step: this is said, and programs that have not been
used for long are let go. Ranks are given the same batches, so they keep and drop the same ones.
"""

from __future__ import annotations

import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from shardwise.runtime.hooks import Hook
from shardwise.runtime.store import ParameterStore

__all__ = ["ProgramKey", "Programs", "StepProgram"]

KEPT_PROGRAMS = 60  # as many as `local_batch` can tell apart in one integer
MANY_PROGRAMS = 25  # after so many, and after every doubling, warn about their cost


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """What a compiled program was made for.

    `step` names one of several steps over the same modules; `batch` describes the batch as far as
    the program depends on it; `world` describes everything else outside the batch that does, such
    as flags of the user's model.
    """

    step: str
    training: bool
    batch: Hashable
    world: Hashable


class StepProgram(Protocol):
    """A compiled step for batches of one signature."""

    @property
    def hooks(self) -> Sequence[Hook]:
        """Gradient hooks of the model's parameters."""
        ...

    def train(
        self, batch: Any, store: ParameterStore, *, outputs: bool, local: bool
    ) -> tuple[Tensor, Any]:
        """Forward and backward, inside `store.step`: the loss, and the outputs if asked for."""
        ...

    def evaluate(
        self, batch: Any, store: ParameterStore, *, local: bool
    ) -> tuple[Tensor | None, Any]:
        """The loss, if the model gives one, and its outputs, inside `store.evaluate`."""
        ...

    def loss(self, batch: Any, store: ParameterStore, *, local: bool) -> Tensor:
        """The loss alone, inside `store.evaluate`."""
        ...

    def finish(self) -> None:
        """Finish a step once its gradients are complete."""
        ...

    def local_batch(self, batch: Any) -> Any:
        """What of a whole batch this rank reads; the program takes it in the batch's place."""
        ...

    def takes(self, batch: Any) -> bool:
        """Whether a local batch has the shapes that this program expects."""
        ...

    def generated(self) -> list[nn.Module]:
        """The generated modules, which use the memory of the store."""
        ...


Specialize = Callable[[ProgramKey, Any], StepProgram]


class Programs:
    """Programs by key; those used last are kept."""

    def __init__(
        self,
        store: ParameterStore,
        specialize: Specialize,
        known: Mapping[ProgramKey, StepProgram],
        *,
        tell: bool,
    ) -> None:
        self._store, self._specialize, self._tell = store, specialize, tell
        self._kept: OrderedDict[ProgramKey, StepProgram] = OrderedDict(known)
        self._made, self._seconds = 0, 0.0
        self._limit = MANY_PROGRAMS

    def items(self) -> Iterator[tuple[ProgramKey, StepProgram]]:
        """All programs, in an order that is the same on every rank."""
        yield from self._kept.items()

    def use(self, key: ProgramKey) -> None:
        """Note that a program is used again."""
        self._kept.move_to_end(key)

    def get(self, key: ProgramKey, batch: Any) -> StepProgram:
        """The program for a batch, made if there is none; all ranks call this together."""
        program = self._kept.get(key)
        if program is None:
            start = time.perf_counter()
            program = self._kept[key] = self._specialize(key, batch)
            self._seconds += time.perf_counter() - start
            self._made += 1
            if self._made >= self._limit:
                self._warn()
            while len(self._kept) > KEPT_PROGRAMS:
                oldest, dropped = self._kept.popitem(last=False)
                self._store.detach(oldest, dropped.generated())
        self.use(key)
        return program

    def _warn(self) -> None:
        self._limit *= 2
        if self._tell:
            warnings.warn(
                f"{self._made} programs were made for batches of different sizes or values, in "
                f"{self._seconds:.1f} s in all; the {KEPT_PROGRAMS} used last are kept. Pad "
                "batches to a few lengths (multiples of 64), and pass changing numbers as tensors",
                RuntimeWarning,
                stacklevel=2,
            )
