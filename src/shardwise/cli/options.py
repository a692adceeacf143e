"""The options that make a plan, shared by the verbs."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from shardwise.cli.output import load_plan
from shardwise.errors import ConfigError, ShardwiseError, did_you_mean, failed
from shardwise.planner.strategies import find_strategy, strategy_names
from shardwise.schedules import SCHEDULES

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.cost import OpTable
    from shardwise.ir import Graph
    from shardwise.plans import Plan


DEFAULT_RANKS = 2


def _check_strategy(name: str | None) -> str | None:
    """Refuse an unknown strategy while options are parsed, before a model is built for it."""
    return _one_of("strategy", name, strategy_names())


def _option(kind: Any, name: str, text: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*name.split(), help=text, **more)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the options ask for."""

    strategy: _option(  # type: ignore[valid-type]
        str | None,
        "--strategy -s",
        f"Named strategy: {', '.join(strategy_names())}.",
        show_default="ddp; none with --cluster",
        callback=_check_strategy,
    ) = None
    cluster: _option(  # type: ignore[valid-type]
        str | None, "--cluster -c", "Cluster: a file, or h100:8x8 (8 nodes of 8)."
    ) = None
    ranks: _option(  # type: ignore[valid-type]
        int | None, "--ranks -n", "Number of ranks.", min=1, show_default="2, or dp x tp x pp"
    ) = None
    dp: _option(int | None, "--dp", "Data-parallel ranks.", min=1) = None  # type: ignore[valid-type]
    tp: _option(int | None, "--tp", "Tensor-parallel ranks.", min=1) = None  # type: ignore[valid-type]
    pp: _option(int | None, "--pp", "Pipeline-parallel groups of ranks.", min=1) = None  # type: ignore[valid-type]
    virtual_stages: _option(  # type: ignore[valid-type]
        int | None, "--virtual-stages", "Pipeline stages on each group.", min=1
    ) = None
    zero: _option(int | None, "--zero", "ZeRO level over dp.", min=0, max=3) = None  # type: ignore[valid-type]
    num_microbatches: _option(  # type: ignore[valid-type]
        int | None, "--num-microbatches -m", "Micro-batches of a step.", min=1
    ) = None
    per_microbatch: _option(  # type: ignore[valid-type]
        bool, "--per-microbatch", "Each micro-batch is a batch of its own."
    ) = False
    schedule: _option(  # type: ignore[valid-type]
        str | None, "--schedule", f"{', '.join(SCHEDULES)}, or a file."
    ) = None
    recompute: _option(  # type: ignore[valid-type]
        str | None, "--recompute", "none, full, selective, or module globs with commas."
    ) = None
    offload: _option(  # type: ignore[valid-type]
        str | None, "--offload", "To host memory: optimizer, activations, parameters; none."
    ) = None
    precision: _option(str | None, "--precision", "bf16, fp16, bf16-autocast, …") = None  # type: ignore[valid-type]
    memory_gib: _option(  # type: ignore[valid-type]
        float | None,
        "--memory-gib",
        "Memory limit per device, with --cluster.",
        min=1e-6,
    ) = None
    constraint: _option(  # type: ignore[valid-type]
        list[str], "--constraint", "How to shard parameters: 'lm_head.*=0'."
    ) = field(default_factory=list)
    table: _option(  # type: ignore[valid-type]
        Path | None, "--table", "Measured times of operators.", exists=True, dir_okay=False
    ) = None
    all_devices: _option(  # type: ignore[valid-type]
        bool,
        "--all-devices",
        "Use all devices, even those that slow the step down, with --cluster.",
    ) = False
    no_progress: _option(bool, "--no-progress", "Do not show progress.") = False  # type: ignore[valid-type]
    plan_file: _option(  # type: ignore[valid-type]
        Path | None, "--plan", "Use this plan file instead.", exists=True, dir_okay=False
    ) = None

    @property
    def automatic(self) -> bool:
        """Whether the planner decides."""
        return self.cluster is not None and self.strategy is None and self.plan_file is None

    def loaded_plan(self) -> Plan | None:
        """The plan of a file, if one was named."""
        return None if self.plan_file is None else load_plan(self.plan_file)

    def plan(self, graph: Graph) -> Plan:
        """The plan for a graph."""
        loaded = self.loaded_plan()
        if loaded is not None:
            loaded.check(graph)
            return loaded
        if self.automatic:
            return self._searched(graph)
        return self._named(graph)

    def machines(self) -> Cluster | None:
        """The cluster that was named."""
        if self.cluster is None:
            return None

        cluster = cluster_of(self.cluster)
        if self.ranks not in (None, cluster.num_ranks):
            raise typer.BadParameter(
                f"--ranks {self.ranks}, --cluster {self.cluster} has {cluster.num_ranks}"
            )
        return cluster

    # ------------------------------------------------------------ the planner's

    def _searched(self, graph: Graph) -> Plan:
        import shardwise

        cluster = self.machines()
        assert cluster is not None
        return shardwise.plan(
            graph,
            cluster,
            progress=not self.no_progress,
            all_devices=self.all_devices,
            **self.search_options(),
        )

    def hide_unplanned_gpus(self) -> None:
        """From models and torch, where a plan is for processors: ranks that are tried are forks,
        which cannot compute if this process has woken the driver of a GPU.
        """
        cluster = self.machines()
        if cluster is not None and all(node.devices[0].kind == "cpu" for node in cluster.nodes):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def tuned_plan(self, graph: Graph, table_out: Path | None) -> Plan:
        """Return the plan that is the fastest by times measured here, and write these times."""
        import shardwise
        from shardwise.cost import OpTable
        from shardwise.reports.sections import writing

        options = self.search_options()
        table = options.pop("table", None) or OpTable()
        if table_out is not None and table_out.exists():
            table.merge(OpTable.load(table_out))
        cluster = self.machines()
        assert cluster is not None
        progress = not self.no_progress
        made = shardwise.tune(graph, cluster, table=table, progress=progress, **options)
        if table_out is not None:
            with writing(table_out, option="--table-out"):
                table_out.parent.mkdir(parents=True, exist_ok=True)
                table.save(table_out)
        return made

    def search_options(self) -> dict[str, Any]:
        """The keyword arguments of `sw.plan` that were given."""
        if self.per_microbatch:
            raise typer.BadParameter("--per-microbatch: for a named --strategy")
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "dp",
                "tp",
                "pp",
                "virtual_stages",
                "zero",
                "num_microbatches",
                "precision",
            )
        }
        found["memory_gib"] = self.memory_gib
        found["constraints"] = constraints_of(self.constraint) or None
        found["table"] = self._table()
        found["schedule"] = _one_of("schedule", self.schedule, tuple(SCHEDULES))
        found["recompute"] = _one_of("recompute", self.recompute, ("none", "selective", "full"))
        found["offload"] = None if self.offload is None else _offloads(self.offload)
        return {name: value for name, value in found.items() if value is not None}

    def _table(self) -> OpTable | None:
        if self.table is None:
            return None
        from shardwise.cost import OpTable

        return OpTable.load(self.table)

    # ------------------------------------------------------------ named strategies

    def _named(self, graph: Graph) -> Plan:
        import shardwise
        from shardwise.planner.options import option_names

        for option in ("memory_gib", "table", "all_devices"):
            if getattr(self, option):
                raise typer.BadParameter(f"--{_typed(option)}: with --cluster, without --strategy")
        strategy = find_strategy(self.strategy or "ddp")
        sizes = ("dp", "tp", "pp", "virtual_stages", "zero")
        given = {size: getattr(self, size) for size in sizes if getattr(self, size)}
        known = option_names(strategy)
        unused = [f"--{_typed(size)}" for size in given if size not in known]
        if unused:
            raise typer.BadParameter(
                f"{', '.join(unused)}: for --strategy hybrid, or with --cluster and no strategy"
            )
        cluster = self.machines() or shardwise.Cluster.local(self.ranks or self._num_ranks(known))
        if self.dp and not self.tp:  # `hybrid` itself fills in dp where tp is given
            given["tp"] = max(1, cluster.num_ranks // (self.dp * (self.pp or 1)))
        return strategy(graph, cluster, **self._options(), **given)

    def _num_ranks(self, known: Sequence[str]) -> int:
        """Return as many ranks as the sizes ask for, or two for an axis that is left open."""
        size: int = math.prod((self.dp or 1, self.tp or 1, self.pp or 1))
        is_open = not (self.dp and self.tp) if "dp" in known else not self.pp
        return max(size, DEFAULT_RANKS * (self.pp or 1)) if is_open else size

    def _options(self) -> dict[str, Any]:
        """Return the given options that all strategies take."""
        from shardwise.plans.execution import RECOMPUTE_MODES

        globs = self.recompute.split(",") if self.recompute else None
        found: dict[str, Any] = {
            "num_microbatches": self.num_microbatches,
            "constraints": constraints_of(self.constraint) or None,
            "schedule": self.schedule,
            "precision": self.precision,
            "recompute": globs[0] if globs and globs[0] in RECOMPUTE_MODES else globs,
            "per_microbatch": self.per_microbatch or None,
            "offload": None if self.offload is None else _offloads(self.offload),
        }
        return {name: value for name, value in found.items() if value is not None}


def constraints_of(texts: list[str]) -> dict[str, str | dict[str, str]]:
    """Cuts by glob: `GLOB=CUT`, or `GLOB=AXIS:CUT` for one mesh axis.

    >>> constraints_of(["lm_head.*=0", "tok.weight=tp:whole"])
    {'lm_head.*': '0', 'tok.weight': {'tp': 'whole'}}
    """
    found: dict[str, str | dict[str, str]] = {}
    for text in texts:
        glob, equals, cut = text.rpartition("=")
        if not equals or not glob or not cut:
            raise typer.BadParameter(f"--constraint {text!r} is not GLOB=CUT, as 'lm_head.*=0'")
        axis, colon, rest = cut.partition(":")
        named = colon and axis.isalpha() and rest
        found[glob] = {axis: rest} if named else cut
    return found


def _typed(name: str) -> str:
    return name.replace("_", "-")


def _one_of(option: str, value: str | None, known: tuple[str, ...]) -> str | None:
    if value is not None and value not in known:
        more = "" if option == "strategy" else "; more with --strategy"
        raise typer.BadParameter(
            f"--{option} {value!r}{did_you_mean(value, known)} One of {', '.join(known)}{more}"
        )
    return value


def _offloads(text: str) -> tuple[str, ...]:
    from shardwise.plans.execution import OFFLOADS

    names = tuple(name for name in text.split(",") if name and name != "none")
    for name in names:
        _one_of("offload", name, OFFLOADS)
    return names


def with_plan_options(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with all options of `Wanted`, which it gets as one argument `wanted`."""
    hints = get_type_hints(verb, include_extras=True)
    own = [p for p in inspect.signature(verb).parameters.values() if p.name != "wanted"]
    shared = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=[] if f.default is MISSING else f.default,
            annotation=_hints()[f.name],
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


# The model that was named: its function is called, its graph captured in the wanted number types.


Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE.py:FUNCTION",
        help="A function returning (model, batch) or (model, batch, loss_fn); "
        "also package.module:FUNCTION.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Perfetto = Annotated[
    Path | None,
    typer.Option("--perfetto", help="Output file: timelines for https://ui.perfetto.dev."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a target's function returned."""

    model: Any
    batch: Any
    loss_fn: Callable[[Any, Any], Any] | None = None


def load_target(target: str) -> Loaded:
    """Call the function that `path/module.py:function` or `package.module:function` names."""
    from shardwise.training.planning import load_object, module_is_missing

    module, separator, name = target.rpartition(":")
    if not separator or not name or not module or (os.sep in module and module[-3:] != ".py"):
        raise typer.BadParameter(
            f"{target!r} is not of the form MODULE.py:FUNCTION or package.module:FUNCTION"
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise typer.BadParameter(f"no file {module}")
    if not module.endswith(".py") and module_is_missing(module):
        raise typer.BadParameter(
            f"no module {module!r} here or installed; a file is named with its ending: "
            f"{module.replace('.', '/')}.py:{name}"
        )
    try:
        function = load_object(target, target)
    except ConfigError as error:
        if error.where != target:  # a fault in the user's own code
            raise
        raise typer.BadParameter(error.message) from error
    if not callable(function):
        raise typer.BadParameter(f"{name!r} in {module} is no function")
    try:
        result = function()
    except Exception as error:
        raise failed(ShardwiseError, target, error) from error
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise typer.BadParameter(
            f"{target} returned {type(result).__name__}, "
            "not (model, batch) or (model, batch, loss_fn)"
        )
    return Loaded(model=result[0], batch=result[1], loss_fn=result[2] if result[2:] else None)


def capture_target(
    target: str, *, precision: str | None = None, plan: Plan | None = None
) -> tuple[Loaded, Graph]:
    """Return the model and its graph, in the dtypes of `plan` or else of `precision`."""
    import shardwise

    shardwise.Precision.of(precision)  # refuse an unknown one before the model is built
    loaded = load_target(target)
    graph = shardwise.capture(
        loaded.model,
        loaded.batch,
        loaded.loss_fn,
        plan=plan,
        precision=None if plan is not None else precision,
    )
    return loaded, graph


# A cluster from what was typed; torch is imported when it is made, not with the command line.


def cluster_of(text: str) -> Cluster:
    """The cluster that a file describes, or one of equal nodes of a known kind."""
    from shardwise.api import clusters

    return clusters.cluster_of(text)
