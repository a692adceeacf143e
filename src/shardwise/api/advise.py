"""What if: the best plan on other machines, with its cost.

Enters: a `Graph`, and kinds and counts of devices or whole clusters. Leaves: `Advice`: a row for
each, quickest first, or why nothing fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from shardwise.cluster import Cluster
from shardwise.cluster.presets import preset
from shardwise.cost import OpTable
from shardwise.errors import ClusterError, InfeasiblePlan
from shardwise.ir import Graph
from shardwise.planner.options import SearchOptions, known_options
from shardwise.planner.plan import plan as find_plan
from shardwise.planner.progress import Progress
from shardwise.planner.search_space import UserOptions
from shardwise.plans import Plan

HOUR_S = 3600.0
MILLION = 1e6
_OTHERS = ("constraints", "memory_gib", "precision")  # of `plan`, beside what it fixes


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """One cluster: its best plan in figures, or the reason that there is none."""

    cluster: str
    num_ranks: int
    price_per_hour: float
    plan: Plan | None = None
    reason: str = ""
    hint: str = ""

    @property
    def feasible(self) -> bool:
        return self.plan is not None

    @property
    def step_time_s(self) -> float | None:
        return None if self.plan is None else self.plan.figures.best.step_time_s

    @property
    def headroom_bytes(self) -> float | None:
        """What the fullest device has left."""
        if self.plan is None:
            return None
        return self.plan.figures.best.memory.free_bytes

    def per_s(self, unit: str) -> float | None:
        """`rows` or `tokens` each second; None where the batch has none."""
        number = None if self.plan is None else getattr(self.plan.figures.batch, unit)
        return number / self.step_time_s if number and self.step_time_s else None

    def cost_per_million(self, unit: str) -> float | None:
        """Of `rows` or `tokens`, where devices have a price."""
        rate = self.per_s(unit)
        if not rate or not self.price_per_hour:
            return None
        return self.price_per_hour / HOUR_S / rate * MILLION

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "cluster": self.cluster,
            "num_ranks": self.num_ranks,
            "price_per_hour": self.price_per_hour,
            "feasible": self.feasible,
        }
        if self.plan is None:
            return found | {"reason": self.reason, "hint": self.hint}
        return found | {
            "step_time_s": self.step_time_s,
            "rows_per_s": self.per_s("rows"),
            "tokens_per_s": self.per_s("tokens"),
            "cost_per_million_rows": self.cost_per_million("rows"),
            "cost_per_million_tokens": self.cost_per_million("tokens"),
            "headroom_bytes": self.headroom_bytes,
            "plan": self.plan.figures.best.what,
            "limited_by": self.plan.figures.binding.text,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """All rows, the quickest first, those that do not fit last."""

    model: str
    rows: tuple[AdviceRow, ...]

    @property
    def quickest(self) -> AdviceRow | None:
        return self.rows[0] if self.rows and self.rows[0].feasible else None

    @property
    def cheapest(self) -> AdviceRow | None:
        """The least to pay for a sample, where devices have a price."""
        paid = [row for row in self.rows if row.cost_per_million("rows") is not None]
        return min(paid, key=lambda row: row.cost_per_million("rows") or 0.0, default=None)

    def to_json(self) -> dict[str, Any]:
        quickest, cheapest = self.quickest, self.cheapest
        return {
            "model": self.model,
            "rows": [row.to_json() for row in self.rows],
            "quickest": quickest.cluster if quickest else None,
            "cheapest": cheapest.cluster if cheapest else None,
        }

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            if row.plan is None:
                lines.append(f"{row.cluster}: {row.reason}")
                continue
            paid = row.cost_per_million("rows")
            cost = "" if paid is None else f", {paid:,.2f} per million samples"
            marks = [
                name
                for name, best in (("quickest", self.quickest), ("cheapest", self.cheapest))
                if best is row
            ]
            lines.append(
                f"{row.cluster}: step {row.step_time_s:.4g} s{cost}: "
                f"{row.plan.figures.best.what}" + "".join(f", {mark}" for mark in marks)
            )
        return "\n".join(lines)


@known_options("sw.advise")
def advise(
    graph: Graph,
    kinds: Sequence[str] = (),
    counts: Sequence[int] = (),
    *,
    clusters: Iterable[Cluster] = (),
    table: OpTable | None = None,
    progress: bool = True,
    **options: Unpack[SearchOptions],
) -> Advice:
    """The best plan for every kind and count of devices, and for every one of `clusters`.

    Options are those of `sw.plan`. A cluster on which nothing fits is a row with the reason.
    """
    every = [*clusters, *(cluster_of_kind(kind, n) for kind in kinds for n in counts)]
    if not every:
        raise ClusterError(
            "nothing to compare: no kinds with counts and no clusters",
            hint='sw.advise(graph, ["h100", "a100-80"], [8, 16])',
        )
    UserOptions.of({name: value for name, value in options.items() if name not in _OTHERS})
    with Progress("comparing", shown=progress) as bar:
        rows = list(_rows(graph, every, {**options, "table": table}, bar))
    rows.sort(key=lambda row: (not row.feasible, row.step_time_s or 0.0, row.num_ranks))
    return Advice(model=graph.name, rows=tuple(rows))


def _rows(
    graph: Graph, clusters: Sequence[Cluster], options: dict[str, Any], bar: Progress
) -> Iterator[AdviceRow]:
    for number, cluster in enumerate(clusters, start=1):
        bar.update(f"{cluster.name}, {number} of {len(clusters)}")
        price = sum(
            n.copies * sum(device.price_per_hour for device in n.devices) for n in cluster.nodes
        )
        plan, reason, hint = None, "", ""
        try:
            plan = find_plan(graph, cluster, progress=False, **options)
        except InfeasiblePlan as error:
            reason, hint = error.message.partition("\n")[0], error.hint or ""
        yield AdviceRow(
            cluster=cluster.name,
            num_ranks=cluster.num_ranks,
            price_per_hour=price,
            plan=plan,
            reason=reason,
            hint=hint,
        )


def cluster_of_kind(kind: str, count: int) -> Cluster:
    """`count` devices of a known kind, in as few equal nodes as its usual size allows.

    Cores are in one node, however many.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(f"{count!r} devices of {kind}", hint="1 or more")
    known = preset(kind)
    usual = count if known.device(0).kind == "cpu" else known.num_ranks
    each = max(size for size in range(1, min(usual, count) + 1) if count % size == 0)
    return preset(kind, nodes=count // each, devices_per_node=each)
