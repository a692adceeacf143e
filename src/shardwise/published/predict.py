"""Predict step time and memory of published configurations. Every entry yields an `Outcome`; one
that cannot be predicted, or needs more memory than its device has, says so in its status.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from shardwise.cluster import Cluster, Mesh
from shardwise.dtypes import DTYPES
from shardwise.errors import ShardwiseError
from shardwise.formatting import GIB
from shardwise.published.machines import cluster_of, preset_device, unread_links, waiting
from shardwise.published.models import Prepared, prepare, shape_of
from shardwise.published.report import Outcome
from shardwise.published.rows import Entry, Row, Unusable, read_entries
from shardwise.shares import num_ranks
from shardwise.simulation import Estimate, Evaluator, Group
from shardwise.simulation.costs import ClusterCosts
from shardwise.simulation.step import pairs

# List what a prediction could not take from its row literally, and what was used instead. A row
# without notes is predicted exactly as stated.


_FAR = 0.2  # relative difference in parameters, more than between variants of a transformer


def notes_of(row: Row, cluster: Cluster) -> tuple[str, ...]:
    """Return where the prediction deviates from the row."""
    return (*_parameters(row), *_nodes(row, cluster), *_links(row))


def _parameters(row: Row) -> tuple[str, ...]:
    if row.params_text:
        return (f"params_b is {row.params_text!r}, not a number above 0: the dims alone count",)
    if row.params_b is None:
        return ()
    actual_b = shape_of(row).num_parameters / 1e9
    if abs(actual_b - row.params_b) - row.params_tolerance_b <= _FAR * row.params_b:
        return ()
    return (f"params_b is {row.params_b:g}, the dims make {actual_b:.3g}: the dims count",)


def _nodes(row: Row, cluster: Cluster) -> tuple[str, ...]:
    per_node = row.gpus_per_node
    if per_node is None or row.gpus < per_node or row.gpus % per_node == 0:
        return ()
    taken = cluster.nodes[0].count
    return (f"{row.gpus} gpus are not whole nodes of {per_node}: nodes of {taken} are taken",)


def _links(row: Row) -> tuple[str, ...]:
    unread = unread_links(row.interconnect)
    if not unread:
        return ()
    return (f"interconnect {unread!r} has no rate that is known: the usual network is taken",)


_STATE_BYTES = 12  # float32: the main parameter and Adam's two moments
# NVIDIA's distributed optimizer stores only the low bits that a bfloat16 parameter lacks of its
# float32 main copy, which saves this many bytes per parameter.
_REMAINDER_BYTES = 2
_ADDED_WORDS = 2  # words per parameter that accumulation reads and writes


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
    outcome = Outcome(
        row_id=entry.row_id,
        model=entry.model,
        device=entry.device,
        status=entry.reason,
        row=entry.row,
        published_step_time_s=entry.step_time_s,
        published_memory_bytes=entry.memory_bytes,
        ran_out=entry.ran_out,
    )
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
    needed = memory_bytes + device.reserved_bytes
    status = "ok"
    if memory_bytes > device.usable_bytes:
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
    """Return the seconds of a step and the bytes of the fullest rank.

    A few micro-batches are simulated; in steady state each further one takes as long as the slowest
    group of ranks computes.
    """
    if row.sharding.level >= 2 and row.is_grouped:
        return _in_replicas(row, cluster)
    each = (
        row.sharding.level >= 2 and row.pp == 1
    )  # reduce-scatters after every micro-batch, as FSDP does
    played = 1 if each else min(row.num_microbatches, 2 * row.pp)
    prepared = prepare(row, num_microbatches=played)
    estimate = Evaluator(prepared.fold, cluster).estimate(prepared.workloads, prepared.execution)
    seconds, peak_bytes = estimate.step_time_s, estimate.peak.peak_bytes
    if row.sharding.level == 1 and row.is_grouped:
        seconds += _update_in_groups(row, cluster, prepared, estimate)
        peak_bytes = _peak_in_groups(row, cluster, prepared, estimate)
    if row.sharding.prefetch and row.compute_dtype == "bfloat16":
        peak_bytes -= _REMAINDER_BYTES * _numel(estimate)
    seconds += (row.num_microbatches - played) * _micro_batch_s(estimate, each)
    if not each:
        loss = cluster.nodes[0].device.overlap_loss
        seconds += row.num_microbatches * loss * _sends_s(cluster, prepared, estimate)
        seconds += (row.num_microbatches - 1) * _adding_s(row, prepared, estimate)
    return seconds * waiting(max(1, row.gpus // cluster.nodes[0].count)), peak_bytes


def _in_replicas(row: Row, cluster: Cluster) -> tuple[float, float]:
    """Return the prediction for a row whose groups of ranks shard everything and all-reduce
    gradients with other groups.

    It is one group's step plus, for each micro-batch, what compute loses to the sums of its shards.
    """
    assert row.sharding.group is not None
    inner = row.sharding.group // math.gcd(row.sharding.group, row.cp)
    outer = row.dp // inner
    ranks = row.gpus // outer
    one = replace(
        row,
        dp=inner,
        gpus=ranks,
        global_batch=row.global_batch // outer,
        sharding=replace(row.sharding, group=None),
    )
    seconds, peak_bytes = predict_row(one, cluster)
    group = Group(
        mesh=Mesh(axes=(("outer", outer), ("inner", ranks))), ranks=tuple(range(row.gpus))
    )
    shape = replace(shape_of(row), layers=-(-row.layers // row.pp))
    shard = shape.num_parameters / row.tp / inner * DTYPES[row.compute_dtype].num_bytes
    summing = ClusterCosts(cluster).collective_seconds("all_reduce", group, ("outer",), shard)
    seconds += row.num_microbatches * summing * cluster.nodes[0].device.overlap_loss
    nodes = (ranks, row.gpus)
    first, last = (waiting(max(1, n // cluster.nodes[0].count)) for n in nodes)
    return seconds * last / first, peak_bytes


def _micro_batch_s(estimate: Estimate, each: bool) -> float:
    """Return the time of one more micro-batch; with `each`, it synchronizes its own gradients."""
    if each:
        causes = estimate.timeline.causes
        return estimate.step_time_s - causes["optimizer"] - causes["update"]
    groups = {stage.group for stage in estimate.stages}
    return max(
        sum(stage.forward + stage.backward for stage in estimate.stages if stage.group == group)
        for group in groups
    )


def _sends_s(cluster: Cluster, prepared: Prepared, estimate: Estimate) -> float:
    """Return how long messages between stages take per micro-batch, for the group with the most.

    In the simulation the next stage waits for them, but they do not slow down computing stages.
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


