"""Run ranks as threads of this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.transport.threads import ThreadTransport, run_threads


def on(axes: dict[str, int], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of `fn(mesh, *args)` on every rank of a mesh with these axes."""

    def run(rank: int, transport: ThreadTransport) -> object:
        return fn(ProcessMesh(axes, rank, transport), *args)

    return run_threads(math.prod(axes.values()), run, timeout_s=30)
