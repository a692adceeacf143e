"""The plans of `benchmarks.memory`: Llama-3-8B on 8, 64 and 1,024 ranks.

The memory model was developed with measurements of `KNOWN`; `NEW` are held-out cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan, its batch, and the groups of which one rank is measured.

    `strategy` is the name of a strategy, or "plan" for the result of `sw.plan`.
    """

    strategy: str
    ranks: int
    rows: int
    length: int
    groups: tuple[int, ...] = (0,)
    options: Mapping[str, Any] = field(default_factory=dict)


def _case(
    strategy: str, ranks: int, rows: int, length: int, *groups: int, **options: Any
) -> Case:  # fmt: skip
    return Case(
        strategy=strategy,
        ranks=ranks,
        rows=rows,
        length=length,
        groups=groups or (0,),
        options=options,
    )


KNOWN = {
    "fsdp on 8": _case("fsdp", 8, 8, 8192),
    "fsdp on 8, recomputed": _case("fsdp", 8, 16, 8192, recompute="full"),
    "fsdp on 8, selectively, 2 micro-batches": _case(
        "fsdp", 8, 16, 8192, recompute="selective", num_microbatches=2
    ),
    "dp 8 x tp 8 on 64": _case(
        "hybrid", 64, 32, 8192, dp=8, tp=8, zero=1, num_microbatches=2
    ),
    "dp 16 x tp 8 x pp 8 on 1,024": _case(
        "hybrid", 1024, 256, 8192, 0, 3, 7, dp=16, tp=8, pp=8, zero=1, num_microbatches=16
    ),
}  # fmt: skip

NEW = {
    "fsdp on 8, 3 rows of 4,096": _case("fsdp", 8, 24, 4096),
    "fsdp on 8, 16 rows of 2,048, recomputed": _case("fsdp", 8, 128, 2048, recompute="full"),
    "fsdp on 8, 4 rows of 4,096, selectively": _case("fsdp", 8, 32, 4096, recompute="selective"),
    "tp 8 on 8, 1,024 tokens": _case("hybrid", 8, 1, 1024, dp=1, tp=8),
    "zero 1 on 64": _case("zero1", 64, 64, 2048),
    "zero 2 on 64, 2 micro-batches": _case("zero2", 64, 128, 1024, num_microbatches=2),
    "dp 32 x tp 2 on 64, zero 3": _case("hybrid", 64, 64, 8192, dp=32, tp=2, zero=3),
    "dp 16 x tp 4 on 64, zero 2, recomputed": _case(
        "hybrid", 64, 64, 8192, dp=16, tp=4, zero=2, recompute="full"
    ),
    "dp 8 x tp 2 x pp 4 on 64": _case(
        "hybrid", 64, 128, 4096, 0, 1, 3, dp=8, tp=2, pp=4, zero=1, num_microbatches=16
    ),
    "dp 128 x tp 4 x pp 2 on 1,024, selectively": _case(
        "hybrid", 1024, 1024, 4096, 0, 1,
        dp=128, tp=4, pp=2, zero=1, num_microbatches=4, recompute="selective",
    ),
    "dp 32 x tp 8 x pp 4 on 1,024, zero 2, recomputed": _case(
        "hybrid", 1024, 256, 8192, 0, 1, 3,
        dp=32, tp=8, pp=4, zero=2, num_microbatches=8, recompute="full",
    ),
    "searched for 8": _case("plan", 8, 64, 8192),
    "searched for 64": _case("plan", 64, 256, 8192, 0, -1),
    "searched for 1,024": _case("plan", 1024, 1024, 8192, 0, -1),
}  # fmt: skip

CASES = {**KNOWN, **NEW}
