"""Records what ATen calls launch, and the memory that they make.

Enters: the ATen calls of a forward or backward pass. Leaves: their kernels in order,
the bytes alive now and at most, and which kernels some gradients do without.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.cost import shapes
from shardwise.cost.kernels import Kernel, kernels_of, op_info, tensors


@dataclass(slots=True)
class _Launch:
    """One kernel, with the storages that it reads and makes, by number."""

    kernel: Kernel
    reads: frozenset[int]
    makes: frozenset[int]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the kernels of every ATen call, and the bytes of storages while they live.

    Storages are numbered: addresses are used again.
    """

    def __init__(self, operands: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._launches: list[_Launch] = []
        self._counter = itertools.count()
        self._numbers: dict[int, int] = {}  # address -> number, of what lives
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, Any] = {}
        self._known: set[int] = set()
        self._held: list[Tensor] = []
        self._in_backward = False
        self.known(operands)

    def known(self, given: list[Tensor]) -> None:
        """Storages that are there anyway: operands, and gradients that come in."""
        self._held += given
        self._known |= {t.untyped_storage()._cdata for t in given}

    def is_known(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is there anyway."""
        return tensor.untyped_storage()._cdata in self._known

    def begin_backward(self) -> None:
        """From here, what is alive at most counts anew."""
        self.peak, self._in_backward = self.live, True

    def take(self) -> list[Kernel]:
        """The kernels since the last time."""
        found, self._launches = self._launches, []
        return [launch.kernel for launch in found]

    def without(self, gradients: list[Tensor]) -> tuple[Kernel, ...]:
        """The kernels since the last `take` that these gradients do not need."""
        needed = self._places(gradients)
        left = []
        for launch in reversed(self._launches):
            if needed.isdisjoint(launch.makes):
                left.append(launch.kernel)
            else:
                needed |= launch.reads
        return tuple(reversed(left))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        found = shapes.call(func, args, options)
        if func.is_view:
            return found
        results = list(tensors(found))
        for tensor in results:
            self._watch(tensor)
        if op_info(func).launches:
            kernels = kernels_of(func, args, options, found, backward=self._in_backward)
            self._note(kernels, (args, tuple(options.values())), found, results)
        return found

    def _note(
        self, kernels: tuple[Kernel, ...], given: Any, found: Any, results: list[Tensor]
    ) -> None:
        reads = frozenset(self._places(tensors(given)))
        if len(kernels) == 2:  # the first result, and the others: see `kernels_of`
            parts = [list(tensors(found[:1])), list(tensors(found[1:]))]
        else:
            parts = [results for _ in kernels]
        for kernel, part in zip(kernels, parts, strict=True):
            self._launches.append(_Launch(kernel, reads, frozenset(self._places(part))))

    def _places(self, given: Any) -> set[int]:
        """The numbers of storages that were made here."""
        found = (self._numbers.get(t.untyped_storage()._cdata) for t in given)
        return {number for number in found if number is not None}

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._known:
            return
        size = storage.nbytes()
        self._sizes[key], self._numbers[key] = size, next(self._counter)
        self._watches[key] = weakref.ref(storage, lambda _: self._gone(key))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._numbers.pop(key)
        self._watches.pop(key, None)
