"""A solution as text for people.

Enters: a `Solution`. Leaves: lines with the time, the bounds, and what is proved.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.collectives.solution import Solution

SHOWN = 4  # bottlenecks


def solution_text(solution: Solution) -> str:
    """Return some lines."""
    program = solution.program
    lines = [
        f"{program.operation} of {solution.num_bytes:,} bytes on {program.num_ranks} ranks: "
        f"{solution.name}",
        f"  predicted      {_ms(solution.predicted_s)}",
        f"  busiest        {_ms(solution.bandwidth_s)}   what the busiest resource takes",
        f"  trees' bound   {_ms(solution.lp_bound_s)}   the least for any trees or routes",
        f"  cuts' bound    {_ms(solution.cut_bound_s)}   the least for any algorithm",
        f"  {proof(solution)}",
    ]
    if solution.bottlenecks:
        more = len(solution.bottlenecks) - SHOWN
        lines.append(
            f"  limited by {', '.join(solution.bottlenecks[:SHOWN])}"
            + (f" and {more} more" if more > 0 else "")
        )
    lines.append(
        f"  {len(program.chunks)} chunks, {program.num_messages} messages; trees of at most "
        f"{solution.depth} hops; solved once for {solution.symmetry} symmetries"
    )
    if solution.others:
        told = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in solution.others)
        lines.append(f"  others: {told}")
    return "\n".join(lines)


def proof(solution: Solution) -> str:
    """What is proved of the use of the network, in words."""
    if solution.gap == math.inf:
        return "not proved optimal: there is no bound for fewer elements than ranks"
    if not solution.num_bytes or not max(solution.lp_bound_s, solution.cut_bound_s):
        return "nothing limits the bytes: latencies alone count"
    if not solution.proved:
        return f"not proved optimal: {solution.gap:.2%} above the bound"
    if solution.cut_bound_s >= solution.lp_bound_s * (1 - 1e-4):
        return "proved: no algorithm uses the network better"
    apart = solution.lp_bound_s / solution.cut_bound_s - 1 if solution.cut_bound_s else 1.0
    return f"proved for trees and routes; the cuts that were tried are {apart:.2%} below"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
