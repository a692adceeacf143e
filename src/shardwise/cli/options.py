"""Options and arguments that several commands share: the model, the cluster and the plan.

Torch is imported only when an option is used, which keeps `shardwise --help` fast.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from shardwise.cli.output import load_plan, writing
from shardwise.errors import ConfigError, ShardwiseError, did_you_mean, failed
from shardwise.planner.strategies import find_strategy, strategy_names
from shardwise.schedules import SCHEDULES

if TYPE_CHECKING:
    from shardwise.cluster import Cluster
    from shardwise.cost import OpTable
    from shardwise.ir import Graph
    from shardwise.plans import Plan

DEFAULT_RANKS = 2


def option(names: str, help: str, **settings: Any) -> Any:
    """Return an option of a command; `names` are separated by spaces."""
    return typer.Option(*names.split(), help=help, **settings)


def argument(metavar: str, help: str) -> Any:
    """Return a positional argument of a command."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


SIZES = ("dp", "ep", "cp", "tp", "pp", "virtual_stages", "zero")

Target = Annotated[
    str,
    argument(
        "MODULE.py:FUNCTION",
        "Function returning (model, batch) or (model, batch, loss_fn); "
        "also package.module:FUNCTION.",
    ),
]
AsJson = Annotated[bool, option("--json", "Print JSON.")]
Perfetto = Annotated[
    Path | None, option("--perfetto", "Output file: timelines for https://ui.perfetto.dev.")
]
Table = Annotated[
    Path | None,
    option("--table", "File with measured times of operators.", exists=True, dir_okay=False),
]
Simulated = Annotated[
    str | None, option("--cluster -c", "Cluster to simulate: a file, or h100:8x8.")
]
PlanFile = Annotated[Path, argument("PLAN.json", "Plan written by `shardwise plan -o`.")]
PlanOut = Annotated[Path | None, option("--out -o", "Output file: the plan.")]
NoProgress = Annotated[bool, option("--no-progress", "Do not show progress.")]


def _size(names: str, help: str, **limits: Any) -> Any:
    return option(names, help, **{"min": 1, **limits})


