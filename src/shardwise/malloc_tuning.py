"""Memory of a CPU that a process keeps for its next step: `keep_pages`.

A training step allocates and frees the same tensors again and again. By itself glibc gives large
blocks back to the system at once, and what it gets for the next ones are new pages, which the
system has to find and to clear: a quarter of the time of a step whose gradients are tens of MiB.
Here it keeps them. What the process has is then what it had at the most; settings of the user
(`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`, …) stay as they are.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

__all__ = ["keep_pages"]


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
ALL = 2**31 - 1  # the most that mallopt takes
BLOCKS = (1 << 30, 32 << 20)  # the largest that is kept; old versions of glibc know 32 MiB at most


@cache
def keep_pages() -> bool:
    """Have the C library keep what tensors on the CPU free; whether that was done."""
    if not sys.platform.startswith("linux") or _set_by_user():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    kept = any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in BLOCKS)
    return kept and mallopt(M_TRIM_THRESHOLD, ALL) == 1


def _set_by_user() -> bool:
    tunables = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return tunables or any(n.startswith("MALLOC_") and n.endswith("_") for n in os.environ)
