"""Describe the shards of a model on this rank: boxes of full tensors, and their memory."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import CheckpointError, did_you_mean
from shardwise.runtime.devices import num_processes
from shardwise.runtime.grad_sync import sync_axis
from shardwise.runtime.memory import settle
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.optimizer import is_by_row
from shardwise.runtime.parameters import Entry
from shardwise.runtime.splits import local_runs

# ------------------------------------------------------------ boxes
# A rank's shard of a tensor consists of runs in every dim, and may in addition be a range of the
# row-major local tensor (ZeRO). Either way it is a set of boxes with an offset and a size in the
# full tensor: `local_boxes` returns them with the memory that stores each, and `check_cover` checks
# that boxes make up a tensor.
#
#     >>> [(b.offset, b.size) for b in range_boxes((3, 4), 2, 9)]
#     [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]

Runs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Box:
    """An offset and a size in every dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box that is the full tensor."""
        return cls((0,) * len(shape), tuple(shape))

    def on_ranks(self, first: int, count: int) -> Box:
        """Return the box in a tensor whose first dim are ranks."""
        return Box((first, *self.offset), (count, *self.size))

    def inner(self) -> Box:
        """Return the box without its first dim."""
        return Box(self.offset[1:], self.size[1:])


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of the full tensor, and this rank's memory of it, in the box's shape."""

    box: Box
    view: Tensor


