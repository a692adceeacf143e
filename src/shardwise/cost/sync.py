"""The messages of every form of synchronization: their number and bytes, and their time.

The runtime's exchanges send exactly these bytes; the simulator, the choice of forms and the test of
counted bytes read them here.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardwise.arrays import Ints
from shardwise.cluster import Cluster, Device
from shardwise.inexact import INDEX_BYTES, Compression
from shardwise.ir import Graph, Ref
from shardwise.plans import Plan, Sync
from shardwise.plans.sync import applied_sync, operator_uses
from shardwise.runtime.compression import message_bytes
from shardwise.runtime.sync_forms import record_bytes, space_for
from shardwise.shares import part

COUNT_BYTES = 8  # of a number of rows
# Words per element that the operators of `runtime/compression.py` read and write, both messages of
# quantized sums and error feedback included.
ENCODING_WORDS = {"bf16": 50, "fp16": 50, "fp8": 60, "int8": 40, "onebit": 20}
ENCODING_WORDS |= {"topk": 30, "randomk": 6, "powersgd": 12}


@dataclass(frozen=True, slots=True)
class SyncMessage:
    """One collective of a step.

    `num_bytes` is the tensor that all ranks together hold after it, in an all-to-all the one that
    each rank sends.
    `busiest` is the time of the busiest rank relative to that of an even collective. With a `level`
    of k it runs inside of runs of k ranks, with -k across these. `steps` are those from one such
    message to the next. Its result is needed after the computation of `slack` steps more.
    """

    purpose: str  # "reduce" or "update"
    op: str
    num_bytes: float
    busiest: float = 1.0
    level: int = 0
    steps: int = 1
    slack: int = 0

    @property
    def busy_bytes(self) -> float:
        """The bytes of an even collective that takes as long."""
        return self.num_bytes * self.busiest

    def sent_bytes(self, num_ranks: int) -> float:
        """Return the bytes that a rank sends to others in a step, on average."""
        num_ranks = abs(self.level) if self.level > 0 else num_ranks // max(1, -self.level)
        times = 2 if self.op == "all_reduce" else 1
        return times * self.num_bytes * (num_ranks - 1) / num_ranks / self.steps


_reduce, _update = partial(SyncMessage, "reduce"), partial(SyncMessage, "update")


def is_special(form: Sync) -> bool:
    """Return whether a parameter has messages of its own, other than buckets and ZeRO."""
    return bool(form.has_owners or form.sparse or form.factors or form.hierarchical or form.inexact)


def special_syncs(graph: Graph, plan: Plan) -> dict[str, Sync]:
    """Return the parameters with messages of their own, or in a dtype of their own."""
    if all(entry.sync is None for entry in plan.parameters.values()):
        return {}
    uses = operator_uses(graph)
    forms = {
        p.name: applied_sync(graph, p, plan.entry(p.name).sync, uses) for p in graph.parameters
    }
    return {name: form for name, form in forms.items() if is_special(form) or form.dtype}


def step_rows(graph: Graph) -> dict[str, int]:
    """Return the rows of a step's batch at the uses of each value: lookups, or rows of a product.

    Lookups are an upper limit of the distinct rows of a table.
    """
    rows: Counter[str] = Counter()
    for node in graph.nodes:
        refs = [arg for arg in node.args if isinstance(arg, Ref)]
        if node.op.startswith("aten.embedding") and len(refs) > 1:
            rows[refs[0].name] += graph.values[refs[1].name].numel
        elif node.op == "aten.linear.default" and len(refs) > 1:
            x = graph.values[refs[0].name]
            rows[refs[1].name] += x.numel // max(1, x.shape[-1])
    return rows


def sync_messages(
    form: Sync,
    shape: Sequence[int],
    item_bytes: int,
    reduced_bytes: int,
    rows: int,
    num_ranks: int,
    rates: Sequence[float] = (),
) -> tuple[SyncMessage, ...]:
    """Return the messages of one parameter of this local shape in a step, after any warm-up.

    `item_bytes` are those of an element of what owners send, or of the values that are compressed.
    `rates` are those of the ranks' links, equal by default.
    `rows` are those of all ranks together: distinct rows per rank of a sparse gradient, or rows of
    the two factors. An updated row is sent once by its owner; here each is counted as distinct.
    """
    numel, width = math.prod(shape), math.prod(shape[1:])
    if form.inexact and not form.has_owners:
        return tuple(_inexact_messages(form, shape, item_bytes, reduced_bytes, num_ranks))
    busiest = _busiest(form, num_ranks, rates) if form.has_owners else 1.0
    counts = _reduce("all_gather", num_ranks * COUNT_BYTES)
    if form.sparse:
        by_rank, reduced = -(-rows // num_ranks), record_bytes(width, reduced_bytes)
        if not form.has_owners:
            return (_reduce("all_gather", num_ranks * (1 + space_for(by_rank)) * reduced),)
        shares = [math.ceil(min(rows, shape[0]) * share) for share in _shares(form, num_ranks)]
        records = sum(1 + space_for(changed) for changed in shares)
        return (
            _reduce("all_gather", num_ranks**2 * COUNT_BYTES),
            _reduce("all_to_all", by_rank * reduced, busiest),
            _update("all_gather", records * record_bytes(width, item_bytes), busiest),
        )
    total, near = numel * reduced_bytes, form.hierarchical
    if form.factors:
        if rows * sum(shape) < 2 * numel:
            return counts, _reduce("all_gather", rows * sum(shape) * reduced_bytes)
        return counts, _reduce("all_reduce", total)
    if near:
        across = numel / near * reduced_bytes  # on average
        return (
            _reduce("reduce_scatter", total, level=near),
            _reduce("all_reduce", across, level=-near),
            _reduce("all_gather", total, level=near),
        )
    if form.has_owners:
        updated = _update("all_gather", numel * item_bytes, busiest)
        return _reduce("reduce_scatter", total, busiest, slack=form.stale), updated
    return (_reduce("all_reduce", total),)


def _inexact_messages(
    form: Sync, shape: Sequence[int], item_bytes: int, reduced_bytes: int, num_ranks: int
) -> Iterator[SyncMessage]:
    collectives: Iterable[tuple[str, float]] = [("all_reduce", math.prod(shape) * reduced_bytes)]
    if form.compression is not None:
        collectives = _compressed(form.compression, shape, item_bytes, num_ranks)
    for op, num_bytes in collectives:
        if form.every > 1:
            yield _update(op, num_bytes, steps=form.every, slack=form.overlap)
        else:  # the next compressed message needs what this one omits, however late it takes effect
            yield _reduce(op, num_bytes, slack=0 if form.compression else form.stale)


def _compressed(
    compression: Compression, shape: Sequence[int], item_bytes: int, num_ranks: int
) -> Iterator[tuple[str, float]]:
    """Yield the collectives of a compressed sum, and their bytes."""
    kind, numel = compression.kind, math.prod(shape)
    if kind == "topk":
        chosen = compression.count(numel)
        yield "all_gather", num_ranks * chosen * (item_bytes + INDEX_BYTES)
    elif kind == "randomk":
        yield "all_reduce", compression.count(numel) * item_bytes
    elif kind != "powersgd":
        parts = (part(numel, num_ranks, rank)[1] for rank in range(num_ranks))
        total = sum(message_bytes(kind, size, item_bytes) for size in parts)
        yield "all_to_all", total
        yield "all_gather", total
    elif compression.is_factored(shape):
        for size in (shape[0], math.prod(shape[1:])):
            yield "all_reduce", size * compression.rank * item_bytes
    else:
        yield "all_reduce", numel * item_bytes


def encoding_seconds(form: Sync, numel: float, item_bytes: int, device: Device) -> float:
    """Return the time of a step in which a rank compresses messages of a parameter."""
    if form.compression is None:
        return 0.0
    num_bytes = ENCODING_WORDS[form.compression.kind] * item_bytes * numel
    return num_bytes / device.memory_rate(max(3.0 * item_bytes * numel, 1.0)) / form.every


def sync_seconds(
    messages: Sequence[SyncMessage], groups: Ints, seconds: Callable[[str, Ints, float], float]
) -> float:
    """Return the time of messages, of collectives that take `seconds(op, groups, bytes)`."""
    return sum(seconds(m.op, level_groups(groups, m.level), m.busy_bytes) for m in messages)


def level_groups(groups: Ints, level: int) -> Ints:
    """Return the groups of ranks inside of nodes of `level` ranks, or across them if negative."""
    if not level:
        return groups
    nodes = groups.reshape(-1, groups.shape[-1] // abs(level), abs(level))
    inside = nodes if level > 0 else nodes.swapaxes(1, 2)
    return inside.reshape(-1, inside.shape[-1])


def link_rates(cluster: Cluster, ranks: Sequence[int]) -> tuple[float, ...]:
    """Return the bytes per second of each rank's share of its node's network card; () if equal."""
    if cluster.num_nodes == 1:
        return ()
    nodes = [cluster.node_of(rank) for rank in ranks]
    rates = tuple(
        n.nic.count * n.nic.bandwidth_bytes_per_s / n.count if n.nic else math.inf for n in nodes
    )
    return rates if len(set(rates)) > 1 else ()


def link_time(shares: Sequence[float], rates: Sequence[float]) -> float:
    """Return the time of the busiest link while owners receive and others send their gradients.

    A rank sends what it does not own, and receives what it owns from all others: on full-duplex
    links, equal shares are the fastest, however unequal the links are.
    """
    others = len(shares) - 1
    pairs = zip(shares, rates or (1.0,) * len(shares), strict=True)
    return max(max(sum(shares) - share, others * share) / rate for share, rate in pairs)


def _busiest(form: Sync, num_ranks: int, rates: Sequence[float]) -> float:
    """Return the time of the busiest link, relative to equal shares on links as the slowest."""
    busy = link_time(_shares(form, num_ranks), rates) * min(rates, default=1.0)
    return busy * num_ranks / max(1, num_ranks - 1)


def _shares(form: Sync, num_ranks: int) -> list[float]:
    """Return the part of a parameter that each rank owns."""
    weights = form.weights(num_ranks) or (1,) * num_ranks
    return [weight / sum(weights) for weight in weights]
