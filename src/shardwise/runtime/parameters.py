"""Parameters and buffers: their declaration in generated modules, and their storage on a rank."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.inexact import Inexact
from shardwise.runtime.memory import CopyStream, host_empty
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Split
from shardwise.runtime.sync_forms import RowExchange, complete
from shardwise.runtime.transport import Pending
from shardwise.shares import Shares, part


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter: its full shape, and how it is sharded, stored and synchronized.

    `splits` take the tensor that the forward uses from the full one. Its gradient is a partial sum
    on the axes of `sync`, over which `zero` shards the optimizer state (1), also the gradient (2),
    and also the parameter (3). `unit` is the path of the module before whose forward a parameter
    of zero 3 is gathered; "" is the root.

    The forward uses it in `dtype`. It is stored and optimized in `master`; the gradients of
    micro-batches are accumulated in `gradient` and summed over ranks in `reduce`. The default ""
    stands for: `master` as `dtype`, `gradient` as `master`, `reduce` as `gradient`.

    A `borrowed` parameter is a replica of one that other ranks own (a weight tied between pipeline
    stages); its gradient is that of the last step only. `offload` lists what is in host memory:
    "optimizer" (stored values and optimizer state) or "parameters" (everything, except during use).

    `owners` are the ranks' weights in the division of what `zero` shards, which is along `dim` if
    that is not None. Gradients are summed in buckets of `bucket` bytes and `chunk` gradients, 0 for
    the default, and by nodes of `node_ranks`. `sparse` gradients are exchanged as rows; those of
    `factors` as the factors of a product.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    splits: tuple[Split, ...] = ()
    sync: tuple[str, ...] = ()
    zero: int = 0
    owners: tuple[int, ...] = ()
    dim: int | None = None
    bucket: int = 0
    chunk: int = 0
    node_ranks: int = 0
    factors: bool = False
    sparse: bool = False
    unit: str = ""
    requires_grad: bool = True
    master: str = ""
    gradient: str = ""
    reduce: str = ""
    offload: tuple[str, ...] = ()
    borrowed: bool = False
    inexact: Inexact | None = None  # how its synchronization differs from synchronous training

    @property
    def is_local(self) -> bool:
        """Whether ranks train their own replicas between rounds."""
        return self.inexact is not None and self.inexact.is_local


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """One buffer, replicated on every rank."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    persistent: bool = True


class Scope(nn.Module):
    """A module with indexed members: by number as in a list, or by name as in a dict."""

    def __getitem__(self, index: int | str | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(index.start or 0, index.stop)]
        key = str(index)
        for members in (self._modules, self._parameters, self._buffers):
            if key in members:
                return members[key]
        raise KeyError(f"no member {key!r} in {type(self).__name__}")


def attach(module: nn.Module, path: str, child: nn.Module) -> None:
    """Add a module at a dotted path, with bare modules in between."""
    owner, last = locate(module, path, create=True)
    owner.add_module(last, child)


def torch_dtype(name: str) -> torch.dtype:
    """Return `torch.bfloat16` for `"bfloat16"`."""
    result = getattr(torch, name.removeprefix("torch."))
    assert isinstance(result, torch.dtype), name
    return result


def locate(module: nn.Module, name: str, *, create: bool = False) -> tuple[nn.Module, str]:
    """Return the module that owns a dotted name, and the last part of the name."""
    *path, last = name.split(".")
    for step in path:
        child = module._modules.get(step)
        if child is None:
            if not create:
                raise AttributeError(f"{type(module).__name__} has no module {step!r} for {name!r}")
            child = Scope()
            module.add_module(step, child)
        module = child
    return module, last


def declare(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    dtype: str = "float32",
    requires_grad: bool = True,
) -> None:
    """Register a parameter without memory at a dotted path, with bare modules in between.

    The store allocates its memory. Generated code then reads `self.attn.qkv.weight`.
    """
    owner, last = locate(module, name, create=True)
    empty = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device="meta")
    owner.register_parameter(last, nn.Parameter(empty, requires_grad=requires_grad))


def declare_buffer(
    module: nn.Module,
    name: str,
    shape: Sequence[int],
    dtype: str = "float32",
    persistent: bool = True,
) -> None:
    """Register a buffer without memory at a dotted path."""
    owner, last = locate(module, name, create=True)
    empty: Tensor = torch.empty(tuple(shape), dtype=torch_dtype(dtype), device="meta")
    owner.register_buffer(last, empty, persistent=persistent)


