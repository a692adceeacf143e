"""The options that make a plan, shared by the verbs.

Enters: what was typed. Leaves: `Wanted`, which makes the plan.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from shardwise.ir import Graph
    from shardwise.plans import Plan

DEFAULT_RANKS = 2


class Strategy(StrEnum):
    """The named ways to make a plan."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    HYBRID = "hybrid"


def _option(kind: Any, name: str, text: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*name.split(), help=text, **more)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the options ask for."""

    strategy: _option(Strategy, "--strategy -s", "How to make the plan.") = Strategy.DDP  # type: ignore[valid-type]
    ranks: _option(  # type: ignore[valid-type]
        int | None, "--ranks -n", "Number of ranks.", min=1, show_default="2, or dp x tp x pp"
    ) = None
    dp: _option(int | None, "--dp", "hybrid: data-parallel ranks.", min=1) = None  # type: ignore[valid-type]
    tp: _option(int | None, "--tp", "hybrid: tensor-parallel ranks.", min=1) = None  # type: ignore[valid-type]
    pp: _option(int | None, "--pp", "hybrid: pipeline stages.", min=1) = None  # type: ignore[valid-type]
    stages: _option(int | None, "--stages", "pipeline: number of stages.", min=1) = None  # type: ignore[valid-type]
    zero: _option(int, "--zero", "hybrid: ZeRO level over dp.", min=0, max=3) = 0  # type: ignore[valid-type]
    microbatches: _option(int | None, "--microbatches -m", "Micro-batches of a step.", min=1) = None  # type: ignore[valid-type]
    per_microbatch: _option(  # type: ignore[valid-type]
        bool, "--per-microbatch", "Each micro-batch is a batch of its own."
    ) = False
    schedule: _option(  # type: ignore[valid-type]
        str | None, "--schedule", "gpipe, 1f1b, interleaved, zero_bubble, zb_v, or a file."
    ) = None
    recompute: _option(  # type: ignore[valid-type]
        str, "--recompute", "none, full, selective, or module globs with commas."
    ) = "none"
    precision: _option(str | None, "--precision", "bf16, fp16, bf16-autocast, …") = None  # type: ignore[valid-type]
    plan_file: _option(  # type: ignore[valid-type]
        Path | None, "--plan", "Use this plan file instead.", exists=True, dir_okay=False
    ) = None

    def plan(self, graph: Graph) -> Plan:
        """The plan for a graph."""
        import shardwise

        if self.plan_file is not None:
            loaded = shardwise.Plan.load(self.plan_file)
            loaded.check(graph)
            return loaded
        if self.strategy is Strategy.HYBRID:
            return self._hybrid(graph)
        given = [f"--{n}" for n in ("dp", "tp", "pp", "zero") if getattr(self, n)]
        if given:
            raise typer.BadParameter(f"{', '.join(given)}: for --strategy hybrid")
        options = self._options()
        if self.stages is not None:
            if self.strategy is not Strategy.PIPELINE:
                raise typer.BadParameter("--stages: for --strategy pipeline")
            options["stages"] = self.stages
        ranks = self.ranks or self.stages or DEFAULT_RANKS
        if self.strategy is Strategy.PIPELINE and self.stages is None:
            options["stages"] = ranks
        make = getattr(shardwise.strategies, self.strategy.value)
        result: Plan = make(graph, shardwise.Cluster.local(ranks), **options)
        return result

    def _hybrid(self, graph: Graph) -> Plan:
        import shardwise

        pp = self.pp or 1
        ranks = self.ranks or DEFAULT_RANKS * pp
        if ranks % pp:
            raise typer.BadParameter(f"{ranks} ranks cannot be divided by --pp {pp}")
        dp, tp = hybrid_sizes(ranks // pp, self.dp, self.tp)
        cluster = shardwise.Cluster.local(self.ranks or dp * tp * pp)
        options = self._options()
        return shardwise.strategies.hybrid(
            graph, cluster, dp=dp, tp=tp, pp=pp, zero=self.zero, **options
        )

    def _options(self) -> dict[str, Any]:
        """What all strategies take, as far as it was given."""
        globs = self.recompute.split(",")
        modes = ("none", "full", "selective")
        found: dict[str, Any] = {
            "num_microbatches": self.microbatches,
            "schedule": self.schedule,
            "precision": self.precision,
            "recompute": globs[0] if globs[0] in modes else globs,
            "per_microbatch": self.per_microbatch or None,
        }
        return {name: value for name, value in found.items() if value is not None}


def hybrid_sizes(ranks: int, dp: int | None, tp: int | None) -> tuple[int, int]:
    """Both axes' sizes: the one not given is what remains of `ranks`."""
    if dp is not None and tp is not None:
        return dp, tp
    if dp is None and tp is None:
        raise typer.BadParameter("--strategy hybrid needs --dp or --tp")
    given = dp if dp is not None else tp
    assert given is not None
    if given < 1 or ranks % given:
        raise typer.BadParameter(f"{ranks} ranks cannot be divided by {given}")
    rest = ranks // given
    return (given, rest) if dp is not None else (rest, given)


def with_plan_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with all options of `Wanted`, which it gets as one argument `wanted`."""
    hints = get_type_hints(verb, include_extras=True)
    own = [p for p in inspect.signature(verb).parameters.values() if p.name != "wanted"]
    shared = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=_hints()[f.name]
        )
        for f in fields(Wanted)
    ]

    @functools.wraps(verb)
    def run(**given: Any) -> None:
        wanted = Wanted(**{f.name: given.pop(f.name) for f in fields(Wanted)})
        verb(wanted=wanted, **given)

    keyword = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own
    ]
    run.__signature__ = inspect.Signature([*keyword[:1], *shared, *keyword[1:]])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*keyword, *shared)}
    return run


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Wanted, include_extras=True)
