"""Write a pipeline as Python files: one per stage program, and one that connects them.

The latter, `pipeline.py`, lists the ranks of every stage, the transfers between stages and the
schedule of every group of ranks.
"""

from collections.abc import Iterator

from shardwise.dtypes import dtype_name
from shardwise.emit.expressions import wrap
from shardwise.emit.function import INDENT
from shardwise.emit.module import HOW_TO_CHECK, collectives_text, emit, guards_text, splits, table
from shardwise.emit.quote import comment, literal, mapping
from shardwise.ir import Ref
from shardwise.plans import TIME
from shardwise.plans.resolve import input_shards
from shardwise.program.pipeline import Pipeline, StageProgram, Transfer
from shardwise.runtime.loader import PipelineSources, StageSources
from shardwise.runtime.pipeline import OutputSpec, TiedSpec, TransferSpec
from shardwise.runtime.splits import Split
from shardwise.sharding.placements import PARTIAL, Partial, Placement, Shard
from shardwise.version import __version__


def emit_pipeline(pipeline: Pipeline, *, probe: bool = False) -> PipelineSources:
    """Return the files of all stages, and the one that connects them."""
    return PipelineSources(
        pipeline=_pipeline_file(pipeline),
        stages=tuple(_stage_files(stage, probe) for stage in pipeline.stages),
    )


def _stage_files(stage: StageProgram, probe: bool) -> StageSources:
    programs = stage.program.rank_programs
    before = stage.precomputed.rank_programs if stage.precomputed is not None else ()
    return StageSources(
        places=tuple(p.ranks for p in programs),
        texts=tuple(
            emit(stage.program, p.ranks[0], probe=probe, stage=stage.index) for p in programs
        ),
        before_ranks=tuple(p.ranks for p in before),
        before=tuple(emit(stage.precomputed, p.ranks[0]) for p in before if stage.precomputed),
    )


def _pipeline_file(pipeline: Pipeline) -> str:
    plan, schedule = pipeline.plan, pipeline.schedule
    head, *rows = str(schedule).splitlines()
    kind = "parts of one batch" if plan.splits_time else "separate batches"
    lines = [
        f'"""{comment(pipeline.graph.name)} in {len(pipeline.stages)} stages, '
        f"plan {comment(plan.name)}.",
        "",
        f"Written by shardwise {__version__} for the graph {comment(pipeline.graph.fingerprint)}.",
        f'{HOW_TO_CHECK}\n{guards_text(pipeline.graph)}{collectives_text(plan.collectives)}"""',
        "",
        "from shardwise import runtime as rt",
        "",
        f"MICROBATCHES = {literal(plan.num_microbatches)}  # {kind}",
        f"TIMED = {plan.splits_time}",
        f"BATCH_DIMS = {mapping(_batch_dims(pipeline).items())}",
        "",
        *table("STAGES", map(_stage, pipeline.stages)),
        "",
        "# Values that stages send for every micro-batch; with `gradient`, one is sent back.",
        *table("TRANSFERS", map(_transfer, pipeline.transfers)),
        "",
        "# Parameters of several stages: the stage that owns them first, then those with replicas.",
        *table("TIED", _tied(pipeline)),
        "",
        "# The leaves of the model's output.",
        *table("OUTPUTS", _outputs(pipeline)),
        *_loss(pipeline),
        "",
        f"# {comment(head)}",
        "# 0F3 is the forward of stage 0 for micro-batch 3, and 0B3 its backward; I and W are the",
        "# parts of a backward for the inputs and for the weights.",
        'SCHEDULE = """',
        *map(comment, rows),
        '"""',
    ]
    return "\n".join(wrap(line) if line.startswith(INDENT) else line for line in lines) + "\n"


def _batch_dims(pipeline: Pipeline) -> dict[str, int]:
    shards = input_shards(pipeline.graph, pipeline.plan) or {}
    return {i.name: shards[i.value].dim for i in pipeline.graph.inputs if i.value in shards}  # type: ignore[union-attr]


def _stage(stage: StageProgram) -> str:
    axes = mapping(stage.mesh.to_json().items())
    return f"rt.StageSpec(ranks={literal(stage.ranks)}, axes={axes})"


def _transfer(transfer: Transfer) -> str:
    spec = TransferSpec(
        value=transfer.value,
        source=transfer.source,
        target=transfer.target,
        shape=transfer.type.shape,
        dtype=dtype_name(transfer.type.dtype),
        gradient=transfer.gradient,
        sent=splits(transfer.sent),
        received=splits(transfer.received),
    )
    return literal(spec)


def _tied(pipeline: Pipeline) -> Iterator[str]:
    for name, stages in pipeline.tied.items():
        programs = [pipeline.stages[index].program.rank_programs[0] for index in stages]
        stored = [next(s for s in p.parameters if s.name == name) for p in programs]
        owner = stored[0]
        spec = TiedSpec(
            name=name,
            shape=owner.shape,
            dtype=dtype_name(owner.dtype),
            stages=stages,
            splits=tuple(splits(s.layout) for s in stored),
            trained=owner.requires_grad,
        )
        yield literal(spec)


def _outputs(pipeline: Pipeline) -> Iterator[str]:
    stage_of = {leaf: stage.index for stage in pipeline.stages for leaf in stage.outputs}
    for position, leaf in enumerate(pipeline.graph.outputs):
        if not isinstance(leaf, Ref):
            yield literal(leaf)
            continue
        kind = pipeline.graph.values[leaf.name]
        shape, placement = _joined(pipeline, kind.shape, pipeline.output_times.get(position))
        split = None
        if isinstance(placement, Shard):
            split = Split(axis=TIME, dim=placement.dim, of=placement.of)
        is_partial = isinstance(placement, Partial)
        mean = not pipeline.plan.splits_time and kind.dtype.is_floating_point
        spec = OutputSpec(
            stage=stage_of[position],
            shape=shape,
            dtype=dtype_name(kind.dtype),
            split=split,
            summed=is_partial and not mean,
            averaged=is_partial and mean,
        )
        yield literal(spec)


def _joined(
    pipeline: Pipeline, shape: tuple[int, ...], placement: Placement | None
) -> tuple[tuple[int, ...], Placement | None]:
    """Return the shape of an output of all micro-batches, and its placement along time.

    If micro-batches are separate batches, outputs with a row per sample are concatenated, and
    scalars are averaged or, if they are counts, summed.
    """
    count = pipeline.plan.num_microbatches
    if pipeline.plan.splits_time or count == 1:
        return shape, placement
    values = pipeline.graph.values
    dims = _batch_dims(pipeline)
    rows = [values[i.value].shape[dims[i.name]] for i in pipeline.graph.inputs if i.name in dims]
    if not shape:
        return shape, PARTIAL
    if shape[0] in rows:
        return (shape[0] * count, *shape[1:]), Shard(0, ((1, shape[0] * count, 1),))
    return shape, placement


def _loss(pipeline: Pipeline) -> list[str]:
    if pipeline.graph.loss is None:
        return ["LOSS_STAGE = None", 'LOSS_DTYPE = ""']
    dtype = dtype_name(pipeline.graph.values[pipeline.graph.loss].dtype)
    return [f"LOSS_STAGE = {pipeline.loss_stage}", f'LOSS_DTYPE = "{dtype}"']
