"""Compare a zoo model under a strategy, run in threads, with one device."""

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
    """Whether a model under a strategy equals one device, and why not."""

    model: str
    strategy: str
    ranks: int
    where: str  # "threads" or "processes"
    ok: bool
    error: float | None = None  # the largest relative error
    share: float | None = None  # of the parameter bytes, on rank 0
    reason: str = ""
    note: str = ""  # on a pass after a refusal
    seconds: float = 0.0

    @staticmethod
    def of(model: str, case: Case, **fields: Any) -> Result:
        """Return the result of a case in threads."""
        strategy, ranks = case
        return Result(model=model, strategy=strategy, ranks=ranks, where="threads", **fields)


def ranks_of(strategy: str, ranks: Sequence[int]) -> Sequence[int]:
    """Return the numbers of ranks on which a strategy runs."""
    return FIXED_RANKS.get(strategy, ranks)


def make_plan(graph: Any, strategy: str, ranks: int, **options: Any) -> Any:
    """Return the plan of a strategy: `hybrid` has dp=2, and pipelines have two stages."""
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
    """Check a case; an exception is the reason of its failure."""
    start = time.perf_counter()
    try:
        fields = _checked(name, case, graph, reference, batch)
    except Exception as error:
        fields = {"ok": False, "reason": zoo_report.shorten(error)}
        if "couples the samples" in str(error) and case[0] in FIXED_RANKS:
            fields = _without_microbatches(name, case, graph, reference, batch, dropout, error)
    return Result.of(name, case, **fields, seconds=time.perf_counter() - start)


def _checked(
    name: str, case: Case, graph: Any, reference: Any, batch: Any, **options: Any
) -> dict[str, Any]:
    import shardwise as sw
    from shardwise.equivalence import check

    strategy, ranks = case
    plan = make_plan(graph, strategy, ranks, **options)
    program = sw.compile(graph, plan).lowered
    certificate = check(program, reference, batch, timeout_s=120.0)
    fields = _fields(certificate)
    if strategy in FIXED_RANKS:
        return fields
    share = fields["share"] = parameter_share(program)
    if strategy == "tensor" and ranks == 2 and zoo_report.is_transformer(name) and fields["ok"]:
        fields["ok"] = share <= zoo_report.MAX_SHARE
        problem = f"rank 0 has {share:.2f} of the parameter bytes"
        fields["reason"] = "" if fields["ok"] else problem
    return fields


def _fields(certificate: Any) -> dict[str, Any]:
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
    """Check a model that couples samples with one micro-batch, and with separate batches."""
    import shardwise as sw

    fields = _checked(name, case, graph, reference, batch, num_microbatches=1)
    reason = " ".join(str(refusal).split()).partition(", so micro-batches")[0]
    where = getattr(refusal, "where", None)
    if not fields["ok"]:
        return {**fields, "reason": f"1 micro-batch: {fields['reason']}"}
    plan = make_plan(graph, *case, per_microbatch=True)
    separate = _fields(sw.verify(*zoo.build(name, dropout=dropout), plan))
    if not separate["ok"]:
        return {**separate, "reason": f"micro-batches as separate batches: {separate['reason']}"}
    error = max(fields["error"], separate["error"])
    return {**fields, "error": error, "note": f"{reason} (at {where})"}


def parameter_share(program: Any) -> float:
    """Return the share of the parameter bytes on rank 0."""
    local = total = 0.0
    axes = dict(program.mesh.axes)
    for item in program.of_rank(0).parameters:
        size = math.prod(item.local_shape) * item.dtype.itemsize
        local += size / math.prod(axes[a] for a in item.sync) if item.zero == 3 else size
        total += math.prod(item.shape) * item.dtype.itemsize
    return local / total if total else 0.0
