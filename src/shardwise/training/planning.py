"""The machines and the plan that a config asks for.

Enters: a config, a model and an example of its batches. Leaves: `Cluster`, `Graph` and `Plan`; no
process is needed, so that a plan for machines that are not here can be made and judged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.api.captured import capture
from shardwise.api.clusters import SUFFIXES, cluster_of
from shardwise.cluster import Cluster
from shardwise.cluster.presets import preset, preset_names
from shardwise.errors import ConfigError, RankError, did_you_mean
from shardwise.ir import Graph
from shardwise.planner.options import option_names
from shardwise.planner.plan import plan as search
from shardwise.planner.strategies import find_strategy, strategy_names
from shardwise.plans import Plan, Precision, used_devices
from shardwise.training.config import PlanConfig, TrainConfig
from shardwise.training.imports import find_file, load_object, make

__all__ = ["Planned", "check_plan_name", "find_cluster", "make_planned"]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What will run: the graph, its plan, and the machines it was made for."""

    graph: Graph
    plan: Plan
    cluster: Cluster
    known_machines: bool  # whether the cluster's rates are these machines'


def find_cluster(
    config: TrainConfig,
    ranks: int | None,
    device: str,
    base: Path | None,
    plan: Plan | None = None,
) -> tuple[Cluster, bool]:
    """The machines, and whether their rates are known rather than assumed.

    `ranks` are those that were started, None where nothing runs; a `plan` may use some of them.
    """
    if config.cluster is None:
        return _this_machine(ranks or 1, device)
    found = config.cluster
    if isinstance(found, str):
        is_file = Path(found).suffix in SUFFIXES
        found = cluster_of(str(find_file(found, base)) if is_file else found)
    if not isinstance(found, Cluster):
        raise ConfigError(f"a {type(found).__name__} is no cluster", where="cluster")
    if plan is not None:
        found = used_devices(plan, found)
    if ranks is not None and found.num_ranks != ranks:
        raise RankError(
            f"cluster {found.name} has {found.num_ranks} ranks, {ranks} are started",
            hint=f"shardwise train … --ranks {found.num_ranks}, torchrun with as many processes, "
            "or no cluster for this machine; --dry-run judges machines that are not here",
        )
    return found, True


def _this_machine(ranks: int, device: str) -> tuple[Cluster, bool]:
    if device != "cuda" or not torch.cuda.is_available():
        return Cluster.local(ranks), False
    name = torch.cuda.get_device_name().lower()
    total = torch.cuda.get_device_properties(0).total_memory
    kinds = [kind for kind in preset_names() if kind.partition("-")[0] in name]
    sized = {kind: abs(preset(kind).device(0).memory_bytes - total) for kind in kinds}
    if not sized:
        return Cluster.local(ranks), False
    here = min(torch.cuda.device_count(), ranks)
    nodes, rest = divmod(ranks, here)
    shape = {"nodes": nodes, "devices_per_node": here} if not rest else {"devices_per_node": ranks}
    return preset(min(sized, key=lambda kind: sized[kind]), **shape), True


def make_planned(
    config: TrainConfig,
    model: nn.Module,
    batch: Any,
    loss_fn: Any,
    *,
    ranks: int | None,
    device: str,
    base: Path | None,
) -> Planned:
    """Capture the model and make the plan; every rank comes to the same one."""
    wanted = config.plan
    given = _given_plan(wanted, base)
    if given is not None and ranks is None and config.cluster is None:
        ranks = given.num_ranks
    cluster, known = find_cluster(config, ranks, device, base, given)
    if given is not None and config.precision is not None:
        _require(given.precision == Precision.of(config.precision), "precision", config.precision)
    if given is not None and config.num_microbatches > 1:
        _require(
            given.num_microbatches == config.num_microbatches,
            "num_microbatches",
            config.num_microbatches,
        )
    precision = config.precision if given is None else None
    graph = capture(model, batch, loss_fn, plan=given, precision=precision)
    if given is None:
        _require_known(config, known, device)
        plan = _made(config, graph, cluster, base, started=ranks is not None)
        cluster = used_devices(plan, cluster)
    else:
        given.check(graph)
        plan = given
    if plan.num_ranks != cluster.num_ranks:
        raise RankError(
            f"the plan {plan.name!r} is for {plan.num_ranks} ranks, there are {cluster.num_ranks}",
            hint=f"shardwise train … --ranks {plan.num_ranks}, or plan: auto",
        )
    return Planned(graph=graph, plan=plan, cluster=cluster, known_machines=known)