def _check_strategy(name: str | None) -> str | None:
    """Refuse an unknown strategy before the model is built."""
    return _one_of("strategy", name, strategy_names())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that describe a plan; each field is an option of the command line."""

    strategy: Annotated[
        str | None,
        option(
            "--strategy -s",
            f"Named strategy: {', '.join(strategy_names())}.",
            show_default="ddp; none with --cluster",
            callback=_check_strategy,
        ),
    ] = None
    cluster: Annotated[
        str | None, option("--cluster -c", "Cluster: a file, or h100:8x8 (8 nodes of 8).")
    ] = None
    ranks: Annotated[
        int | None, _size("--ranks -n", "Number of ranks.", show_default="2, or dp x ep x tp x pp")
    ] = None
    dp: Annotated[int | None, _size("--dp", "Data-parallel ranks.")] = None
    ep: Annotated[int | None, _size("--ep", "Expert-parallel ranks.")] = None
    cp: Annotated[int | None, _size("--cp", "Context-parallel ranks.")] = None
    tp: Annotated[int | None, _size("--tp", "Tensor-parallel ranks.")] = None
    pp: Annotated[int | None, _size("--pp", "Pipeline-parallel groups.")] = None
    virtual_stages: Annotated[
        int | None, _size("--virtual-stages", "Pipeline stages per group.")
    ] = None
    zero: Annotated[int | None, _size("--zero", "ZeRO level over dp.", min=0, max=3)] = None
    num_microbatches: Annotated[
        int | None, _size("--num-microbatches -m", "Micro-batches per step.")
    ] = None
    sequence_parallel: Annotated[
        bool, option("--sequence-parallel", "Shard sequences over tp, with --strategy.")
    ] = False
    attention: Annotated[
        str | None, option("--attention", "Over cp: gather, ring or heads, with --strategy.")
    ] = None
    per_microbatch: Annotated[
        bool, option("--per-microbatch", "Treat each micro-batch as a separate batch.")
    ] = False
    schedule: Annotated[str | None, option("--schedule", f"{', '.join(SCHEDULES)}, or a file.")] = (
        None
    )
    recompute: Annotated[
        str | None, option("--recompute", "none, full, selective, or comma-separated module globs.")
    ] = None
    offload: Annotated[
        str | None, option("--offload", "Move to host memory: optimizer, activations, parameters.")
    ] = None
    precision: Annotated[str | None, option("--precision", "bf16, fp16, bf16-autocast, …")] = None
    memory_gib: Annotated[
        float | None, option("--memory-gib", "Memory limit per device, with --cluster.", min=1e-6)
    ] = None
    constraint: Annotated[
        list[str], option("--constraint", "Sharding of parameters: 'lm_head.*=0'.")
    ] = field(default_factory=list)
    table: Table = None
    all_devices: Annotated[
        bool, option("--all-devices", "Use all devices, even if fewer were faster, with --cluster.")
    ] = False
    no_progress: NoProgress = False
    plan_file: Annotated[
        Path | None, option("--plan", "Use this plan file.", exists=True, dir_okay=False)
    ] = None

    @property
    def is_automatic(self) -> bool:
        """Whether the planner searches for the plan."""
        return self.cluster is not None and self.strategy is None and self.plan_file is None

    def load_plan(self) -> Plan | None:
        """Return the plan of `--plan`, if given."""
        return None if self.plan_file is None else load_plan(self.plan_file)

    def load_cluster(self) -> Cluster | None:
        """Return the cluster of `--cluster`, if given."""
        if self.cluster is None:
            return None
        from shardwise.cluster.presets import parse_cluster

        cluster = parse_cluster(self.cluster)
        if self.ranks not in (None, cluster.num_ranks):
            raise typer.BadParameter(
                f"--ranks {self.ranks}, but --cluster {self.cluster} has {cluster.num_ranks} ranks"
            )
        return cluster

    def make_plan(self, graph: Graph) -> Plan:
        """Load, search for or build the plan that the options describe."""
        if plan := self.load_plan():
            plan.check(graph)
            return plan
        if not self.is_automatic:
            return self._named_plan(graph)
        import shardwise

        cluster = self.load_cluster()
        assert cluster is not None
        options = {**self.search_options(), "all_devices": self.all_devices}
        return shardwise.plan(graph, cluster, progress=not self.no_progress, **options)

    def hide_unplanned_gpus(self) -> None:
        """Hide GPUs from this process if the cluster has CPUs only.

        Tuning runs ranks as forks, which fail if this process has initialized CUDA.
        """
        cluster = self.load_cluster()
        if cluster is not None and all(node.devices[0].kind == "cpu" for node in cluster.nodes):
            os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def tune(self, graph: Graph, table_out: Path | None) -> Plan:
        """Return the fastest plan by measured times, and write the times to `table_out`."""
        import shardwise
        from shardwise.cost import OpTable

        options = self.search_options()
        table = options.pop("table", None) or OpTable()
        if table_out is not None and table_out.exists():
            table.merge(OpTable.load(table_out))
        cluster = self.load_cluster()
        assert cluster is not None
        progress = not self.no_progress
        plan = shardwise.tune(graph, cluster, table=table, progress=progress, **options)
        if table_out is not None:
            with writing(table_out, option="--table-out"):
                table_out.parent.mkdir(parents=True, exist_ok=True)
                table.save(table_out)
        return plan

    def search_options(self) -> dict[str, Any]:
        """Return the keyword arguments for `sw.plan`."""
        for name in ("per_microbatch", "sequence_parallel", "attention"):
            if getattr(self, name):
                raise typer.BadParameter(f"{_flag(name)} needs a --strategy")
        _one_of("schedule", self.schedule, tuple(SCHEDULES))
        _one_of("recompute", self.recompute, ("none", "selective", "full"))
        return _without_none(
            {name: getattr(self, name) for name in SIZES}
            | self._common_options()
            | {
                "recompute": self.recompute,
                "memory_gib": self.memory_gib,
                "table": load_table(self.table),
            }
        )

    def _common_options(self) -> dict[str, Any]:
        """Return the options that the search and all named strategies share."""
        return {
            "num_microbatches": self.num_microbatches,
            "constraints": parse_constraints(self.constraint) or None,
            "schedule": self.schedule,
            "precision": self.precision,
            "offload": None if self.offload is None else _parse_offload(self.offload),
        }

    def _named_plan(self, graph: Graph) -> Plan:
        import shardwise
        from shardwise.planner.options import option_names
        from shardwise.plans.execution import RECOMPUTE_MODES

        for option in ("memory_gib", "table", "all_devices"):
            if getattr(self, option):
                raise typer.BadParameter(f"{_flag(option)} needs --cluster without --strategy")
        strategy = find_strategy(self.strategy or "ddp")
        sizes = {size: getattr(self, size) for size in SIZES if getattr(self, size)}
        accepted = option_names(strategy)
        if unused := [_flag(size) for size in sizes if size not in accepted]:
            raise typer.BadParameter(
                f"{', '.join(unused)}: only with --strategy hybrid, or --cluster without --strategy"
            )
        num_ranks = self.ranks or self._default_ranks(accepted)
        cluster = self.load_cluster() or shardwise.Cluster.local(num_ranks)
        if self.dp and not self.tp:  # `hybrid` derives dp from tp
            others = math.prod((self.dp, self.ep or 1, self.cp or 1, self.pp or 1))
            sizes["tp"] = max(1, cluster.num_ranks // others)
        globs = self.recompute.split(",") if self.recompute else None
        options = {
            "recompute": globs[0] if globs and globs[0] in RECOMPUTE_MODES else globs,
            "per_microbatch": self.per_microbatch or None,
            "sequence_parallel": self.sequence_parallel or None,
            "attention": self.attention,
        }
        return strategy(graph, cluster, **_without_none(self._common_options() | options), **sizes)

    def _default_ranks(self, accepted: Sequence[str]) -> int:
        """Return the product of the given sizes, with two ranks for an axis without a size."""
        axes = (self.dp, self.ep, self.cp, self.tp, self.pp)
        size = math.prod(ranks or 1 for ranks in axes)
        is_open = not (self.dp and self.tp) if "dp" in accepted else not self.pp
        return max(size, DEFAULT_RANKS * (self.pp or 1)) if is_open else size


def with_plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options: PlanOptions` of a command by an option for each field."""
    own_hints = get_type_hints(command, include_extras=True)
    hints = get_type_hints(PlanOptions, include_extras=True)
    names = [f.name for f in fields(PlanOptions)]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(options=PlanOptions(**{name: values.pop(name) for name in names}), **values)

    def keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=default, annotation=annotation)

    first, *own = [
        keyword(p.name, p.default, own_hints[p.name])
        for p in inspect.signature(command).parameters.values()
        if p.name != "options"
    ]
    shared = [
        keyword(f.name, [] if f.default is MISSING else f.default, hints[f.name])
        for f in fields(PlanOptions)
    ]
    run.__signature__ = inspect.Signature([first, *shared, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (first, *shared, *own)}
    return run


def parse_constraints(texts: Sequence[str]) -> dict[str, str | dict[str, str]]:
    """Parse `GLOB=SHARDING`, or `GLOB=AXIS:SHARDING` for one mesh axis, into shardings by glob.

    >>> parse_constraints(["lm_head.*=0", "tok.weight=tp:whole"])
    {'lm_head.*': '0', 'tok.weight': {'tp': 'replicate'}}
    """
    constraints: dict[str, str | dict[str, str]] = {}
    for text in texts:
        glob, equals, sharding = text.rpartition("=")
        if not equals or not glob or not sharding:
            raise typer.BadParameter(
                f"--constraint {text!r} is not GLOB=SHARDING, such as 'lm_head.*=0'"
            )
        axis, colon, on_axis = sharding.partition(":")
        constraints[glob] = {axis: on_axis} if colon and axis.isalpha() and on_axis else sharding
    return constraints


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_of(option: str, value: str | None, choices: tuple[str, ...]) -> str | None:
    if value is not None and value not in choices:
        more = "" if option == "strategy" else "; others need --strategy"
        raise typer.BadParameter(
            f"--{option} {value!r}{did_you_mean(value, choices)} One of {', '.join(choices)}{more}"
        )
    return value


def _parse_offload(text: str) -> tuple[str, ...]:
    from shardwise.plans.execution import OFFLOADS

    names = tuple(name for name in text.split(",") if name and name != "none")
    for name in names:
        _one_of("offload", name, OFFLOADS)
    return names


def load_table(path: Path | None) -> OpTable | None:
    """Return the measured times of `--table`, if given."""
    if path is None:
        return None
    from shardwise.cost import OpTable

    return OpTable.load(path)


# ------------------------------------------------------------ the model
@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The results of a target function."""

    model: Any
    batch: Any
    loss_fn: Callable[[Any, Any], Any] | None = None


def load_target(target: str) -> Loaded:
    """Call the function `path/module.py:function` or `package.module:function`."""
    from shardwise.training.planning import load_object, module_is_missing

    module, separator, name = target.rpartition(":")
    if not separator or not name or not module or (os.sep in module and module[-3:] != ".py"):
        raise typer.BadParameter(
            f"{target!r} is not of the form MODULE.py:FUNCTION or package.module:FUNCTION"
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise typer.BadParameter(f"file {module} does not exist")
    if not module.endswith(".py") and module_is_missing(module):
        raise typer.BadParameter(
            f"module {module!r} is neither here nor installed; give a file with its suffix: "
            f"{module.replace('.', '/')}.py:{name}"
        )
    try:
        function = load_object(target, target)
    except ConfigError as error:
        if error.where != target:  # an error in the user's code
            raise
        raise typer.BadParameter(error.message) from error
    if not callable(function):
        raise typer.BadParameter(f"{name!r} in {module} is not a function")
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
    """Load and capture the model, in the dtypes of `plan` or else of `precision`."""
    import shardwise

    shardwise.Precision.of(precision)  # check the name before the model is built
    loaded = load_target(target)
    precision = None if plan is not None else precision
    graph = shardwise.capture(
        loaded.model, loaded.batch, loaded.loss_fn, plan=plan, precision=precision
    )
    return loaded, graph
