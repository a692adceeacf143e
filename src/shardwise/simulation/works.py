"""The workload of a model with given layouts, for micro-batches of any number of rows.

The lowered program of a few numbers of rows is read; others are interpolated where the workload is
linear in the rows.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.cluster import Mesh
from shardwise.ir import Graph
from shardwise.layouts.problem import Assignment
from shardwise.plans import Plan, Resolved, model_fingerprint
from shardwise.program.lower import lower_place
from shardwise.sharding.factors import Facts
from shardwise.shares import Shares, part
from shardwise.simulation.fold import FoldedGraph
from shardwise.simulation.work import Workload, work_of

TOLERANCE = 0.02  # of flops and bytes, up to which work counts as linear in rows


class WorkloadModel:
    """Workload by rows; `assignments` hold for every number of ranks along batch axes."""

    def __init__(
        self,
        fold: FoldedGraph,
        facts: Facts,
        assignments: tuple[Assignment, ...],
        roles: dict[str, str],
    ) -> None:
        self.fold, self.facts, self.assignments, self.roles = fold, facts, assignments, roles
        self.batch = [a.axis for a in assignments if roles[a.axis] == "batch"]
        self.rows = batch_rows(fold.graph)
        self._exact: dict[int, Workload] = {}  # by parts, even or `Shares`
        self._between: dict[float, Workload] = {}
        self._line: tuple[Workload, Workload] | None = None

    def at(self, rows: float, *, exact: bool = False) -> Workload:
        """The work of a rank whose micro-batch has `rows` of the batch.

        `exact` lowers a program for them, so that every call has its shapes.
        """
        if not self.batch or self.rows <= 1 or rows >= self.rows:
            return self._lowered(1)
        if exact:
            return self._lowered(self._division(min(self.rows, max(1, round(rows)))))
        if self._line is None:
            self._line = self._find_line()
        low, high = self._line
        if low is high:  # not linear: other axes cut the rows as well
            return self._lowered(max(1, min(self.rows, round(self.rows / rows))))
        if rows not in self._between:
            self._between[rows] = low.between(high, rows)
        return self._between[rows]

    def _find_line(self) -> tuple[Workload, Workload]:
        """Two programs of few rows, if a third one is on the line through them."""
        if self.rows < 4:
            one, more = self._lowered(self.rows), self._lowered(1)
            return one, more if one.rows < more.rows and one.alike(more) else one
        for least in (2, 1, 4):  # one row alone may be a view where more need a copy
            one, two, more = (self._lowered(-(-self.rows // (least * k))) for k in (1, 2, 4))
            grows = one.rows < two.rows < more.rows and one.alike(two) and one.alike(more)
            if grows and all(_on_line(one, two, other) for other in (more, self._lowered(1))):
                return one, two
        return one, one

    def _division(self, rows: int) -> int:
        """Parts of which the first has `rows`."""
        parts = -(-self.rows // rows)
        return parts if -(-self.rows // parts) == rows else Shares.of([rows, self.rows - rows])

    def _lowered(self, parts: int) -> Workload:
        if parts not in self._exact:
            rows = part(self.rows, parts, 0)[1] if self.batch else self.rows
            program = lower_place(self._resolved(parts), 0)
            blocks = _small_blocks(self.fold)
            self._exact[parts] = work_of(program, self.fold.graph, blocks, rows)
        return self._exact[parts]

    def _resolved(self, parts: int) -> Resolved:
        found = []
        for assignment in self.assignments:
            ranks = assignment.ranks
            if self.roles[assignment.axis] == "batch":
                if parts == 1:  # nothing is cut: a plan's mesh has no such axis
                    continue
                ranks = parts if assignment.axis == self.batch[0] else 1
            found.append(replace(assignment, ranks=ranks))
        graph = self.fold.graph
        plan = Plan(
            name="work",
            model=graph.name,
            fingerprint=model_fingerprint(graph),
            mesh=Mesh(axes=tuple((a.axis, a.ranks) for a in found)),
            roles={a.axis: self.roles[a.axis] for a in found},
        )
        return Resolved(graph=graph, plan=plan, facts=self.facts, assignments=tuple(found))


def _on_line(one: Workload, two: Workload, other: Workload) -> bool:
    """Whether a third program's flops and bytes are on the line through two."""
    line = one.between(two, other.rows)
    return all(
        abs(getattr(line, name) - getattr(other, name)) <= TOLERANCE * getattr(other, name)
        for name in ("flops", "moved_bytes")
    )


def batch_rows(graph: Graph) -> int:
    """The rows of the batch: the most common first size of the inputs."""
    sizes = [graph.values[i.value].shape[0] for i in graph.inputs if graph.values[i.value].shape]
    return max(set(sizes), key=lambda s: (sizes.count(s), s), default=1)


def _small_blocks(fold: FoldedGraph) -> list[str]:
    """The block of every node of the small graph."""
    blocks = [""] * len(fold.graph.nodes)
    for at, node in enumerate(fold.order):
        if node >= 0 and not blocks[node]:
            blocks[node] = fold.blocks[at]
    return blocks
