"""Follow the storages of tensors while they live: a dispatch mode for those who count memory."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(slots=True, eq=False)
class Storage:
    """One storage that lives; `kind` is what it is for, once that is known."""

    number: int  # addresses are used again, numbers are not
    size: int = 0
    kind: str | None = None
    watch: Any = field(default=None, repr=False)


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Know the storages of all tensors that were tracked, and the sum of their sizes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0  # bytes now, and at most
        self.storages: dict[int, Storage] = {}  # by address
        self._counter = itertools.count()

    def track(self, tensor: Tensor) -> Storage:
        """Return the record of a tensor's storage, with its size of now."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self.storages.get(key)
        if found is None:
            found = self.storages[key] = Storage(next(self._counter))
            found.watch = weakref.ref(storage, lambda _: self._free(key))
        self.resize(found, storage.nbytes())
        return found

    def resize(self, storage: Storage, size: int) -> None:
        """Set the size of a storage."""
        self.live += size - storage.size
        self.peak = max(self.peak, self.live)
        storage.size = size

    def _free(self, key: int) -> None:
        self.resize(self.storages.pop(key), 0)
