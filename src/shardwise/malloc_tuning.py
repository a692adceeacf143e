"""Keep freed CPU memory in the process for its next step.

Every training step allocates and frees the same tensors. By default, glibc returns large blocks to
the system immediately, and the kernel has to map and clear new ones, which takes a quarter of a
step whose gradients have tens of MiB. `keep_heap` makes glibc keep them, so that the process stays
at its peak size. Settings of the user (`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`, …) take
precedence.
"""

import ctypes
import os
import sys
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
UNLIMITED = 2**31 - 1  # the largest value that mallopt accepts
BLOCK_BYTES = (1 << 30, 32 << 20)  # largest block to keep; old versions of glibc allow only 32 MiB


@cache
def keep_heap() -> bool:
    """Make the C library keep memory of freed CPU tensors; return whether it does."""
    if not sys.platform.startswith("linux") or _set_by_user():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    keeps_blocks = any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in BLOCK_BYTES)
    return keeps_blocks and mallopt(M_TRIM_THRESHOLD, UNLIMITED) == 1


def _set_by_user() -> bool:
    tunables = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return tunables or any(n.startswith("MALLOC_") and n.endswith("_") for n in os.environ)
