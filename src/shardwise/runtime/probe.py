"""Looks at values inside a running program: what the verifier uses to find the first difference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["Records", "probe", "probing", "recording"]

_local = threading.local()


@dataclass(slots=True)
class Records:
    """What one rank probed: values by name, and the gradients that backward gave them."""

    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def probe(name: str, value: Tensor) -> None:
    """Record a value of this rank's thread and its gradient, if someone records."""
    records: Records | None = getattr(_local, "records", None)
    if records is None or not isinstance(value, Tensor):
        return
    name = getattr(_local, "prefix", "") + name
    first, calls = name, 1
    while name in records.values:  # the statement runs once per block
        calls += 1
        name = f"{first} (call {calls})"
    records.values[name] = value.detach().clone()
    if value.requires_grad:

        def keep(gradient: Tensor) -> None:
            records.gradients[name] = gradient.detach().clone()

        value.register_hook(keep)  # type: ignore[no-untyped-call]


def probing(prefix: str) -> None:
    """Probes of this thread get this prefix from now on: a stage and a micro-batch."""
    if getattr(_local, "records", None) is not None:
        _local.prefix = prefix


@contextlib.contextmanager
def recording(records: Records | None = None) -> Iterator[Records]:
    """Collect what this thread probes."""
    _local.records = records = Records() if records is None else records
    try:
        yield records
    finally:
        _local.records, _local.prefix = None, ""
