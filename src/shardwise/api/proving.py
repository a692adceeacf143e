"""Where plans of one model are rehearsed and tried: `proving_ground`.

Enters: a graph and a cluster, before anything is computed with them. Leaves: a
`ProvingGround`, whose plans run in forks of the process as it was (`processes.fork_server`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.api.rehearsal import Rehearsal, rehearse
from shardwise.api.trials import try_plans
from shardwise.cluster import Cluster
from shardwise.cost import OpTable
from shardwise.cost.calls import measure_job
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.processes import TIMEOUT_S, Ask, fork_ranks, fork_server

MEASURING_S = 600.0  # the most that the calls of one plan may take


class ProvingGround:
    """Runs plans of one model on this machine, and calls of their programs."""

    def __init__(self, graph: Graph, cluster: Cluster, ask: Ask | None = None) -> None:
        self.graph, self.cluster, self._ask = graph, cluster, ask

    def rehearse(self, plan: Plan) -> Rehearsal:
        """The plan's programs without communication."""
        if self._ask is None:
            return rehearse(self.graph, plan, self.cluster)
        found = self._ask({"rehearse": _written(plan)})
        return Rehearsal(
            **{name: {int(g): s for g, s in times.items()} for name, times in found.items()}
        )

    def try_plans(self, plans: Sequence[Plan]) -> list[float]:
        """Seconds of a step of each plan, with all communication."""
        if self._ask is None:
            return try_plans(self.graph, plans, self.cluster)
        found: list[float] = self._ask({"try": [_written(plan) for plan in plans]})
        return found

    def measure(self, job: dict[str, Any], ranks: int) -> list[OpTable]:
        """What each of some processors' ranks takes for the same calls at the same time."""
        if self._ask is None:
            return _measured(job, ranks)
        found = self._ask({"measure": job, "ranks": ranks})
        return [OpTable.from_json(table) for table in found]

    def serve(self, question: dict[str, Any]) -> Any:
        """What the fork that stands by answers."""
        if "try" in question:
            plans = [Plan.from_json(data) for data in question["try"]]
            return try_plans(self.graph, plans, self.cluster)
        if "measure" in question:
            return [t.to_json() for t in _measured(question["measure"], question["ranks"])]
        return asdict(rehearse(self.graph, Plan.from_json(question["rehearse"]), self.cluster))


@contextlib.contextmanager
def proving_ground(graph: Graph, cluster: Cluster) -> Iterator[ProvingGround]:
    """For plans of one model; GPUs are used by this process itself."""
    if cluster.device(0).kind != "cpu":
        yield ProvingGround(graph, cluster)
        return
    serve = ProvingGround(graph, cluster).serve
    with fork_server(serve, timeout_s=MEASURING_S + TIMEOUT_S) as ask:
        yield ProvingGround(graph, cluster, ask)


def _measured(job: dict[str, Any], ranks: int) -> list[OpTable]:
    found = fork_ranks(lambda *_: measure_job(job).to_json(), ranks, timeout_s=MEASURING_S)
    return [OpTable.from_json(table) for table in found]


def _written(plan: Plan) -> dict[str, Any]:
    return plan.with_(search=None).to_json()
