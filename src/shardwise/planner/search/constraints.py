"""Cuts of parameters that the user fixed.

Enters: globs of parameters with their cuts, as `plan` takes them. Leaves: placements by value and
mesh axis, and whether any of them needs tensor-parallel ranks; what cannot be is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from shardwise.errors import InfeasiblePlan, PlanError, RuleError, did_you_mean
from shardwise.ir import Graph
from shardwise.planner.search.space import Fixed
from shardwise.sharding.placements import REPLICATE, Placement, parse_shard

TENSOR_AXES = ("tp", "tp1")
SHOWN = 3  # names of parameters in a hint

Cuts = dict[str, dict[str, Placement]]  # by value and mesh axis


def fixed_parameters(graph: Graph, constraints: Mapping[str, Any]) -> Cuts:
    """Placements by value and mesh axis that the user's constraints ask for."""
    if not isinstance(constraints, Mapping):
        raise PlanError(
            f"constraints={constraints!r} is no mapping of globs to cuts",
            hint='constraints={"lm_head.*": "0"}',
        )
    found: Cuts = {}
    for glob, wanted in constraints.items():
        cuts = wanted if isinstance(wanted, Mapping) else {"tp": wanted}
        cuts = cuts.get("layout", cuts)
        for axis in cuts:
            if axis not in TENSOR_AXES:
                near = did_you_mean(str(axis), TENSOR_AXES)
                raise PlanError(
                    f"constraint {glob!r}: no mesh axis {axis!r} cuts parameters{near}",
                    hint='{"tp": "0"}, or "0" alone',
                )
        for name, value in _matched(graph, str(glob)):
            shape = graph.values[value].shape
            for axis, cut in cuts.items():
                placement = _placement(str(cut), shape, f"constraint {glob!r} on {name}")
                found.setdefault(value, {})[axis] = placement
    return found


def _matched(graph: Graph, glob: str) -> list[tuple[str, str]]:
    """Names and values of the parameters; a tied one also has its other names."""
    matched = [
        (p.name, p.value)
        for p in graph.parameters
        if any(fnmatchcase(name, glob) for name in (p.name, *p.aliases))
    ]
    if not matched:
        names = [name for p in graph.parameters for name in (p.name, *p.aliases)]
        near = get_close_matches(glob.replace("*", ""), names, n=SHOWN, cutoff=0.0)
        raise PlanError(
            f"constraint {glob!r} matches none of the {len(names)} parameters",
            hint=", ".join(near),
        )
    return matched


def _placement(cut: str, shape: tuple[int, ...], what: str) -> Placement:
    try:
        return REPLICATE if cut == "whole" else parse_shard(cut, shape)
    except RuleError as error:
        hint = error.hint or '"0" cuts the first dim, "whole" none'
        raise PlanError(f"{what}: {error.message}", hint=hint) from None


def as_texts(constraints: Mapping[str, Any]) -> dict[str, Any]:
    """The constraints as a plan's file has them."""
    return {
        str(glob): {axis: str(cut) for axis, cut in wanted.get("layout", wanted).items()}
        if isinstance(wanted, Mapping)
        else str(wanted)
        for glob, wanted in constraints.items()
    }


def least_tensor_ranks(cuts: Cuts, fixed: Fixed, num_ranks: int) -> int:
    """2 where something is to be cut, which one rank alone cannot; refused where there is one."""
    if not any(_cuts(placements.values()) for placements in cuts.values()):
        return 1
    others = (fixed.dp or 1) * (fixed.pp or 1)
    if fixed.tp == 1 or others >= num_ranks:
        given = {name: n for name in ("dp", "tp", "pp") if (n := getattr(fixed, name))}
        said = ", ".join(f"{name}={n}" for name, n in given.items()) or "one rank"
        free = f"leave {', '.join(given)} to the planner" if num_ranks > 1 else "more ranks"
        raise InfeasiblePlan(
            f"constraints cut parameters over tensor-parallel ranks; with {said} of {num_ranks} "
            "there is none to cut them over",
            hint=f"{free}, or no constraints",
        )
    return 2


def _cuts(placements: Iterable[Placement]) -> bool:
    return any(placement != REPLICATE for placement in placements)
