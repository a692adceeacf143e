"""All that a plan's file tells of its step, for reports that are made without the model.

Enters: a simulated step. Leaves: `details` of a plan's `search`: the cluster, modules, links and
what-if. `figures` makes a whole `search` for a plan that was not searched for, or was edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from shardwise.cluster import Cluster
from shardwise.cluster.cluster import AS_HERE
from shardwise.cost import OpTable
from shardwise.ir import Graph
from shardwise.messages.choice import chosen
from shardwise.planner.search.details.memory import memory_curves
from shardwise.planner.search.details.modules import module_tree
from shardwise.planner.search.details.subject import Subject
from shardwise.planner.search.details.traffic import link_traffic
from shardwise.planner.search.details.what_if import what_if
from shardwise.planner.search.replay import sealed, step_json
from shardwise.planner.search.report import batch_sizes, binding, price_per_hour
from shardwise.plans import Plan
from shardwise.simulation.estimate import Evaluator
from shardwise.simulation.memory import peak_of
from shardwise.simulation.simulate import as_run, check_plan, setting_of, works_of

GIB = 2**30


def details(
    subject: Subject,
    plan: Plan,
    relaxed: Sequence[Mapping[str, Any]] = (),
    memory_limit: float | None = None,
) -> dict[str, Any]:
    """`details` of a plan's `search`."""
    return {
        "cluster": cluster_json(subject.evaluator.cluster),
        "modules": module_tree(subject, plan),
        "memory": memory_curves(subject),
        "links": link_traffic(subject),
        "what_if": what_if(subject, relaxed, memory_limit),
    }


def cluster_json(cluster: Cluster) -> dict[str, Any]:
    """The machines as `Cluster.from_yaml` reads them, without how they are reached.

    Addresses, keys and environments of a cluster file are no business of a report's readers.
    """
    nodes = tuple(replace(n, address="", ssh=None, start=AS_HERE) for n in cluster.nodes)
    shown: dict[str, Any] = yaml.safe_load(replace(cluster, nodes=nodes, start=AS_HERE).to_yaml())
    return shown


def figures(graph: Graph, plan: Plan, cluster: Cluster, table: OpTable | None = None) -> Plan:
    """The plan with a `search` of its own figures, simulated anew on `cluster`."""
    cluster = check_plan(graph, plan, cluster)
    fold, works = works_of(graph, plan)
    setting = setting_of(plan, fold)
    evaluator = Evaluator(fold, cluster, table, chosen(plan.collectives))
    estimate = evaluator.estimate(works, setting)
    subject = Subject(
        graph=as_run(graph, plan),
        works=works,
        setting=setting,
        evaluator=evaluator,
        estimate=estimate,
    )
    search = {
        "cluster": {
            "name": cluster.name,
            "fingerprint": cluster.fingerprint,
            "num_ranks": cluster.num_ranks,
            "price_per_hour": price_per_hour(cluster),
        },
        "batch": batch_sizes(graph, estimate.rows),
        "fixed": {},
        "best": {
            "what": short_name(plan),
            "point": {},
            "step_time_s": estimate.step_time_s,
            "bubble_fraction": estimate.timeline.bubble_fraction,
            "causes": dict(estimate.timeline.causes),
            "memory": peak_of(estimate.memory).to_json(),
            "rows": estimate.rows,
        },
        "runners_up": [],
        "gap": None,
        "binding": binding(estimate, ()),
        "relaxations": [],
        "layers": [],
        **step_json(estimate, setting, evaluator),
    }
    made = sealed(plan.with_(search=search))
    return made.with_(search={**made.search, "details": details(subject, made)})


def short_name(plan: Plan) -> str:
    """The plan in a line, as points of a search are."""
    parts = [f"{axis}={int(n)}" for axis, n in plan.mesh.axes]
    parts += [f"pp={len(plan.groups)}"] if len(plan.groups) > 1 else []
    parts = parts or ["1 rank"]
    if isinstance(plan.schedule, str) and plan.schedule:
        parts.append(plan.schedule)
    if plan.num_microbatches > 1:
        parts.append(f"{plan.num_microbatches} micro-batches")
    levels = sorted({entry.zero for entry in plan.parameters.values() if entry.zero})
    parts += [f"zero {'/'.join(map(str, levels))}"] if levels else []
    if plan.recompute != "none":
        again = plan.recompute if isinstance(plan.recompute, str) else "of some modules"
        parts.append(f"recompute {again}")
    parts += [f"offload {'+'.join(plan.offload)}"] if plan.offload else []
    return ", ".join(parts)