def _adding_s(row: Row, prepared: Prepared, estimate: Estimate) -> float:
    """Return the time to accumulate a micro-batch's gradients.

    It is a plain pass over memory at the preset's rate: no operator of a model is as simple.
    """
    parts = row.dp * row.cp if prepared.execution.zero else 1
    num_bytes = _ADDED_WORDS * DTYPES[row.compute_dtype].num_bytes * _numel(estimate) * parts
    return num_bytes / preset_device(row.gpu).memory_rate(num_bytes)


def _update_in_groups(row: Row, cluster: Cluster, prepared: Prepared, estimate: Estimate) -> float:
    """Return the seconds that sharding optimizer states within groups adds to a step.

    Gradients are already summed over all ranks; each rank updates its part, and the ranks of the
    group gather the new parameters from each other.
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


def _peak_in_groups(row: Row, cluster: Cluster, prepared: Prepared, estimate: Estimate) -> float:
    """Return the peak bytes if all ranks shared the states, plus the states each rank has beyond
    that.
    """
    assert row.sharding.group is not None
    shared = replace(prepared.execution, zero=1)
    shared_bytes = (
        Evaluator(prepared.fold, cluster).estimate(prepared.workloads, shared).peak.peak_bytes
    )
    share = 1 / row.sharding.group - 1 / (row.dp * row.cp)
    return shared_bytes + _STATE_BYTES * _numel(estimate) * share


def _numel(estimate: Estimate) -> float:
    """Return the largest number of parameters that a group of ranks updates."""
    groups = {stage.group for stage in estimate.stages}
    return max(sum(s.numel for s in estimate.stages if s.group == group) for group in groups)