def narrow(tensor: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return the view of a tensor at a box."""
    for dim, (begin, length) in enumerate(zip(offset, size, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def range_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes of elements `begin` … `end` in row-major order, in that order.

    There are at most 2·dims - 1: in every dim the end of a row, full rows, the start of a row.
    """
    if begin >= end:
        return []
    if not shape or (begin == 0 and end == math.prod(shape)):
        return [Box.full(shape)]
    inner, row = tuple(shape[1:]), math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return _in_row(first - 1, range_boxes(inner, begin - last * row, end - last * row))
    boxes: list[Box] = []
    if begin < first * row:
        boxes += _in_row(first - 1, range_boxes(inner, begin - (first - 1) * row, row))
    if first < last:
        boxes.append(Box((first, *(0 for _ in inner)), (last - first, *inner)))
    if last * row < end:
        boxes += _in_row(last, range_boxes(inner, 0, end - last * row))
    return boxes


def _in_row(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes]


def local_boxes(
    runs: Sequence[Runs], local: Tensor, bounds: tuple[int, int] | Box | None
) -> list[LocalBox]:
    """Return the boxes of the full tensor that a rank has, with their memory; none is empty.

    `runs` are the runs of the full tensor in every dim that make up the local tensor. `local` is
    that tensor or, with `bounds`, the elements between them of its row-major form, in one dim, or
    a box of it.
    """
    if isinstance(bounds, Box):
        return _boxes_of_runs(runs, bounds, local)
    shape = tuple(sum(length for _, length in dim) for dim in runs)
    if bounds is None:
        return _boxes_of_runs(runs, Box.full(shape), local.reshape(shape))
    boxes, begin = [], 0
    for box in range_boxes(shape, *bounds):
        view = local[begin : begin + box.numel].view(box.size)
        boxes += _boxes_of_runs(runs, box, view)
        begin += box.numel
    return boxes


def _boxes_of_runs(runs: Sequence[Runs], box: Box, view: Tensor) -> list[LocalBox]:
    """Return a box of the local tensor as boxes of the full one."""
    if not box.numel:
        return []
    pieces = [list(_within(r, b, n)) for r, b, n in zip(runs, box.offset, box.size, strict=True)]
    boxes = []
    for piece in itertools.product(*pieces):
        offset, local_offset = tuple(p[0] for p in piece), tuple(p[1] for p in piece)
        size = tuple(p[2] for p in piece)
        boxes.append(LocalBox(Box(offset, size), narrow(view, local_offset, size)))
    return boxes


def _within(runs: Runs, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield start in the full dim, start in the range, and length of the runs in a local range."""
    local = 0
    for start, size in runs:
        low, high = max(begin, local), min(begin + length, local + size)
        if low < high:
            yield start + low - local, low - begin, high - low
        local += size


def split_box(local: LocalBox, max_bytes: int) -> list[LocalBox]:
    """Split a box into parts of at most `max_bytes`, or of one element."""
    box, view = local.box, local.view
    if view.nbytes <= max_bytes or box.numel <= 1:
        return [local]
    dim = next(d for d, n in enumerate(box.size) if n > 1)
    row = view.nbytes // box.size[dim]
    step = max(1, max_bytes // row)
    parts = []
    for begin in range(0, box.size[dim], step):
        length = min(step, box.size[dim] - begin)
        offset = tuple(o + begin if d == dim else o for d, o in enumerate(box.offset))
        size = tuple(length if d == dim else n for d, n in enumerate(box.size))
        parts += split_box(LocalBox(Box(offset, size), view.narrow(dim, begin, length)), max_bytes)
    return parts


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not within the tensor, overlap, or leave elements out."""
    for box in boxes:
        inside = len(box.offset) == len(box.size) == len(shape)
        inside = inside and all(o >= 0 and n > 0 for o, n in zip(box.offset, box.size, strict=True))
        if not inside or any(e > n for e, n in zip(box.end, shape, strict=True)):
            raise CheckpointError(f"{box} is not within {name} of shape {tuple(shape)}")
    overlap = _overlap(boxes) if len(boxes) > 1 else None
    if overlap is not None:
        raise CheckpointError(f"boxes of {name} overlap: {overlap[0]} and {overlap[1]}")
    covered, numel = sum(box.numel for box in boxes), math.prod(shape)
    if covered != numel:
        raise CheckpointError(f"the boxes of {name} have {covered} of its {numel} elements")


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, by a sweep along the dim with the most distinct offsets."""
    dims = range(len(boxes[0].offset))
    if not dims:
        return boxes[0], boxes[1]
    sweep = max(dims, key=lambda d: len({box.offset[d] for box in boxes}))
    active: list[tuple[int, int]] = []
    for index in sorted(range(len(boxes)), key=lambda i: boxes[i].offset[sweep]):
        box = boxes[index]
        del active[: bisect.bisect_right(active, (box.offset[sweep], len(boxes)))]
        for _, other in active:
            if all(
                a < d and c < b
                for a, b, c, d in zip(
                    box.offset, box.end, boxes[other].offset, boxes[other].end, strict=True
                )
            ):
                return boxes[other], box
        bisect.insort(active, (box.end[sweep], index))
    return None


# ------------------------------------------------------------ the state of a module
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShards:
    """Boxes of one full tensor on this rank; all `ranks` have the same boxes.

    The values of a `volatile` tensor may change in a forward, others only when they are updated.
    With `merge`, the first dim are ranks, each of which has its own values; another number of ranks
    continues from their mean, or from equal parts of their sum.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[LocalBox, ...]
    ranks: tuple[int, ...]
    volatile: bool = False
    merge: str = ""


MEAN, SUM = "mean", "sum"


def _replicated(
    name: str, tensor: Tensor, ranks: tuple[int, ...], *, volatile: bool = False
) -> TensorShards:
    shape = tuple(tensor.shape)
    boxes = (LocalBox(Box.full(shape), tensor.detach()),) if tensor.numel() else ()
    return TensorShards(
        name=name, shape=shape, dtype=tensor.dtype, boxes=boxes, ranks=ranks, volatile=volatile
    )


class _State:
    """The parameters and buffers of a module on this rank, under their names on a single device.

    `order` has all names as in the state dict, `aliases` further names of tensors, `remote_names`
    those that only other ranks have. If `collective`, all ranks load together.
    """

    collective = False
    order: Sequence[str]
    aliases: Mapping[str, str]
    remote_names: frozenset[str] = frozenset()

    def is_replica(self, name: str) -> bool:
        """Return whether other ranks own a parameter and write it."""
        return False

    def finish_loading(self) -> None:
        """Propagate the values that were written into the targets."""

    def mark_initialized(self, names: Collection[str]) -> None:
        """Record which tensors a checkpoint has given values."""

    def metadata(self) -> dict[str, Any]:
        """Return other state of the module, as JSON."""
        return {}

    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Restore what `metadata` returned."""


class ParallelState(_State):
    """The state of a parallel module."""

    collective = True

    def __init__(self, module: ParallelModule) -> None:
        self.module, self.store, self.mesh = module, module.store, module.mesh
        specs: list[Any] = [*(e.spec for e in self.store.entries), *self.store.buffer_specs]
        self.aliases = {alias: spec.name for spec in specs for alias in spec.aliases}
        self.remote_names, self.order = self.store.elsewhere, module.names

    def tensors(self) -> list[TensorShards]:
        """Return the tensors to save."""
        tensors = []
        for entry in self.store.entries:
            if not entry.spec.borrowed:
                value, piece = self.store.stored(entry)
                tensors.append(self._shards(entry, value, piece=piece))
        return tensors + self._buffers()

    def _buffers(self) -> list[TensorShards]:
        ranks = self.mesh.world.ranks
        return [
            _replicated(spec.name, self.store.buffers[spec.name], ranks, volatile=True)
            for spec in self.store.buffer_specs
            if spec.persistent
        ]

    def targets(self) -> list[TensorShards]:
        """Return the tensors to fill; a name may occur twice: as used, and as stored."""
        targets = []
        for entry in self.store.entries:
            if entry.zero < 3:
                targets.append(self._shards(entry, entry.leaf.detach(), piece=False))
            if entry.has_master_copy or entry.zero == 3:
                targets.append(self._shards(entry, entry.piece.detach(), piece=True))
        return targets + self._buffers()

    def shared(self, entry: Entry, tensor: Tensor) -> TensorShards:
        """Return a tensor like the parameter, which has the same values on all its ranks."""
        return self._shards(entry, tensor.view(entry.local_shape), piece=False)

    def per_rank(self, entry: Entry, tensor: Tensor, merge: str) -> TensorShards:
        """Return a tensor like the parameter, of which each rank of its axis has its own."""
        by_row = is_by_row(tensor, entry.piece.shape)
        shards = self._rows(entry, tensor) if by_row else self.shared(entry, tensor)
        axis = sync_axis(entry, self.mesh)
        boxes = [LocalBox(b.box.on_ranks(axis.index, 1), b.view.unsqueeze(0)) for b in shards.boxes]
        ranks = self._other_ranks({s.axis for s in entry.spec.splits} | set(entry.spec.sync))
        shape = (axis.size, *shards.shape)
        return replace(shards, shape=shape, boxes=tuple(boxes), ranks=ranks, merge=merge)

    def _other_ranks(self, axes: Collection[str]) -> tuple[int, ...]:
        """Return the ranks at this rank's place along these axes."""
        return self.mesh.space_axis(*(name for name in self.mesh.axes if name not in axes)).ranks

    def is_first(self, name: str, tensor: Tensor, rank: int) -> bool:
        """Return whether a rank writes the numbers that belong to a parameter."""
        entry = self.store.entry(name)
        shards = self.shared(entry, tensor) if entry.spec.is_local else self.sharded(name, tensor)
        return shards.ranks[0] == rank

    def sharded(self, name: str, tensor: Tensor) -> TensorShards:
        """Return the shards of a tensor that is sharded as a parameter, its rows, or its pieces."""
        entry = self.store.entry(name)
        by_row = is_by_row(tensor, entry.piece.shape)
        if entry.spec.is_local and (by_row or tuple(tensor.shape) == entry.local_shape):
            return self.per_rank(entry, tensor.detach(), MEAN)
        if by_row:
            return self._rows(entry, tensor.detach())
        if tensor.shape == entry.piece.shape:
            return self._shards(entry, tensor.detach(), piece=True)
        if tuple(tensor.shape) == entry.local_shape:
            return self._shards(entry, tensor.detach(), piece=False)
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} for {name}, of which this rank updates a "
            f"shard of shape {tuple(entry.piece.shape)} and uses one of {entry.local_shape}"
        )

    def _rows(self, entry: Entry, tensor: Tensor) -> TensorShards:
        """Return the shards of a tensor with an element for each row of this rank's piece."""
        shards, boxes, begin = self._shards(entry, entry.piece.detach(), piece=True), [], 0
        for box in (local.box for local in shards.boxes):
            view = tensor[begin : begin + box.size[0]]
            boxes.append(LocalBox(Box(box.offset[:1], box.size[:1]), view))
            begin += len(view)
        return replace(shards, shape=shards.shape[:1], dtype=tensor.dtype, boxes=tuple(boxes))

    def is_replica(self, name: str) -> bool:
        return self.store.entry(name).spec.borrowed

    def replicated(self, name: str, tensor: Tensor) -> TensorShards:
        """Return a tensor that belongs to a parameter, but has a different shape."""
        entry = self.store.entry(name)
        is_split = any(self.mesh.axes[split.axis] != 1 for split in entry.spec.splits)
        if is_split or entry.group is not None or entry.spec.is_local:
            raise CheckpointError(
                f"state of shape {tuple(tensor.shape)} for {name}, of which this rank has only "
                f"{tuple(entry.piece.shape)} of {entry.spec.shape}",
                hint="a plan that replicates parameters (ddp) for this optimizer",
            )
        return _replicated(name, tensor, self.mesh.world.ranks)

    def _shards(self, entry: Entry, value: Tensor, *, piece: bool) -> TensorShards:
        spec, mesh, group = entry.spec, self.mesh, entry.group if piece else None
        runs = local_runs(spec.shape, spec.splits, mesh.coordinates, mesh.axes)
        ranks = self._other_ranks({s.axis for s in spec.splits} | set(spec.sync if group else ()))
        bounds: tuple[int, int] | Box | None = None
        if group is not None:
            # The ranges of a flat buffer may differ between these ranks, if they shard its other
            # tensors unevenly. Those of the ranks at one coordinate of the other axes are complete.
            ranks, bounds = ranks[:1], entry.bounds
        if group is not None and group.dim is not None:
            shape, start = group.part_shape(entry), group.row_starts[group.axis.index]
            offset = tuple(start if dim == group.dim else 0 for dim in range(len(shape)))
            value, bounds = group.restored(value.reshape(-1), shape), Box(offset, shape)
        return TensorShards(
            name=spec.name,
            shape=spec.shape,
            dtype=value.dtype,
            boxes=tuple(local_boxes(runs, value, bounds)),
            ranks=ranks,
        )

    def finish_loading(self) -> None:
        settle(self.store.device)
        for group in self.store.groups:
            if group.zero == 3:
                group.refresh()
        settle(self.store.device)

    def mark_initialized(self, names: Collection[str]) -> None:
        saved = set(self.module.names)  # without buffers that no checkpoint has
        self.store.uninitialized = {
            name: reason
            for name, reason in self.store.uninitialized.items()
            if name not in (names if self.store.holds(name) else saved)
        }

    def uninitialized(self) -> list[str]:
        """Return the names of tensors without values that no checkpoint has."""
        return list(self.store.uninitialized)

    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"random_step": self.module.rng.step}
        if self.store.scaler is not None:
            metadata["loss_scaler"] = self.store.scaler.state_dict()
        return metadata

    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        step = metadata.get("random_step")
        if type(step) is int:
            self.module.rng.step = step
        scaler = metadata.get("loss_scaler")
        if self.store.scaler is not None and isinstance(scaler, dict):
            try:
                self.store.scaler.load_state_dict(scaler)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"malformed state of the loss scaler: {scaler}") from error


