"""The planner's result for a plan, as typed values and as JSON in the plan's file.

`SearchResult` has the figures of the chosen configuration and its runners-up, the durations of the
simulated step (from which `shardwise.simulation.stored_estimate` lays out the timeline again), and
the details that reports show without the model: modules, links, what-if rows, generated code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from shardwise.errors import PlanError
from shardwise.formatting import size
from shardwise.schema import Hook, KeyPath, Reader, Stored, Writer

# Numbers that files state even if they are the default; other fields are omitted then.
Int = Annotated[int, Stored(always=True)]
Float = Annotated[float, Stored(always=True)]
Bool = Annotated[bool, Stored(always=True)]

LAYOUT_NAMES = ("fastest", "lean", "mixed", "leanest", "ranked")
HINT = "make the figures again: shardwise plan MODULE.py:FUNCTION --cluster c.yaml"
CAUSES = {  # where the time of a step goes, in the order of reports
    "compute": "computing",
    "recompute": "recomputing activations",
    "collectives": "waiting for collectives between nodes of the graph",
    "parameters": "waiting for parameters to be gathered",
    "bubble": "waiting for other stages",
    "gradients": "waiting for gradient reductions",
    "optimizer": "the optimizer step",
    "update": "gathering updated parameters",
}
MODULE_FIGURES = (
    "forward_s", "backward_s", "communication_s", "sync_s", "parameters", "model_parameters",
    "parameter_bytes", "activation_bytes",
)  # fmt: skip
MODULE_COLUMNS = ("parent", "name", "path", "kind", "count", "stages", "layout", *MODULE_FIGURES)
PARAMETER_COLUMNS = (
    "module", "name", "shape", "dtype", "layout", "zero", "trained", "bytes", "local_bytes",
)  # fmt: skip
NODE_COLUMNS = (
    "module", "name", "op", "layout", "source", "forward_s", "backward_s", "communication_s",
    "activation_bytes",
)  # fmt: skip
_COLUMN_TYPES: dict[str, type | tuple[type, ...]] = {  # of columns that are not numbers
    **dict.fromkeys(("name", "path", "kind", "dtype"), str),
    **dict.fromkeys(("shape", "stages"), (list, tuple)),
    "zero": (int, type(None)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """One point of the search space: a division of the ranks, and the execution of a step."""

    dp: int
    tp: int
    pp: int
    virtual: Int = 1  # stages per group of ranks
    schedule: str = ""
    num_microbatches: Int = 1
    zero: Int = 0
    outer: int | None = None  # zero level of parameters outside of blocks, if it differs
    recompute: str = "none"
    offload: tuple[str, ...] = ()
    layout: Int = 0  # the variant of the layouts solved for `tp`: see `LayoutCache.get`
    grouping: Int = 0  # the number of an order of unequal devices
    cuts: tuple[int, ...] = ()  # first nodes of stages, if they are not balanced by `Cutter`

    @property
    def stages(self) -> int:
        return self.pp * self.virtual

    def __str__(self) -> str:
        parts = [f"dp={self.dp}", f"tp={self.tp}", f"pp={self.pp}"]
        if self.pp > 1:
            parts.append(self.schedule + (f" x{self.virtual}" if self.virtual > 1 else ""))
        if self.num_microbatches > 1:
            parts.append(f"{self.num_microbatches} micro-batches")
        if self.dp > 1 or self.zero:
            other = f" (outside of blocks {self.outer})" if self.outer is not None else ""
            parts.append(f"zero {self.zero}{other}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        if self.offload:
            parts.append(f"offload {'+'.join(self.offload)}")
        if self.layout:
            parts.append(f"{LAYOUT_NAMES[min(self.layout, len(LAYOUT_NAMES) - 1)]} layouts")
        if self.cuts:
            parts.append(f"stages from nodes {', '.join(map(str, self.cuts))}")
        if self.grouping:
            parts.append(f"device order {self.grouping}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    """The cluster that a plan was simulated on, with the price of all its devices."""

    name: str
    fingerprint: str
    num_ranks: int
    price_per_hour: Float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Samples of a batch, and its tokens if an input is a matrix of integers."""

    rows: int
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Peak memory of one rank of a group; `over_time_gib` lists the peaks of all intervals."""

    group: int
    peak_bytes: float
    limit_bytes: float
    parts: Mapping[str, float]
    when: str
    others: Mapping[str, float] = field(default_factory=dict)
    host_bytes: Float = 0.0
    over_time_gib: str = ""

    @property
    def free_bytes(self) -> float:
        return self.limit_bytes - self.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """A simulated configuration; `config` is None for a plan that was not searched for."""

    what: str
    config: ParallelConfig | None = None
    step_time_s: float
    bubble_fraction: float
    causes: Mapping[str, float]
    memory: MemoryFigures
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGap:
    """Upper bounds on how much faster an optimal plan could be, as fractions of the step."""

    layouts: float  # with other layouts, by the prices of a typical micro-batch
    search: float  # with a configuration that was not simulated
    points: int
    simulated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearchSummary:
    """The effort and gain of the local search, over other stage boundaries and layouts."""

    layouts: int
    simulated: int  # configurations
    gain: float  # as a fraction of the step
    complete: bool  # whether everything that could be faster was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The limit of the plan: a cause of time, the memory, or the user's decisions."""

    what: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A change of the cluster or of the options, and the resulting step time.

    `ratio` is relative to the plan's own step; `plan` names the fastest configuration after the
    change if that differs.
    """

    kind: str
    change: str
    value: float | None = None
    step_time_s: float | None = None
    ratio: float | None = None
    feasible: Bool = True
    note: str = ""
    plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """Seconds and bytes of a layer on one rank, for a step; `last` is the last of equal layers."""

    name: str
    stage: int
    count: Int = 1
    forward_s: float
    backward_s: float
    communication_s: float
    parameters: float
    state_bytes: float
    activation_bytes: float
    last: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutDevices:
    """Devices of the cluster that the plan does not use, because the step is shorter that way."""

    cluster: str
    fingerprint: str
    num_ranks: int
    used: str
    idle: str
    devices: str
    step_time_s: float | None = None  # on all devices; None if no plan fits on them


# ------------------------------------------------------------ the simulated step
@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of one kind of action of a stage, the same for all its micro-batches."""

    kind: str  # "F", "B", "I" or "W"
    stage: int
    last: bool = False  # whether the action completes the gradients of its stage
    seconds: float
    waiting: float = 0.0  # part of `seconds`: waiting for parameters (zero 3)
    left: float = 0.0  # gradient reductions that remain when it ends
    collectives: float = 0.0
    recompute: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """A stage's group, its passes for one micro-batch, and its message to the next stage."""

    group: int
    forward_s: float
    backward_s: float
    send_s: float = 0.0
    send_link_s: float = 0.0  # part of `send_s`: while no other message can be sent
    send_bytes: float = 0.0
    numel: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """Seconds that a group of ranks spends before its first and after its last action."""

    root_gather_s: float = 0.0
    optimizer_s: float = 0.0
    update_gather_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedTransfer:
    """Seconds in which two groups exchange the gradients, or the values, of tied parameters."""

    owner: int
    replica: int
    send_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraffic:
    """What one form of synchronization sends in a step: means over a round, after any warm-up."""

    form: str
    num_bytes: float  # that a rank sends
    messages: float

    def __str__(self) -> str:
        return (
            f"{self.form}: each rank sends {size(self.num_bytes)} in a step, "
            f"{self.messages:.3g} message{'' if self.messages == 1 else 's'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """All durations of a simulated step; with the plan's schedule they are its timeline."""

    passes: tuple[PassTimes, ...]
    stages: tuple[StageTimes, ...]
    groups: tuple[GroupTimes, ...]
    tied: tuple[TiedTransfer, ...] = ()
    syncs: tuple[SyncTraffic, ...] = ()


# ------------------------------------------------------------ details for reports
@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTree:
    """The tree of modules in preorder, its parameters and nodes, as columns of equal length."""

    rows: Mapping[str, tuple[Any, ...]]
    parameters: tuple[tuple[Any, ...], ...]
    nodes: Mapping[str, tuple[Any, ...]]
    layouts: tuple[str, ...]
    ops: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]

    def verify(self, where: str) -> None:
        """Raise unless all columns exist, have one length, and refer to existing rows."""
        for name, columns, required in (
            ("rows", self.rows, MODULE_COLUMNS),
            ("nodes", self.nodes, NODE_COLUMNS),
        ):
            missing = [column for column in required if column not in columns]
            if missing:
                raise _damaged(f"column {missing[0]!r} is missing", f"{where}.{name}")
            lengths = {len(columns[column]) for column in required}
            if len(lengths) > 1:
                raise _damaged(f"columns of lengths {sorted(lengths)}", f"{where}.{name}")
        for name, table, width in (
            ("parameters", self.parameters, len(PARAMETER_COLUMNS)),
            ("sources", self.sources, 2),
        ):
            for at, row in enumerate(table):
                if len(row) != width:
                    raise _damaged(f"{len(row)} columns", f"{where}.{name}[{at}]")
        parameters = dict(zip(PARAMETER_COLUMNS, zip(*self.parameters, strict=True), strict=False))
        for name, columns in (
            ("rows", self.rows),
            ("nodes", self.nodes),
            ("parameters", parameters),
        ):
            for column, cells in columns.items():
                expected = _COLUMN_TYPES.get(column, (int, float, bool))
                wrong = [cell for cell in cells if not isinstance(cell, expected)]
                if wrong:
                    raise _damaged(f"{wrong[0]!r} in column {column!r}", f"{where}.{name}")
        size = len(self.rows["name"])
        for name, numbers, end in (
            ("rows.parent", self.rows["parent"], size),
            ("rows.layout", self.rows["layout"], len(self.layouts)),
            ("nodes.module", self.nodes["module"], size),
            ("nodes.layout", self.nodes["layout"], len(self.layouts)),
            ("nodes.op", self.nodes["op"], len(self.ops)),
            ("nodes.source", self.nodes["source"], len(self.sources)),
            ("parameters.module", parameters.get("module", ()), size),
            ("parameters.layout", parameters.get("layout", ()), len(self.layouts)),
        ):
            wrong = [n for n in numbers if not isinstance(n, int) or not -1 <= n < end]
            if wrong:
                raise _damaged(f"{wrong[0]!r} is out of range", f"{where}.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Memory of a group over a step of few actions, unit by unit."""

    group: int
    times: tuple[float, ...]
    bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Bytes over equal links in a step; `traffic_bytes` and `busy_s` are of the busiest one."""

    name: str
    kind: str
    nodes: tuple[str, ...]
    count: int
    busiest: str
    bytes_per_s: float | None  # None if unlimited
    traffic_bytes: float
    total_bytes: float
    busy_s: float
    share: float
    what: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedFile:
    """A generated source file and the ranks that run it."""

    name: str
    ranks: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCode:
    """The generated files, and the text of all lines of user code that they mention."""

    files: tuple[GeneratedFile, ...]
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDetails:
    """Details that only reports show; `code_missing` is the reason if there is no `code`."""

    cluster: Mapping[str, Any] | None = None  # as `Cluster.from_yaml` reads it
    modules: ModuleTree | None = None
    memory: tuple[MemoryCurve, ...] = ()
    links: tuple[LinkTraffic, ...] = ()
    what_if: tuple[WhatIf, ...] | None = None
    code: GeneratedCode | None = None
    code_missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The figures of a plan: its simulated step, its runners-up and the reasons for its choice.

    `digest` identifies the decisions that the figures belong to. A plan that was simulated without
    a search has no `gap` and no runners-up.
    """

    cluster: ClusterSummary
    batch: BatchSize
    fixed: Mapping[str, Any] = field(default_factory=dict)  # the user's decisions
    best: SimulatedConfig
    runners_up: tuple[SimulatedConfig, ...] = ()
    gap: SearchGap | None = None
    local_search: LocalSearchSummary | None = None
    binding: Binding
    relaxations: tuple[WhatIf, ...] = ()
    layers: tuple[LayerFigures, ...] = ()
    step: StepTimes
    memory: tuple[MemoryFigures, ...]  # of every group
    left_out: LeftOutDevices | None = None
    digest: str = ""
    details: PlanDetails = field(default_factory=PlanDetails)

    def __post_init__(self) -> None:
        for name, config in (("best", self.best), *(("runners_up", r) for r in self.runners_up)):
            if not config.step_time_s > 0 or set(config.causes) != set(CAUSES):
                raise _damaged("the step time or some of its causes are missing", f"search.{name}")
        if self.batch.rows < 1:
            raise _damaged(f"a batch of {self.batch.rows} rows", "search.batch")
        if self.details.modules is not None:
            self.details.modules.verify("search.details.modules")

    def verify(self, num_stages: int, num_groups: int) -> None:
        """Raise unless the figures are for a plan with this many stages and groups."""
        for name, count, required in (
            ("step.stages", len(self.step.stages), num_stages),
            ("step.groups", len(self.step.groups), num_groups),
            ("memory", len(self.memory), num_groups),
        ):
            if count != required:
                raise _damaged(f"{count} entries for a plan with {required}", f"search.{name}")
        for index, stage in enumerate(self.step.stages):
            if not 0 <= stage.group < num_groups:
                where = f"search.step.stages[{index}]"
                raise _damaged(f"group {stage.group} of {num_groups}", where)
        for index, use in enumerate(self.memory):
            for number in use.over_time_gib.split():
                if not re.fullmatch(r"\d+(\.\d+)?(e[+-]\d\d)?", number, re.ASCII):
                    raise _damaged("over_time_gib is not a list of numbers", f"memory[{index}]")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data, without empty fields."""
        return Writer().fields(self)

    @staticmethod
    def from_json(data: Any, where: str = "search") -> SearchResult:
        """Read the result of `to_json`; raise a `PlanError` that names the first invalid field."""
        result: SearchResult | None = Reader(PlanError, where, hooks=HOOKS).read(SearchResult, data)
        if result is None:
            raise _damaged("they are missing", where)
        return result


# ------------------------------------------------------------ JSON
def _damaged(message: str, where: str) -> PlanError:
    return PlanError(f"the figures of the plan are damaged: {message}", where=where, hint=HINT)


def _read_search(reader: Reader, value: Any, path: KeyPath) -> SearchResult | None:
    if not value:
        return None
    try:
        fields = reader.fields(SearchResult, value, path)
    except PlanError as error:
        raise _damaged(error.message, error.where or reader.name) from None
    try:
        return SearchResult(**fields)
    except PlanError as error:
        where = error.where if reader.name == "search" else f"{reader.name}: {error.where}"
        raise PlanError(error.message, where=where, hint=error.hint) from None


def _read_any(reader: Reader, value: Any, path: KeyPath) -> Any:
    """Freeze lists; the readers of tables and cluster files check their contents."""
    if isinstance(value, list | tuple):
        return tuple(_read_any(reader, item, path) for item in value)
    if isinstance(value, float) and not math.isfinite(value):
        reader.fail(f"{value} is not finite", path)
    return value


HOOKS: dict[Any, Hook] = {SearchResult: _read_search, Any: _read_any}  # for plan files