def check_plan_name(config: TrainConfig, base: Path | None) -> None:
    """Say that there is no such plan, before a model is built for it."""
    wanted, known = config.plan, ("auto", *strategy_names())
    if isinstance(wanted, PlanConfig) and wanted.name not in known and ":" not in wanted.name:
        if wanted.name.endswith(".json"):
            _given_plan(wanted, base)
            return
        raise ConfigError(
            f"no strategy {wanted.name!r}{did_you_mean(wanted.name, known)}",
            where="plan",
            hint=f"{', '.join(known)}, plan.json, or file.py:function",
        )


def _given_plan(wanted: Any, base: Path | None) -> Plan | None:
    if isinstance(wanted, Plan):
        return wanted
    if isinstance(wanted, PlanConfig) and wanted.name.endswith(".json"):
        if wanted.args:
            raise ConfigError("a plan's file takes no arguments", where="plan.args")
        path = find_file(wanted.name, base)
        if not os.path.isfile(path):
            raise ConfigError(
                f"no plan {wanted.name}", where="plan", hint="shardwise plan … -o plan.json"
            )
        return Plan.load(path)
    return None


def _require(same: bool, field: str, value: Any) -> None:
    if not same:
        raise ConfigError(
            f"{field}: {value!r} is not what the plan's file says",
            where=field,
            hint=f"leave {field} out, or make the plan with it",
        )


def _require_known(config: TrainConfig, known: bool, device: str) -> None:
    automatic = isinstance(config.plan, PlanConfig) and config.plan.name == "auto"
    if automatic and device == "cuda" and not known:
        raise ConfigError(
            f"plan: auto needs the rates of {torch.cuda.get_device_name()}, which has no preset",
            where="cluster",
            hint="shardwise profile --out cluster.yaml, then cluster: cluster.yaml; or plan: fsdp",
        )


def _made(
    config: TrainConfig, graph: Graph, cluster: Cluster, base: Path | None, *, started: bool
) -> Plan:
    """The plan of a search, of a named strategy, or of the user's own function.

    Processes that were started already are all used.
    """
    wanted: Any = config.plan
    if not isinstance(wanted, PlanConfig):
        return _own(wanted, getattr(wanted, "__name__", "plan"), graph, cluster, {})
    args = dict(wanted.args)
    if ":" in wanted.name:
        own = load_object(wanted.name, "plan", base)
        return _own(own, wanted.name, graph, cluster, args)
    if wanted.name == "auto":
        if config.num_microbatches > 1:
            args.setdefault("num_microbatches", config.num_microbatches)
        if started:
            args.setdefault("all_devices", True)
        return _called(
            search, {"progress": False, "precision": config.precision, **args}, graph, cluster
        )
    args = {"seed": config.seed, "precision": config.precision, **args}
    if config.num_microbatches > 1:
        args.setdefault("num_microbatches", config.num_microbatches)
    return _called(find_strategy(wanted.name), args, graph, cluster)


def _called(function: Any, args: Mapping[str, Any], graph: Graph, cluster: Cluster) -> Plan:
    known = option_names(function)
    for name in args:
        if name not in known:
            raise ConfigError(
                f"{function.__name__} has no option {name!r}{did_you_mean(name, known)}",
                where="plan.args",
                hint=", ".join(known),
            )
    found: Plan = function(graph, cluster, **args)
    return found


def _own(function: Any, name: str, graph: Graph, cluster: Cluster, args: dict[str, Any]) -> Plan:
    found = make(lambda **given: function(graph, cluster, **given), args, "plan", name)
    if not isinstance(found, Plan):
        raise ConfigError(
            f"{name} returned a {type(found).__name__}, not a Plan",
            where="plan",
            hint="def strategy(graph, cluster, **options) -> sw.Plan",
        )
    return found
