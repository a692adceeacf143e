"""What this rank holds of a model: full tensors as boxes of its memory."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import CheckpointError, did_you_mean
from shardwise.runtime.memory import settle
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.parameters import Entry
from shardwise.runtime.splits import local_runs

__all__ = [
    "Box",
    "Held",
    "Placed",
    "State",
    "check_cover",
    "cut_boxes",
    "narrow",
    "range_boxes",
    "split_box",
    "state_of",
]


# Boxes: what of a full tensor is where.
#
# A rank's part of a tensor is cut by runs in every dim, and may be a range of the row-major local
# tensor on top (ZeRO). Either way it is a set of boxes, each with an offset and a size in the full
# tensor: `cut_boxes` gives them, each with the memory that holds it, and `check_cover` says whether
# boxes make up a tensor.
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
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of the full tensor, and the memory of this rank that holds it, in the box's shape."""

    box: Box
    view: Tensor


def narrow(tensor: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    """The view of a tensor at a box."""
    for dim, (begin, length) in enumerate(zip(offset, size, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def range_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes of elements `begin` … `end` in row-major order, in that order.

    They are at most 2·dims - 1: the rest of a row, whole rows, a part of a row, in every dim.
    """
    if begin >= end:
        return []
    if not shape or (begin == 0 and end == math.prod(shape)):
        return [Box.whole(shape)]
    rest, row = tuple(shape[1:]), math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return _in_row(first - 1, range_boxes(rest, begin - last * row, end - last * row))
    found: list[Box] = []
    if begin < first * row:
        found += _in_row(first - 1, range_boxes(rest, begin - (first - 1) * row, row))
    if first < last:
        found.append(Box((first, *(0 for _ in rest)), (last - first, *rest)))
    if last * row < end:
        found += _in_row(last, range_boxes(rest, 0, end - last * row))
    return found


def _in_row(row: int, boxes: Sequence[Box]) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes]


def cut_boxes(runs: Sequence[Runs], local: Tensor, bounds: tuple[int, int] | None) -> list[Placed]:
    """The boxes of the full tensor that a rank holds, with their memory; none is empty.

    `runs` are the pieces of the full tensor in every dim that make up the local one. `local` is
    that, or with `bounds` the elements between them of its row-major form, in one dim.
    """
    shape = tuple(sum(length for _, length in dim) for dim in runs)
    if bounds is None:
        return _at_runs(runs, Box.whole(shape), local.reshape(shape))
    found, place = [], 0
    for box in range_boxes(shape, *bounds):
        view = local[place : place + box.numel].view(box.size)
        found += _at_runs(runs, box, view)
        place += box.numel
    return found


def _at_runs(runs: Sequence[Runs], box: Box, view: Tensor) -> list[Placed]:
    """A box of the local tensor as boxes of the full one."""
    if not box.numel:
        return []
    pieces = [list(_within(r, b, n)) for r, b, n in zip(runs, box.offset, box.size, strict=True)]
    found = []
    for piece in itertools.product(*pieces):
        offset, here = tuple(p[0] for p in piece), tuple(p[1] for p in piece)
        size = tuple(p[2] for p in piece)
        found.append(Placed(Box(offset, size), narrow(view, here, size)))
    return found


def _within(runs: Runs, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(start in the whole, start in the box, length) of the runs' parts in a range of the local."""
    place = 0
    for start, size in runs:
        low, high = max(begin, place), min(begin + length, place + size)
        if low < high:
            yield start + low - place, low - begin, high - low
        place += size


def split_box(placed: Placed, max_bytes: int) -> list[Placed]:
    """A box in parts of at most `max_bytes`, or of one element."""
    box, view = placed.box, placed.view
    if view.nbytes <= max_bytes or box.numel <= 1:
        return [placed]
    dim = next(d for d, n in enumerate(box.size) if n > 1)
    row = view.nbytes // box.size[dim]
    step = max(1, max_bytes // row)
    found = []
    for begin in range(0, box.size[dim], step):
        length = min(step, box.size[dim] - begin)
        offset = tuple(o + begin if d == dim else o for d, o in enumerate(box.offset))
        size = tuple(length if d == dim else n for d, n in enumerate(box.size))
        found += split_box(Placed(Box(offset, size), view.narrow(dim, begin, length)), max_bytes)
    return found


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Refuse boxes that are not within the tensor, overlap, or leave something out."""
    for box in boxes:
        inside = len(box.offset) == len(box.size) == len(shape)
        inside = inside and all(o >= 0 and n > 0 for o, n in zip(box.offset, box.size, strict=True))
        if not inside or any(e > n for e, n in zip(box.end, shape, strict=True)):
            raise CheckpointError(f"a box {box} is not within {name} of shape {tuple(shape)}")
    clash = _overlap(boxes) if len(boxes) > 1 else None
    if clash is not None:
        raise CheckpointError(f"boxes of {name} overlap: {clash[0]} and {clash[1]}")
    covered, numel = sum(box.numel for box in boxes), math.prod(shape)
    if covered != numel:
        raise CheckpointError(f"the boxes of {name} have {covered} of its {numel} elements")


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that overlap, found by a sweep along the dim where they begin at most places."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One full tensor, of which this rank has some boxes, as have all `holders`.

    `volatile` ones may change in a forward, the others only when they are updated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placed: tuple[Placed, ...]
    holders: tuple[int, ...]
    volatile: bool = False


class State(Protocol):
    """The parameters and buffers of a module on this rank, under the names of the single device."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tensors."""
        ...

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names that other ranks hold."""
        ...

    @property
    def collective(self) -> bool:
        """Whether all ranks load together."""
        ...

    @property
    def order(self) -> Sequence[str]:
        """All names, as the single device's state dict has them."""
        ...

    def tensors(self) -> list[Held]:
        """What is to be saved."""
        ...

    def targets(self) -> list[Held]:
        """What is to be filled; one name may come twice (as used, and as stored)."""
        ...

    def cut(self, name: str, tensor: Tensor) -> Held:
        """A tensor that is cut as the parameter of this name is, or as its optimizer's piece."""
        ...

    def borrows(self, name: str) -> bool:
        """Whether a parameter's home is on other ranks."""
        ...

    def whole(self, name: str, tensor: Tensor) -> Held:
        """A tensor that belongs to a parameter but has a shape of its own."""
        ...

    def filled(self) -> None:
        """Take over what was written into the targets."""
        ...

    def received(self, names: Collection[str]) -> None:
        """Note which tensors have been given the values of a checkpoint."""
        ...

    def unfilled(self) -> list[str]:
        """Names that no checkpoint has and that are without values."""
        ...

    def facts(self) -> dict[str, Any]:
        """What else belongs to the module, as JSON."""
        ...

    def take_facts(self, facts: Mapping[str, Any]) -> None:
        """Continue from saved facts."""
        ...


def state_of(module: nn.Module) -> State:
    """The state of a parallel module, or of a plain one."""
    if isinstance(module, ParallelModule):
        return ParallelState(module)
    return PlainState(module)


def _world() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)


def _whole(name: str, tensor: Tensor, holders: tuple[int, ...], *, volatile: bool = False) -> Held:
    shape = tuple(tensor.shape)
    placed = (Placed(Box.whole(shape), tensor.detach()),) if tensor.numel() else ()
    return Held(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        placed=placed,
        holders=holders,
        volatile=volatile,
    )


class ParallelState:
    """A parallel module's."""

    collective = True

    def __init__(self, module: ParallelModule) -> None:
        self.module, self.store, self.mesh = module, module.store, module.mesh
        specs: list[Any] = [*(e.spec for e in self.store.entries), *self.store.buffer_specs]
        self.aliases = {alias: spec.name for spec in specs for alias in spec.aliases}
        self.elsewhere, self.order = self.store.elsewhere, module.names

    def tensors(self) -> list[Held]:
        found = []
        for entry in self.store.entries:
            if not entry.spec.borrowed:
                value, piece = self.store.stored(entry)
                found.append(self._held(entry, value, piece=piece))
        return found + self._buffers()

    def _buffers(self) -> list[Held]:
        ranks = self.mesh.world.ranks
        return [
            _whole(spec.name, self.store.buffers[spec.name], ranks, volatile=True)
            for spec in self.store.buffer_specs
            if spec.persistent
        ]

    def targets(self) -> list[Held]:
        found = []
        for entry in self.store.entries:
            if entry.zero < 3:
                found.append(self._held(entry, entry.leaf.detach(), piece=False))
            if entry.has_master_copy or entry.zero == 3:
                found.append(self._held(entry, entry.piece.detach(), piece=True))
        return found + self._buffers()

    def cut(self, name: str, tensor: Tensor) -> Held:
        entry = self.store.entry(name)
        if tensor.shape == entry.piece.shape:
            return self._held(entry, tensor.detach(), piece=True)
        if tuple(tensor.shape) == entry.local_shape:
            return self._held(entry, tensor.detach(), piece=False)
        raise CheckpointError(
            f"a tensor of shape {tuple(tensor.shape)} for {name}, of which this rank has "
            f"{tuple(entry.piece.shape)} to update and {entry.local_shape} to use"
        )

    def borrows(self, name: str) -> bool:
        return self.store.entry(name).spec.borrowed

    def whole(self, name: str, tensor: Tensor) -> Held:
        entry = self.store.entry(name)
        cut = {split.axis for split in entry.spec.splits if self.mesh.axes[split.axis] != 1}
        if cut or entry.group is not None:
            raise CheckpointError(
                f"state of shape {tuple(tensor.shape)} for {name}, of which this rank has only "
                f"{tuple(entry.piece.shape)} of {entry.spec.shape}",
                hint="a plan that keeps parameters whole (ddp) for this optimizer",
            )
        return _whole(name, tensor, self.mesh.world.ranks)

    def _held(self, entry: Entry, value: Tensor, *, piece: bool) -> Held:
        spec, mesh = entry.spec, self.mesh
        ranged = piece and entry.group is not None
        runs = local_runs(spec.shape, spec.splits, mesh.coordinates, mesh.axes)
        distinct = {split.axis for split in spec.splits} | (set(spec.sync) if ranged else set())
        free = [name for name in mesh.axes if name not in distinct]
        holders = mesh.space_axis(*free).ranks
        if ranged:
            # Ranges of a flat buffer differ between ranks that cut its other tensors unevenly: what
            # makes up the whole is those of the ranks at one place on the other axes.
            holders = holders[:1]
        return Held(
            name=spec.name,
            shape=spec.shape,
            dtype=value.dtype,
            placed=tuple(cut_boxes(runs, value, entry.bounds if ranged else None)),
            holders=holders,
        )

    def filled(self) -> None:
        settle(self.store.device)
        for group in self.store.groups:
            if group.zero == 3:
                group.refresh()
        settle(self.store.device)

    def received(self, names: Collection[str]) -> None:
        saved = set(self.module.names)  # buffers that no checkpoint has are not among them
        self.store.uninitialized = {
            name: reason
            for name, reason in self.store.uninitialized.items()
            if name not in (names if self.store.holds(name) else saved)
        }

    def unfilled(self) -> list[str]:
        return list(self.store.uninitialized)

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"random_step": self.module.rng.step}
        if self.store.scaler is not None:
            found["loss_scaler"] = self.store.scaler.state_dict()
        return found

    def take_facts(self, facts: Mapping[str, Any]) -> None:
        step = facts.get("random_step")
        if type(step) is int:
            self.module.rng.step = step
        scaler = facts.get("loss_scaler")
        if self.store.scaler is not None and isinstance(scaler, dict):
            try:
                self.store.scaler.load_state_dict(scaler)
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"a loss scaler's state {scaler} is malformed") from error


class PlainState:
    """That of a module which is whole on every rank that has it."""

    collective = False
    elsewhere: frozenset[str] = frozenset()

    def __init__(self, module: nn.Module) -> None:
        self.module = _unwrapped(module)
        found: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, Tensor) or type(tensor).__name__ == "DTensor":
                raise CheckpointError(
                    f"the module's state has {type(tensor).__name__} {name}, which is no plain "
                    "tensor"
                )
            if id(tensor) in first:
                self.aliases[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
                found[name] = tensor
        self.named, self.order = found, tuple(found)

    def tensors(self) -> list[Held]:
        meta = [name for name, tensor in self.named.items() if tensor.is_meta]
        if meta:
            raise CheckpointError(f"{meta[0]} is on meta: it has no values that could be saved")
        return self.targets()

    def targets(self) -> list[Held]:
        for name, tensor in list(self.named.items()):
            if tensor.is_meta:
                self.named[name] = self._made_real(name, tensor)
        return [
            _whole(n, t, _world(), volatile=not isinstance(t, nn.Parameter))
            for n, t in self.named.items()
        ]

    def _made_real(self, name: str, tensor: Tensor) -> Tensor:
        """Memory for a tensor on meta, under all of its names."""
        made: Tensor = torch.empty_like(tensor, device="cpu")
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        for alias in (name, *(a for a, n in self.aliases.items() if n == name)):
            path, _, last = alias.rpartition(".")
            setattr(self.module.get_submodule(path), last, made)
        return made

    def cut(self, name: str, tensor: Tensor) -> Held:
        mine = self.named.get(self.aliases.get(name, name))
        if mine is None:
            raise CheckpointError(f"no parameter {name!r}{did_you_mean(name, self.named)}")
        if mine.shape != tensor.shape:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} for {name} of {tuple(mine.shape)}"
            )
        return _whole(self.aliases.get(name, name), tensor, _world())

    def borrows(self, name: str) -> bool:
        return False

    def whole(self, name: str, tensor: Tensor) -> Held:
        return _whole(name, tensor, _world())

    def filled(self) -> None:
        """Nothing: the module's own memory was filled."""

    def received(self, names: Collection[str]) -> None:
        """Nothing: what has no values is on meta."""

    def unfilled(self) -> list[str]:
        return [name for name, tensor in self.module.named_buffers() if tensor.is_meta]

    def facts(self) -> dict[str, Any]:
        return {}

    def take_facts(self, facts: Mapping[str, Any]) -> None:
        """Nothing: one device draws its random numbers from torch's generator."""


def _unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside of torch's wrappers, which change its names."""
    while True:
        inner: Any = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner
