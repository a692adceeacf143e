"""`advise(graph, kinds, counts)`: compare the best plans on several clusters, with their cost."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from shardwise.cluster import Cluster
from shardwise.cluster.presets import preset_of_size
from shardwise.cost import OpTable
from shardwise.errors import ClusterError, InfeasiblePlan
from shardwise.ir import Graph
from shardwise.planner.options import SearchOptions, known_options
from shardwise.planner.plan import plan as find_plan
from shardwise.planner.plan import show_progress
from shardwise.planner.search_space import UserOptions
from shardwise.plans import Plan

HOUR_S = 3600.0
MILLION = 1e6
_UNRESTRICTIVE = ("constraints", "memory_gib", "precision")  # do not narrow the search space


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRow:
    """A cluster with its best plan, or the reason why no plan fits."""

    cluster: str
    num_ranks: int
    price_per_hour: float
    plan: Plan | None = None
    reason: str = ""
    hint: str = ""

    @property
    def feasible(self) -> bool:
        """Whether any plan fits."""
        return self.plan is not None

    @property
    def step_time_s(self) -> float | None:
        """Predicted seconds of a step."""
        return None if self.plan is None else self.plan.figures.best.step_time_s

    @property
    def headroom_bytes(self) -> float | None:
        """Free memory of the fullest device."""
        return None if self.plan is None else self.plan.figures.best.memory.free_bytes

    def per_s(self, unit: str) -> float | None:
        """Return `rows` or `tokens` per second; None if the batch has no such size."""
        number = None if self.plan is None else getattr(self.plan.figures.batch, unit)
        return number / self.step_time_s if number and self.step_time_s else None

    def cost_per_million(self, unit: str) -> float | None:
        """Return the cost of a million `rows` or `tokens`, if devices have a price."""
        rate = self.per_s(unit)
        if not rate or not self.price_per_hour:
            return None
        return self.price_per_hour / HOUR_S / rate * MILLION

    def to_json(self) -> dict[str, Any]:
        """Return the row as data."""
        common: dict[str, Any] = {
            "cluster": self.cluster,
            "num_ranks": self.num_ranks,
            "price_per_hour": self.price_per_hour,
            "feasible": self.feasible,
        }
        if self.plan is None:
            return common | {"reason": self.reason, "hint": self.hint}
        return common | {
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
    """All clusters, the fastest first, those without a plan last."""

    model: str
    rows: tuple[AdviceRow, ...]

    @property
    def fastest(self) -> AdviceRow | None:
        """The cluster with the shortest step."""
        return self.rows[0] if self.rows and self.rows[0].feasible else None

    @property
    def cheapest(self) -> AdviceRow | None:
        """The cluster with the lowest cost per sample, if devices have a price."""
        priced = [row for row in self.rows if row.cost_per_million("rows") is not None]
        return min(priced, key=lambda row: row.cost_per_million("rows") or 0.0, default=None)

    def marks(self, row: AdviceRow) -> list[str]:
        """Return the titles of a row: "fastest", "cheapest", both or none."""
        return [name for name in ("fastest", "cheapest") if getattr(self, name) is row]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as data."""
        fastest, cheapest = self.fastest, self.cheapest
        return {
            "model": self.model,
            "rows": [row.to_json() for row in self.rows],
            "fastest": fastest.cluster if fastest else None,
            "cheapest": cheapest.cluster if cheapest else None,
        }

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            if row.plan is None:
                lines.append(f"{row.cluster}: {row.reason}")
                continue
            price = row.cost_per_million("rows")
            cost = "" if price is None else f", {price:,.2f} per million samples"
            marks = "".join(f", {mark}" for mark in self.marks(row))
            lines.append(
                f"{row.cluster}: step {row.step_time_s:.4g} s{cost}: "
                f"{row.plan.figures.best.what}{marks}"
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
    """Find the best plan for every kind and count of devices, and for each of `clusters`.

    Options are those of `sw.plan`. The row of a cluster on which no plan fits has the reason.
    """
    compared = [*clusters, *(preset_of_size(kind, n) for kind in kinds for n in counts)]
    if not compared:
        raise ClusterError(
            "nothing to compare: pass kinds and counts, or clusters",
            hint='sw.advise(graph, ["h100", "a100-80"], [8, 16])',
        )
    UserOptions.of({name: value for name, value in options.items() if name not in _UNRESTRICTIVE})
    with show_progress("comparing", shown=progress) as report:
        rows = list(_rows(graph, compared, {**options, "table": table}, report))
    rows.sort(key=lambda row: (not row.feasible, row.step_time_s or 0.0, row.num_ranks))
    return Advice(model=graph.name, rows=tuple(rows))


def _rows(
    graph: Graph, clusters: list[Cluster], options: dict[str, Any], report: Callable[[str], None]
) -> Iterator[AdviceRow]:
    for number, cluster in enumerate(clusters, start=1):
        report(f"{cluster.name}, {number} of {len(clusters)}")
        price = sum(n.copies * sum(d.price_per_hour for d in n.devices) for n in cluster.nodes)
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