# Storage on this rank. An `Entry` is one parameter. With zero >= 1, entries of one dtype and set of
# synchronizing axes (with zero 3, of one unit) form a `FlatGroup`: their local tensors one after
# the other, of which each rank of the axis owns one consecutive range. The ranges are even also
# where ranks take unequal shares of a batch, since slower devices do not have less memory. A rank's
# optimizer works on the `pieces` that it owns; they have separate memory where their dtype or
# device differs from those of the forward.


BUCKET_BYTES = 4 << 20  # of messages, without a size that suits the cluster's links


class Entry:
    """One parameter on this rank.

    The forward uses `leaf`, into which autograd accumulates; modules hold `shown` between steps;
    the optimizer updates `piece`. For zero 0 the three are the same tensor; for zero 3 `shown` is
    the piece. A piece of another dtype, or in host memory, is a master copy: it never shares
    memory with the leaf. `parts` are the parts of the program (pipeline stages) on this rank that
    use the parameter.
    """

    def __init__(self, spec: ParameterSpec, local_shape: tuple[int, ...]) -> None:
        self.spec, self.local_shape = spec, local_shape
        self.bounds = (0, math.prod(local_shape))
        self.group: FlatGroup | None = None
        self.parts: set[Hashable] = set()
        self.slots: list[tuple[nn.Module, str]] = []
        self.leaf: nn.Parameter
        self.shown: nn.Parameter
        self.piece: nn.Parameter
        self.dtype = torch_dtype(spec.dtype)
        self.master = torch_dtype(spec.master or spec.dtype)
        self.gradient_dtype = torch_dtype(spec.gradient) if spec.gradient else self.master
        self.reduce_dtype = torch_dtype(spec.reduce) if spec.reduce else self.gradient_dtype
        own = not spec.borrowed
        self.leaves_device = own and "parameters" in spec.offload and bool(spec.shape)
        optimized = own and "optimizer" in spec.offload and spec.requires_grad
        self.on_host = self.leaves_device or optimized
        is_strided = bool(spec.dim)  # its pieces are not ranges of the leaf's memory
        self.has_master_copy = self.on_host or (own and (self.master != self.dtype or is_strided))

    def __repr__(self) -> str:
        return f"Entry({self.spec.name}, {self.local_shape}, zero={self.zero})"

    @property
    def zero(self) -> int:
        return self.group.zero if self.group is not None else 0

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def trained(self) -> bool:
        """Whether an optimizer of this rank updates the parameter once it has a gradient."""
        return self.spec.requires_grad and not self.spec.borrowed

    def set_trained(self, trained: bool) -> None:
        """Let autograd compute gradients of this parameter from now on, or stop doing so."""
        for parameter in (self.leaf, self.shown, self.piece):
            parameter.requires_grad_(trained)

    def clear_gradient(self) -> None:
        """Remove the gradient."""
        self.leaf.grad = self.piece.grad = self.shown.grad = None

    def show(self, parameter: nn.Parameter) -> None:
        """Put this parameter into the modules."""
        for owner, name in self.slots:
            owner._parameters[name] = parameter

    def allocate(self, device: torch.device) -> None:
        """Give the parameter its own memory, outside of any flat group."""
        empty = torch.empty(self.local_shape, dtype=self.dtype, device=device)
        self.leaf = nn.Parameter(empty, requires_grad=self.spec.requires_grad)
        self.shown = self.piece = self.leaf
        if self.has_master_copy:
            stored = self.empty_stored(self.local_shape, device)
            self.piece = nn.Parameter(stored, requires_grad=self.spec.requires_grad)
        self.take_gradients_in(self.master)

    def empty_stored(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Allocate memory for stored values, on the device or the host."""
        if self.on_host:
            return host_empty(shape, self.master, device)
        return torch.empty(tuple(shape), dtype=self.master, device=device)

    def take_gradients_in(self, dtype: torch.dtype) -> None:
        """Set the dtype of the leaf's gradients; it has none now."""
        if self.spec.requires_grad and self.leaf.grad_dtype != dtype:
            self.leaf.grad_dtype = dtype


class FlatGroup:
    """Several entries as one flat buffer that the ranks of an axis own in ranges.

    The forward uses `full`. This rank stores its `shard`: for zero 1 and 2 a view of its `own`
    range of `full`, unless it is a master copy. For zero 3 with shards in host memory for the
    optimizer only, `resident` is the copy of the shard on the device, from which ranks gather.
    """

    def __init__(self, entries: Sequence[Entry], axis: Axis, device: torch.device) -> None:
        self.entries = tuple(entries)
        first = self.entries[0]
        self.zero = 3 if first.leaves_device else first.spec.zero
        self.axis = axis.about("parameters" if self.zero == 3 else "update")
        self.numel = sum(entry.numel for entry in self.entries)
        self.dim = first.spec.dim
        shares = Shares.of(first.spec.owners) if first.spec.owners else axis.size
        unit = 1  # of which each rank owns a number
        if self.dim is not None:
            unit = self.numel // max(1, first.local_shape[self.dim])
        parts = [part(self.numel // max(1, unit), shares, i) for i in range(axis.size)]
        self.ranges = [(start * unit, length * unit) for start, length in parts]
        self.sizes = [length for _, length in self.ranges]
        self.row_starts = [start for start, _ in parts] + [self.numel // max(1, unit)]
        self.changed: list[Tensor] = []  # rows of the shard with a gradient since the last update
        self.rows: RowExchange | None = None
        if first.spec.sparse:
            self.rows = RowExchange(self.axis, self.row_starts, first.local_shape[1:])
        self.offsets = list(itertools.accumulate((e.numel for e in self.entries), initial=0))
        self.full = torch.empty(self.numel, dtype=first.dtype, device=device)
        begin, length = self.ranges[axis.index]
        self.own = self.full[begin : begin + length]
        self.has_master_copy = first.has_master_copy
        stored = self.zero == 3 or self.has_master_copy
        self.shard = first.empty_stored((length,), device) if stored else self.own
        self.resident: Tensor | None = None
        if self.zero == 3 and first.on_host and not first.leaves_device:
            self.resident = torch.empty_like(self.own)
        self._stream = CopyStream(device) if first.on_host and self.resident is None else None
        for index, entry in enumerate(self.entries):
            self._adopt(entry, index, begin)
        if self.zero == 3:
            self.free()

    def _adopt(self, entry: Entry, index: int, begin: int) -> None:
        start, trainable = self.offsets[index], entry.spec.requires_grad
        # `.data` has its own version counter: writing to the buffer does not invalidate tensors
        # that autograd has saved.
        view = self.full[start : start + entry.numel].view(entry.local_shape).data
        entry.leaf = nn.Parameter(view, requires_grad=trainable)
        entry.group, entry.bounds = self, self.bounds(index, self.axis.index)
        low, high = entry.bounds
        own = self.shard[max(start - begin, 0) :][: high - low].data
        if entry.spec.sparse or self.dim == 0:
            own = own.view(-1, *entry.local_shape[1:])
        entry.piece = nn.Parameter(own, requires_grad=trainable)
        entry.shown = entry.piece if self.zero == 3 else entry.leaf
        entry.take_gradients_in(entry.master)

    def bounds(self, index: int, rank: int) -> tuple[int, int]:
        """Return the range of entry `index` that a rank of the axis owns."""
        begin, length = self.ranges[rank]
        start, numel = self.offsets[index], self.entries[index].numel
        low = min(max(begin - start, 0), numel)
        return low, min(max(begin + length - start, low), numel)

    def piece_sizes(self, entry: Entry) -> list[int]:
        """Return how many elements of the entry each rank of the axis owns."""
        index = self.entries.index(entry)
        ranges = [self.bounds(index, rank) for rank in range(self.axis.size)]
        return [high - low for low, high in ranges]

    def arranged(self, local: Tensor) -> Tensor:
        """Return an entry's local tensor as one dim, in which every rank owns a range."""
        return (local.movedim(self.dim, 0) if self.dim else local).reshape(-1)

    def restored(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the tensor of this shape, possibly a part along `dim`, that was `arranged`."""
        if not self.dim:
            return flat.view(tuple(shape))
        first = [shape[self.dim], *shape[: self.dim], *shape[self.dim + 1 :]]
        return flat.view(first).movedim(0, self.dim)

    def part_shape(self, entry: Entry) -> tuple[int, ...]:
        """Return the shape of this rank's part of an entry that is divided along `dim`."""
        assert self.dim is not None
        shape = list(entry.local_shape)
        begin, end = self.row_starts[self.axis.index : self.axis.index + 2]
        shape[self.dim] = end - begin
        return tuple(shape)

    def pieces_of(self, shard: Tensor) -> list[Tensor]:
        """Split a tensor shaped as the shard into this rank's pieces of the entries."""
        return list(torch.split(shard, [e.bounds[1] - e.bounds[0] for e in self.entries]))

    def refresh(self) -> None:
        """Copy changed stored values to the device, if ranks gather from there."""
        if self.resident is not None:
            self.resident.copy_(self.shard, non_blocking=True)

    def gather(self) -> Pending:
        """Gather all ranks' shards into the full buffer, in the forward's dtype."""
        if self.zero == 3:
            storage = self.full.untyped_storage()
            storage.resize_(self.numel * self.full.element_size())
        shard = self.shard if self.resident is None else self.resident
        if self.dim:
            entry, own = self.entries[0], shard.to(self.full.device, self.full.dtype)
            leaf = entry.leaf.detach()
            return self.axis.all_gather(own, self.sizes).then(
                lambda flat: leaf.copy_(self.restored(flat, entry.local_shape))
            )
        if self._stream is not None:
            with self._stream.use():
                return self._stream.join(self._converted(shard))
        if not self.has_master_copy or self.resident is not None:
            return self.axis.all_gather(shard, self.sizes, out=self.full)
        return self._converted(shard)

    def gather_changed(self) -> None:
        """Send the rows that this rank's optimizer has changed to all other ranks."""
        entry, begin = self.entries[0], self.row_starts[self.axis.index]
        piece = entry.piece.detach()
        none = torch.empty(0, dtype=torch.int64, device=piece.device)
        own = torch.unique(torch.cat([none, *(c.to(piece.device) for c in self.changed)]))
        assert self.rows is not None
        indices, rows = complete(self.rows.gather_rows(own + begin, piece[own]))
        leaf = entry.leaf.detach()
        leaf.index_copy_(0, indices.to(leaf.device), rows.to(leaf))

    def _converted(self, shard: Tensor) -> Pending:
        self.own.copy_(shard, non_blocking=True)
        if self.axis.size == 1:
            return Pending(self.full)
        return self.axis.all_gather(self.own, self.sizes, out=self.full)

    def free(self) -> None:
        """Free the full buffer's memory (zero 3)."""
        self.full.untyped_storage().resize_(0)


def group_key(entry: Entry) -> Hashable:
    """Return the properties that all entries of a flat group have in common."""
    spec = entry.spec
    dtypes = (entry.dtype, entry.master, entry.gradient_dtype, entry.reduce_dtype)
    unit = spec.unit if spec.zero == 3 or entry.leaves_device else None  # gathered unit by unit
    storage = (unit, spec.sync, spec.zero, spec.requires_grad, spec.offload, spec.owners)
    return (*storage, spec.inexact, *limits(entry), dtypes, frozenset(entry.parts))


def limits(entry: Entry) -> tuple[int, int, int, str]:
    """Return the properties by which gradients may be summed together."""
    spec = entry.spec
    separate = spec.dim is not None or (spec.sparse and spec.zero) or spec.factors
    return spec.bucket or BUCKET_BYTES, spec.chunk, spec.node_ranks, spec.name if separate else ""


def buckets(
    entries: Iterable[Entry], key: Callable[[Entry], Hashable], size: Callable[[Entry], int]
) -> list[list[Entry]]:
    """Group entries into buckets: large ones get their own, small ones are grouped by key."""
    result: list[list[Entry]] = []
    open_buckets: dict[Hashable, list[Entry]] = {}
    filled: Counter[Hashable] = Counter()
    for entry in entries:
        limit, chunk, _, separate = limits(entry)
        if separate or size(entry) >= limit:
            result.append([entry])
            continue
        bucket = key(entry)
        open_buckets.setdefault(bucket, []).append(entry)
        filled[bucket] += size(entry)
        if filled[bucket] >= limit or len(open_buckets[bucket]) == chunk:
            result.append(open_buckets.pop(bucket))
            del filled[bucket]
    return result + list(open_buckets.values())
