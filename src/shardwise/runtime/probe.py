"""Looks at values inside a running program: what the verifier uses to find the first difference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

__all__ = ["probe", "recording"]

_local = threading.local()


def probe(name: str, value: Tensor) -> None:
    """Record a value of this rank's thread, if someone records."""
    records: dict[str, Tensor] | None = getattr(_local, "records", None)
    if records is not None:
        records[name] = value.detach().clone()


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Tensor]]:
    """Collect what this thread probes."""
    _local.records = records = {}
    try:
        yield records
    finally:
        _local.records = None
