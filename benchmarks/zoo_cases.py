"""One zoo model under one strategy in threads, compared with one device.

Enters: a captured model with its reference, and a case. Leaves: a `Result`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import zoo_report
from tests.support import zoo

STRATEGIES = ("ddp", "fsdp", "tensor", "hybrid", "pipeline", "hybrid_pp")
FIXED_RANKS = {"pipeline": (2,), "hybrid_pp": (8,)}
MICROBATCHES = 2

Case = tuple[str, int]  # strategy, ranks


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model under one strategy: whether it equals one device, and why not."""

    model: str
    strategy: str
    ranks: int
    where: str  # "threads" or "processes"
    ok: bool
    error: float | None = None  # the largest relative error
    share: float | None = None  # of all parameter bytes, what rank 0 holds
    reason: str = ""
    note: str = ""  # on a pass that was refused something
    seconds: float = 0.0

    @staticmethod
    def of(model: str, case: Case, **found: Any) -> Result:
        """Return the result of a case in threads."""
        strategy, ranks = case
        return Result(model=model, strategy=strategy, ranks=ranks, where="threads", **found)


def ranks_of(strategy: str, ranks: Sequence[int]) -> Sequence[int]:
    """Return the numbers of ranks on which a strategy runs."""
    return FIXED_RANKS.get(strategy, ranks)


def make_plan(graph: Any, strategy: str, ranks: int, **options: Any) -> Any:
    """Return the strategy's plan; `hybrid` takes two data-parallel groups,
    a pipeline two stages.
    """
    import shardwise as sw

    sizes: dict[str, Any] = {}
    if strategy == "hybrid":
        sizes = {"dp": 2, "tp": ranks // 2}
    elif strategy == "pipeline":
        sizes = {"pp": 2, "num_microbatches": MICROBATCHES}
    elif strategy == "hybrid_pp":
        sizes = {"dp": 2, "tp": ranks // 4, "pp": 2, "num_microbatches": MICROBATCHES}
    make = getattr(sw.strategies, strategy.removesuffix("_pp"))
    return make(graph, sw.Cluster.local(ranks), **{**sizes, **options})


def verify(name: str, case: Case, graph: Any, reference: Any, batch: Any, dropout: float) -> Result:
    """Check one case; what it raises is its reason."""
    start = time.perf_counter()
    try:
        found = _checked(name, case, graph, reference, batch)
    except Exception as error:
        found = {"ok": False, "reason": zoo_report.shorten(error)}
        if "couples the samples" in str(error) and case[0] in FIXED_RANKS:
            found = _without_microbatches(name, case, graph, reference, batch, dropout, error)
    return Result.of(name, case, **found, seconds=time.perf_counter() - start)


def _checked(
    name: str, case: Case, graph: Any, reference: Any, batch: Any, **options: Any
) -> dict[str, Any]:
    import shardwise as sw
    from shardwise.equivalence import check

    strategy, ranks = case
    plan = make_plan(graph, strategy, ranks, **options)
    program = sw.compile(graph, plan).lowered
    certificate = check(program, reference, batch, timeout_s=120.0)
    found = _found(certificate)
    if strategy in FIXED_RANKS:
        return found
    share = found["share"] = parameter_share(program)
    if strategy == "tensor" and ranks == 2 and zoo_report.is_transformer(name) and found["ok"]:
        found["ok"] = share <= zoo_report.LARGEST_SHARE
        held = f"rank 0 holds {share:.2f} of the parameter bytes"
        found["reason"] = "" if found["ok"] else held
    return found


def _found(certificate: Any) -> dict[str, Any]:
    reason = "" if certificate.ok else zoo_report.first_failure(certificate)
    return {"ok": certificate.ok, "error": certificate.max_relative_error, "reason": reason}


def _without_microbatches(
    name: str,
    case: Case,
    graph: Any,
    reference: Any,
    batch: Any,
    dropout: float,
    refusal: Exception,
) -> dict[str, Any]:
    """Return a model that couples samples: the batch whole, and micro-batches as batches of their
    own.
    """
    import shardwise as sw

    found = _checked(name, case, graph, reference, batch, num_microbatches=1)
    words = " ".join(str(refusal).split()).partition(", so micro-batches")[0]
    where = getattr(refusal, "where", None)
    if not found["ok"]:
        return {**found, "reason": f"1 micro-batch: {found['reason']}"}
    plan = make_plan(graph, *case, per_microbatch=True)
    own = _found(sw.verify(*zoo.build(name, dropout=dropout), plan))
    if not own["ok"]:
        return {**own, "reason": f"micro-batches as batches of their own: {own['reason']}"}
    error = max(found["error"], own["error"])
    return {**found, "error": error, "note": f"{words} (at {where})"}


def parameter_share(program: Any) -> float:
    """Of all parameter bytes, what rank 0 holds."""
    held = whole = 0.0
    axes = dict(program.mesh.axes)
    for item in program.of_rank(0).parameters:
        size = math.prod(item.local_shape) * item.dtype.itemsize
        held += size / math.prod(axes[a] for a in item.sync) if item.zero == 3 else size
        whole += math.prod(item.shape) * item.dtype.itemsize
    return held / whole if whole else 0.0