class PlainState(_State):
    """The state of a plain module, which every rank has in full.

    It has no metadata: one device draws its random numbers from torch's generator.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = _unwrapped(module)
        self.ranks = tuple(range(num_processes()))
        self.named: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor) or type(tensor).__name__ == "DTensor":
                raise CheckpointError(
                    f"{name} in the module's state is a {type(tensor).__name__}, not a plain tensor"
                )
            if id(tensor) in first:
                self.aliases[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
                self.named[name] = tensor
        self.order = tuple(self.named)

    def tensors(self) -> list[TensorShards]:
        for name, tensor in self.named.items():
            if tensor.is_meta:
                raise CheckpointError(f"{name} is a meta tensor: it has no values to save")
        return self.targets()

    def targets(self) -> list[TensorShards]:
        for name, tensor in list(self.named.items()):
            if tensor.is_meta:
                self.named[name] = self._allocated(name, tensor)
        return [
            _replicated(n, t, self.ranks, volatile=not isinstance(t, nn.Parameter))
            for n, t in self.named.items()
        ]

    def _allocated(self, name: str, tensor: Tensor) -> Tensor:
        """Replace a meta tensor by one with memory, under all of its names."""
        allocated: Tensor = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            allocated = nn.Parameter(allocated, requires_grad=tensor.requires_grad)
        for alias in (name, *(a for a, n in self.aliases.items() if n == name)):
            path, _, attribute = alias.rpartition(".")
            setattr(self.module.get_submodule(path), attribute, allocated)
        return allocated

    def is_first(self, name: str, tensor: Tensor, rank: int) -> bool:
        return rank == self.ranks[0]

    def sharded(self, name: str, tensor: Tensor) -> TensorShards:
        parameter = self.named.get(self.aliases.get(name, name))
        if parameter is None:
            raise CheckpointError(f"no parameter {name!r}{did_you_mean(name, self.named)}")
        if parameter.shape != tensor.shape and not is_by_row(tensor, parameter.shape):
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} for {name} of {tuple(parameter.shape)}"
            )
        return self.replicated(self.aliases.get(name, name), tensor)

    def replicated(self, name: str, tensor: Tensor) -> TensorShards:
        return _replicated(name, tensor, self.ranks)

    def uninitialized(self) -> list[str]:
        return [name for name, tensor in self.module.named_buffers() if tensor.is_meta]


State = ParallelState | PlainState


def state_of(module: nn.Module) -> State:
    """Return the state of a parallel module, or of a plain one."""
    return ParallelState(module) if isinstance(module, ParallelModule) else PlainState(module)


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's module inside torch's wrappers, which change its names."""
    while True:
        inner: Any = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner
