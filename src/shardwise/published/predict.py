"""Predict step time and memory of published configurations.

Every entry has an `Outcome`, whose status says why it cannot be predicted or does not fit in
memory. Notes say where a prediction deviates from its row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwise.cluster import Cluster, Mesh, preset_device
from shardwise.dtypes import DTYPES
from shardwise.errors import ShardwiseError
from shardwise.formatting import GIB
from shardwise.published.machines import cluster_of, read_device, unread_links, waiting
from shardwise.published.models import Prepared, prepare, shape_of
from shardwise.published.report import Outcome
from shardwise.published.rows import Entry, Row, Unusable, read_entries
from shardwise.shares import num_ranks
from shardwise.simulation import Estimate, Evaluator, Group
from shardwise.simulation.costs import ClusterCosts
from shardwise.simulation.step import pairs

_FAR = 0.2  # relative difference in parameters, more than between variants of a transformer
_STATE_BYTES = 12  # float32: the main parameter and Adam's two moments
# NVIDIA's distributed optimizer stores only the low bits that a bfloat16 parameter lacks of its
# float32 main copy, which saves this many bytes per parameter.
_REMAINDER_BYTES = 2
_ACCUMULATED_WORDS = 2  # words per parameter that accumulation reads and writes


def notes_of(row: Row, cluster: Cluster) -> Iterator[str]:
    """Yield where the prediction deviates from the row, and what it uses instead."""
    if row.params_text:
        yield f"params_b is {row.params_text!r}, not a number above 0: only the dims are used"
    elif row.params_b is not None:
        actual_b = shape_of(row).num_parameters / 1e9
        if abs(actual_b - row.params_b) - row.params_tolerance_b > _FAR * row.params_b:
            yield f"params_b is {row.params_b:g}, but the dims give {actual_b:.3g}, which is used"
    per_node = row.gpus_per_node
    if per_node is not None and row.gpus >= per_node and row.gpus % per_node:
        actual = cluster.nodes[0].count
        yield f"{row.gpus} gpus do not fill nodes of {per_node}: nodes of {actual} are used"
    unread = unread_links(row.interconnect)
    if unread:
        yield f"interconnect {unread!r} has no known rate: the preset's network is used"


def predict_file(
    path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Outcome, ...]:
    """Return the outcomes of all rows of a CSV file; `progress` is called with the number done."""
    entries = read_entries(path)
    outcomes = []
    for done, entry in enumerate(entries):
        progress(done, len(entries))
        outcomes.append(predict_entry(entry))
    return tuple(outcomes)


def predict_entry(entry: Entry) -> Outcome:
    """Return the outcome of one row; errors become its status."""
    outcome = Outcome(published=entry, status=entry.reason)
    if entry.row is None:
        return outcome
    try:
        cluster = cluster_of(entry.row)
        step_time_s, memory_bytes = predict_row(entry.row, cluster)
    except (Unusable, ShardwiseError) as error:
        message = error.message if isinstance(error, ShardwiseError) else str(error)
        return replace(outcome, status=message)
    except Exception as error:  # a bug that affects one row must not hide the others
        return replace(outcome, status=f"failed: {type(error).__name__}: {error}")
    device = cluster.nodes[0].device
    status = "ok"
    if memory_bytes > device.usable_bytes:
        needed = memory_bytes + device.reserved_bytes
        status = f"out of memory: needs {needed / GIB:.1f} GiB of {device.memory_bytes / GIB:.1f}"
    return replace(
        outcome,
        status=status,
        step_time_s=step_time_s,
        memory_bytes=round(memory_bytes),
        device_memory_bytes=device.memory_bytes,
        note="; ".join(notes_of(entry.row, cluster)),
    )


def predict_row(row: Row, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of a step and the peak bytes of the fullest rank.

    A few micro-batches are simulated; in steady state, each further one takes as long as the
    slowest group of ranks computes.
    """
    if row.sharding.level >= 2 and row.is_grouped:
        return _predict_replicas(row, cluster)
    # Reduce-scatter after every micro-batch, as FSDP does.
    is_fsdp = row.sharding.level >= 2 and row.pp == 1
    simulated = 1 if is_fsdp else min(row.num_microbatches, 2 * row.pp)
    prepared = prepare(row, num_microbatches=simulated)
    estimate = Evaluator(prepared.fold, cluster).estimate(prepared.workloads, prepared.execution)
    seconds, peak_bytes = estimate.step_time_s, estimate.peak.peak_bytes
    if row.sharding.level == 1 and row.is_grouped:
        seconds += _grouped_update_s(row, cluster, prepared, estimate)
        peak_bytes = _grouped_peak_bytes(row, cluster, prepared, estimate)
    if row.sharding.prefetch and row.compute_dtype == "bfloat16":
        peak_bytes -= _REMAINDER_BYTES * _numel(estimate)
    seconds += (row.num_microbatches - simulated) * _microbatch_s(estimate, is_fsdp)
    if not is_fsdp:
        loss = cluster.nodes[0].device.overlap_loss
        seconds += row.num_microbatches * loss * _sends_s(cluster, prepared, estimate)
        seconds += (row.num_microbatches - 1) * _accumulation_s(row, prepared, estimate)
    return seconds * waiting(max(1, row.gpus // cluster.nodes[0].count)), peak_bytes


def _predict_replicas(row: Row, cluster: Cluster) -> tuple[float, float]:
    """Predict a row whose groups shard everything and all-reduce gradients with other groups.

    It is one group's step plus, for each micro-batch, what compute loses to summing its shards.
    """
    assert row.sharding.group is not None
    inner = row.sharding.group // math.gcd(row.sharding.group, row.cp)
    outer = row.dp // inner
    ranks = row.gpus // outer
    one_group = replace(
        row,
        dp=inner,
        gpus=ranks,
        global_batch=row.global_batch // outer,
        sharding=replace(row.sharding, group=None),
    )
    seconds, peak_bytes = predict_row(one_group, cluster)
    group = Group(
        mesh=Mesh(axes=(("outer", outer), ("inner", ranks))), ranks=tuple(range(row.gpus))
    )
    shape = replace(shape_of(row), layers=-(-row.layers // row.pp))
    shard_bytes = shape.num_parameters / row.tp / inner * DTYPES[row.compute_dtype].num_bytes
    sum_s = ClusterCosts(cluster).collective_seconds("all_reduce", group, ("outer",), shard_bytes)
    seconds += row.num_microbatches * sum_s * cluster.nodes[0].device.overlap_loss
    of_group, of_all = (waiting(max(1, n // cluster.nodes[0].count)) for n in (ranks, row.gpus))
    return seconds * of_all / of_group, peak_bytes


def _microbatch_s(estimate: Estimate, is_fsdp: bool) -> float:
    """Return the time of one more micro-batch; with FSDP, it synchronizes its own gradients."""
    if is_fsdp:
        causes = estimate.timeline.causes
        return estimate.step_time_s - causes["optimizer"] - causes["update"]
    return _largest_group(estimate, lambda stage: stage.forward + stage.backward)


def _numel(estimate: Estimate) -> float:
    """Return the largest number of parameters that a group of ranks updates."""
    return _largest_group(estimate, lambda stage: stage.numel)


def _largest_group(estimate: Estimate, value: Callable[[Any], float]) -> float:
    """Return the maximum over groups of ranks of a sum over their stages."""
    totals: dict[int, float] = {}
    for stage in estimate.stages:
        totals[stage.group] = totals.get(stage.group, 0) + value(stage)
    return max(totals.values())


def _sends_s(cluster: Cluster, prepared: Prepared, estimate: Estimate) -> float:
    """Return the time of messages between stages per micro-batch, for the group with the most.

    In the simulation, the next stage waits for them, but they do not slow down computing stages.
    """
    costs, groups = ClusterCosts(cluster), prepared.execution.groups
    per_group = [0.0] * len(groups)
    for stage, after in pairwise(estimate.stages):
        if stage.group == after.group:
            continue
        ranks = pairs(groups[stage.group].array, groups[after.group].array)
        seconds = costs.collective("send", ranks).seconds(stage.send_bytes)
        for group in (stage.group, after.group):  # its output forward, the gradient back
            per_group[group] += seconds
    return max(per_group)


def _accumulation_s(row: Row, prepared: Prepared, estimate: Estimate) -> float:
    """Return the time to accumulate a micro-batch's gradients.

    It is a plain pass over memory at the preset's rate: no operator of a model is as simple.
    """
    parts = row.dp * row.cp if prepared.execution.zero else 1
    word_bytes = DTYPES[row.compute_dtype].num_bytes
    num_bytes = _ACCUMULATED_WORDS * word_bytes * _numel(estimate) * parts
    return num_bytes / preset_device(read_device(row.gpu).preset).memory_rate(num_bytes)


def _grouped_update_s(row: Row, cluster: Cluster, prepared: Prepared, estimate: Estimate) -> float:
    """Return the seconds that sharding optimizer states within groups adds to a step.

    Gradients are already summed over all ranks; each rank updates its shard, and the ranks of the
    group gather the new parameters.
    """
    assert row.sharding.group is not None
    size = row.sharding.group
    group = prepared.execution.groups[0]
    (_, ranks), *others = group.mesh.axes
    mesh = Mesh(axes=(("outer", num_ranks(ranks) // size), ("inner", size), *others))
    group = Group(mesh=mesh, ranks=group.ranks)
    num_bytes = _numel(estimate) * DTYPES[row.compute_dtype].num_bytes
    gather = ClusterCosts(cluster).collective_seconds("all_gather", group, ("inner",), num_bytes)
    return gather - estimate.timeline.causes["optimizer"] * (1 - 1 / size)


def _grouped_peak_bytes(
    row: Row, cluster: Cluster, prepared: Prepared, estimate: Estimate
) -> float:
    """Return the peak with states sharded among all ranks, plus the states beyond that."""
    assert row.sharding.group is not None
    execution = replace(prepared.execution, zero=1)
    sharded = Evaluator(prepared.fold, cluster).estimate(prepared.workloads, execution)
    share = 1 / row.sharding.group - 1 / (row.dp * row.cp)
    return sharded.peak.peak_bytes + _STATE_BYTES * _numel(estimate) * share
