"""The execution of a plan's step: its pipeline stages and the dtypes that it computes in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from shardwise.cluster import Mesh
from shardwise.collectives.messages.program import format_ranks, parse_ranks
from shardwise.dtypes import DTYPES, dtype_name
from shardwise.errors import PlanError, did_you_mean
from shardwise.ir import Graph
from shardwise.schema import Form, Writer

RECOMPUTE_MODES = ("none", "full", "selective")
OFFLOADS = ("activations", "optimizer", "parameters")
TIME = "mb"  # the mesh axis of micro-batches


MeshField = Annotated[Mesh, Form(Mesh.from_json, Mesh.to_json, Mapping[str, Any])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The nodes from `first` up to the next stage, run by `ranks` arranged as `mesh`.

    `first` is a node's place, `blocks.3.ln.layer_norm_0` (`shardwise explain` lists them), or ""
    for the first stage. Stages on the same ranks are virtual stages of one group.
    """

    first: str
    ranks: Annotated[tuple[int, ...], Form(parse_ranks, format_ranks)]
    mesh: MeshField

    def to_json(self) -> dict[str, Any]:
        return Writer().fields(self)


def check_types(graph: Graph, precision: Precision, hint: str = "") -> None:
    """Raise `PlanError` if a graph was not captured in the dtype that the plan computes in."""
    if not precision.compute or precision.autocast:
        return
    compute = getattr(torch, precision.compute)
    for parameter in graph.parameters:
        dtype = graph.values[parameter.value].dtype
        if dtype.is_floating_point and dtype not in (compute, torch.float64):
            raise PlanError(
                f"the plan computes in {precision.compute}, but {parameter.name} of the graph is "
                f"{dtype_name(dtype)}",
                hint=hint or f"graph = sw.capture(model.to(torch.{precision.compute}), batch)",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a training step; "" keeps the model's own dtype.

    The model computes in `compute`, as if it had been cast to it; with `autocast`, each operator
    computes in the dtype that `torch.autocast` selects. Parameters are stored and optimized in
    `master`; gradients are accumulated over micro-batches in `gradients` and reduced over ranks in
    `reduce`. `loss_scale` is "dynamic", a number, or "".
    """

    compute: str = ""
    autocast: bool = False
    master: str = ""
    gradients: str = ""
    reduce: str = ""
    loss_scale: str = ""

    def __post_init__(self) -> None:
        known = ["", *(d.name for d in DTYPES.values() if d.can_train)]
        for name in ("compute", "master", "gradients", "reduce"):
            dtype = getattr(self, name)
            require_known(f"precision {name}={dtype!r}", dtype, known)
        if self.loss_scale not in ("", "dynamic") and not _is_positive(self.loss_scale):
            raise PlanError(
                f"precision loss_scale={self.loss_scale!r}", hint='"dynamic" or a number'
            )

    @staticmethod
    def of(name: str | Precision | None) -> Precision:
        """Return `"bf16"`, `"fp16"` or `"fp32"`, with float32 master weights and gradients.

        >>> Precision.of("fp16").loss_scale
        'dynamic'
        """
        if isinstance(name, Precision):
            return name
        wide = Precision(master="float32", gradients="float32", reduce="float32")
        known = {"": Precision()}
        for autocast in (False, True):
            for dtype in DTYPES.values():
                if dtype.short and (dtype.widened or not autocast):
                    scale = "dynamic" if dtype.needs_loss_scale else ""
                    base = Precision(autocast=True) if autocast else wide
                    short = f"{dtype.short}-autocast" if autocast else dtype.short
                    known[short] = replace(base, compute=dtype.name, loss_scale=scale)
        require_known(f"precision {name or ''!r}", name or "", list(known))
        return known[name or ""]

    def to_json(self) -> dict[str, Any]:
        return Writer().fields(self)


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def require_known(what: str, value: str, known: Sequence[str], hint: str = "") -> None:
    """Raise `PlanError` if a value is not one of the known ones."""
    if value not in known:
        names = [name for name in known if name]
        raise PlanError(f"{what}{did_you_mean(value, names)}", hint=hint or ", ".join(names))


def check_stages(stages: tuple[Stage, ...]) -> None:
    """Raise unless the stages' groups of ranks are disjoint, complete and match their meshes."""
    groups: dict[tuple[int, ...], Mesh] = {}
    for index, stage in enumerate(stages):
        where = f"stages[{index}]"
        if (stage.first == "") != (index == 0):
            raise PlanError(
                'the first stage, and only it, begins at ""', where=where, hint='"first": ""'
            )
        if stage.mesh.size != len(stage.ranks):
            raise PlanError(
                f"{stage.mesh} has {stage.mesh.size} ranks, but the stage has {len(stage.ranks)}",
                where=where,
            )
        if TIME in stage.mesh.names:
            raise PlanError(f"{TIME!r} is the axis of micro-batches", where=where)
        earlier = groups.setdefault(stage.ranks, stage.mesh)
        if earlier != stage.mesh:
            raise PlanError(f"the same ranks have {earlier} in an earlier stage", where=where)
    counts = Counter(rank for ranks in groups for rank in ranks)
    repeated = sorted(rank for rank, count in counts.items() if count > 1)
    if repeated:
        raise PlanError(f"ranks {repeated} are in two different groups of stages", where="stages")
    missing = sorted(set(range(max(counts, default=-1) + 1)) - set(counts))
    if missing:
        raise PlanError(f"ranks {missing} have no stage", where="stages")
