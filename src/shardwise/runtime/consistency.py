"""Exchange and compare values of all ranks: replicas, batches, and the state of pipeline stages.

A checksum is computed on the tensor's device, from its bits, in integer arithmetic: equal tensors
have equal checksums on every kind of device.

`Replicas` compares values that several ranks have in common, after some of the optimizer's steps:
replicated or equally sharded parameters, buffers, and optimizer options (learning rates). Ranks
that compute the same thing on different devices may differ by rounding, which is not an error; so
values whose checksums differ are compared once more, by magnitude.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import BatchError, RankError
from shardwise.runtime.mesh import Axis, ProcessMesh, coordinates
from shardwise.runtime.parameters import Entry, torch_dtype
from shardwise.runtime.transport.process_group import ProcessGroupTransport

if TYPE_CHECKING:
    from shardwise.runtime.store import ParameterStore

BLOCK = 1 << 20  # elements that are summed up at a time
FIRST_CHECKS = (1, 10)  # optimizer steps after which replicas are compared ...
CHECK_EVERY = 100  # ... and the interval afterwards


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum of a tensor's bits, as an integer tensor on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    flat = flat.contiguous().view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for block in torch.split(flat, BLOCK):
        weights = _weights(flat.device)[: block.numel()]
        total = total * 1_000_003 + (block.to(torch.int64) * weights).sum()
    return total


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return irregular odd multipliers, so that exchanging two elements changes the sum."""
    place = torch.arange(BLOCK, dtype=torch.int64, device=device)
    mixed = (place + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1


def require_same_lengths(
    mesh: ProcessMesh, data: Mapping[str, object], device: torch.device
) -> None:
    """Raise a `RankError` on all ranks if the lengths of datasets or loaders differ between ranks.

    Data without a length are not compared; all ranks call it.
    """
    everyone = mesh.everyone
    for name, source in data.items():
        try:
            length = len(source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = -1
        lengths = [n for [n] in everyone.gather_integers([length], device)]
        different = _different(everyone, lengths)
        if different:
            known = [(r, n) for r, n in zip(everyone.ranks, lengths, strict=True) if n >= 0]
            raise RankError(
                f"{name} on ranks {different} differs in length from rank {everyone.ranks[0]}: "
                + ", ".join(f"{n} on rank {rank}" for rank, n in known[:8]),
                where=name,
                hint="give every rank all of the data: the plan decides which rows each one reads",
            )


def _different(axis: Axis, values: Sequence[object]) -> list[int]:
    """Return the ranks of an axis whose value differs from the first rank's."""
    return [rank for rank, v in zip(axis.ranks, values, strict=True) if v != values[0]]


class Replicas:
    """Compare values that ranks have in common, after some of an optimizer's steps."""

    def __init__(self, store: ParameterStore, mesh: ProcessMesh) -> None:
        self.store, self.mesh = store, mesh

    def check(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compare after an optimizer's `step` (1, 2, …), if a check is due; all ranks call it."""
        if step not in FIRST_CHECKS and step % CHECK_EVERY:
            return
        are_processes = isinstance(self.mesh.transport, ProcessGroupTransport)
        if are_processes and self.mesh.everyone.size > 1:
            self.compare(groups)

    @torch.no_grad()
    def compare(self, groups: Sequence[Mapping[str, Any]] = ()) -> None:
        """Raise a `RankError` on all ranks if parameters, buffers or groups' options differ."""
        self._compare_options(groups)
        error = self._compare_values()
        everyone = self.mesh.everyone
        failed = everyone.gather_integers([error is not None], self.store.device)
        if error is not None:
            raise error
        differing = [rank for rank, (bad,) in zip(everyone.ranks, failed, strict=True) if bad]
        if differing:
            raise RankError(f"replicated values differ between ranks {differing}")

    def _compare_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        everyone, device = self.mesh.everyone, self.store.device
        options = [
            (index, key, value)
            for index, group in enumerate(groups)
            for key in sorted(set(group) - {"params", "param_names"})
            if _is_plain(value := _plain(group[key]))
        ]
        counts = [count for [count] in everyone.gather_integers([len(options)], device)]
        if len(set(counts)) > 1:
            raise RankError(
                f"the optimizers of ranks {list(everyone.ranks)} have {counts} options",
                hint="create the same optimizer on every rank",
            )
        checksums = [zlib.crc32(repr(value).encode()) for _, _, value in options]
        columns = zip(*everyone.gather_integers(checksums, device), strict=True)
        for column, (index, key, value) in zip(columns, options, strict=True):
            different = _different(everyone, column)
            if different:
                raise RankError(
                    f"{key!r} on ranks {different} differs from rank {everyone.ranks[0]}; on this "
                    f"rank it is {value!r}",
                    where=f"parameter group {index} of the optimizer",
                    hint="set learning rates and other options to the same values on all ranks, "
                    "also where they depend on a metric or a clock",
                )

    def _compare_values(self) -> RankError | None:
        """Compare within this rank's mesh; return the error to raise, the same on all its ranks."""
        tensors = list(self._tensors())
        if not tensors or self.mesh.size == 1:
            return None
        rows = [
            n for _, value, _, bounds in tensors for n in (int(checksum(value).item()), *bounds)
        ]
        ranks_rows = self.mesh.world.gather_integers(rows, self.store.device)
        for index, (name, value, classes, _) in enumerate(tensors):
            column = [row[3 * index : 3 * index + 3] for row in ranks_rows]
            classes = _of_equal_bounds(classes, [bounds for _, *bounds in column])
            if any(len({column[rank][0] for rank in ranks}) > 1 for ranks in classes):
                longest = max(high - low for _, low, high in column)
                error = self._compare_closely(name, value, classes, longest)
                if error is not None:
                    return error
        return None

    def _tensors(self) -> Iterator[tuple[str, Tensor, list[list[int]], tuple[int, int]]]:
        """Iterate over this rank's tensors: name, value, classes of mesh positions with replicas,
        and the range of elements that the value is of the rank's part of the tensor.
        """
        if self.mesh.size > 1:
            for name, value in self.store.buffers.items():
                yield name, value, [list(range(self.mesh.size))], (0, value.numel())
        for entry in self.store.entries:
            if classes := self._replica_classes(entry):
                value = entry.piece if entry.zero == 3 else entry.leaf
                if entry.spec.is_local:  # replicas differ, but not the result of the last round
                    value = self.store.stored(entry)[0]
                    if entry.spec.name not in self.store.reducer.state.anchors:
                        continue
                bounds = entry.bounds if entry.zero == 3 else (0, entry.numel)
                yield entry.spec.name, value.detach(), classes, bounds

    def _replica_classes(self, entry: Entry) -> list[list[int]]:
        """Return the classes of mesh positions that may hold the same values of a parameter."""
        distinct = {split.axis for split in entry.spec.splits}
        if entry.zero == 3:
            distinct |= set(entry.spec.sync)
        classes: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.size):
            place = coordinates(self.mesh.axes, rank)
            key = tuple(at for name, at in place.items() if name in distinct)
            classes.setdefault(key, []).append(rank)
        return [ranks for ranks in classes.values() if len(ranks) > 1]

    def _compare_closely(
        self, name: str, value: Tensor, classes: list[list[int]], longest: int
    ) -> RankError | None:
        """Return an error if values differ by more than rounding; all ranks of the mesh call it."""
        world, size = self.mesh.world, self.mesh.size
        flat = value.detach().to(self.store.device).reshape(-1)
        flat = torch.nn.functional.pad(flat, (0, longest - flat.numel()))
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        first_of = {rank: ranks[0] for ranks in classes for rank in ranks}
        firsts = torch.tensor([first_of.get(r, r) for r in range(size)], device=flat.device)
        gaps = torch.zeros(size, dtype=torch.float64, device=flat.device)
        scales = torch.zeros_like(gaps)
        for block in torch.split(flat, BLOCK):
            wide = torch.nan_to_num(block.double(), nan=math.pi, posinf=1e300, neginf=-1e300)
            every = world.all_gather(wide.contiguous(), [wide.numel()] * size).wait()
            every = every.view(size, -1)
            gaps = torch.maximum(gaps, (every - every[firsts]).abs().amax(1))
            scales = torch.maximum(scales, every[firsts].abs().amax(1))
        dtype = value.dtype
        inexact = dtype.is_floating_point or dtype.is_complex
        tolerance = math.sqrt(torch.finfo(dtype).eps) if inexact else 0.0
        bad = (gaps > tolerance * scales).tolist()
        if not any(bad):
            return None
        different = [self.mesh.ranks[rank] for rank in range(size) if bad[rank]]
        first = first_of[bad.index(True)]
        return RankError(
            f"{name} on ranks {different} differs from rank {self.mesh.ranks[first]} by up to "
            f"{float(gaps.max()):.3g}; its largest value is {float(scales.max()):.3g}",
            where=name,
            hint="change parameters and buffers on all ranks, and compute the new values from "
            "data that are the same on all ranks",
        )


def _of_equal_bounds(classes: list[list[int]], bounds: list[list[int]]) -> list[list[int]]:
    """Divide classes of ranks by the range of elements that each rank holds.

    Ranges of a flat buffer differ between ranks that shard its other tensors unevenly.
    """
    divided: dict[tuple[int, ...], list[int]] = {}
    for number, ranks in enumerate(classes):
        for rank in ranks:
            divided.setdefault((number, *bounds[rank]), []).append(rank)
    return [ranks for ranks in divided.values() if len(ranks) > 1]


def _plain(value: Any) -> Any:
    return value.detach().cpu().tolist() if isinstance(value, Tensor) else value


def _is_plain(value: Any) -> bool:
    """Return whether equal values have the same text in every process."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


# Every rank gets the same full batch and reads its part of it. A data loader that is seeded
# differently on one rank would silently train it on other data, so ranks compare checksums of their
# batches: in each of the first steps, and then in every `BATCH_CHECK_EVERY`th.


FIRST_BATCH_CHECKS = 3
BATCH_CHECK_EVERY = 32  # a difference is detected within this number of steps


def leaves(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Iterate over a batch's leaves and their paths, through dicts, sequences and dataclasses."""
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value


def signature(batch: Any) -> Hashable:
    """Return shapes and dtypes of the tensors, and the values of everything else."""
    return tuple(
        (path, tuple(v.shape), str(v.dtype)) if isinstance(v, Tensor) else (path, repr(v))
        for path, v in leaves(batch)
    )


class BatchCheck:
    """Compare the batches of all ranks periodically, at the same steps on every rank."""

    def __init__(self, axis: Axis, device: torch.device | str) -> None:
        self._axis, self._device = axis, device
        self._steps = 0

    def __call__(self, batch: Any, history: int = 0) -> None:
        """Count a step; if its check is due, raise if the batches of ranks differ.

        `history` is a checksum of the programs that this rank has chosen so far.
        """
        due = self._steps < FIRST_BATCH_CHECKS or self._steps % BATCH_CHECK_EVERY == 0
        self._steps += 1
        if due and self._axis.size > 1:
            structure = zlib.crc32(repr(signature(batch)).encode())
            # Two rounds: only batches with the same leaves have the same number of checksums.
            self._compare({_STATE: history, _SHAPES: structure})
            self._compare({path: _checksum(value) for path, value in leaves(batch)})

    def _compare(self, numbers: Mapping[str, int]) -> None:
        every = self._axis.gather_integers(list(numbers.values()), self._device)
        for name, column in zip(numbers, zip(*every, strict=True), strict=True):
            if different := _different(self._axis, column):
                what, hint = "data", _SAME_BATCH
                if name == _STATE:
                    what, hint = "Python state", "make the same changes on every rank"
                raise BatchError(
                    f"the {what} of ranks {different} differ from rank 0", where=name, hint=hint
                )


_STATE = "the model's attributes, hooks or requires_grad, or variables that its code reads"
_SHAPES = "the batch's shapes, dtypes or plain values"
_SAME_BATCH = (
    "give every rank the same full batch (seed its data loader equally), or each its part with "
    "train_step(pm.local_batch(batch), local=True)"
)


def _checksum(value: Any) -> int:
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode())
    flat = value.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def share(
    mesh: ProcessMesh, tensors: Mapping[str, Tensor | None], device: torch.device | str = "cpu"
) -> dict[str, Tensor | None]:
    """Return the named tensors of all stages on every rank; all ranks call it.

    The ranks of a stage hold the same tensors. A name that several stages have is taken from the
    first of them.
    """
    if len(mesh.groups) == 1:
        return dict(tensors)
    everyone, rank = mesh.everyone, mesh.ranks[mesh.rank]
    numbers: dict[int, int] = {}  # tied names have the same tensor, which is sent once
    rows = []
    for name, tensor in tensors.items():
        shape, dtype = (None, "") if tensor is None else (list(tensor.shape), str(tensor.dtype))
        rows.append([name, shape, dtype, numbers.setdefault(id(tensor), len(numbers))])
    result: dict[str, Tensor | None] = {}
    for ranks, table in zip(mesh.groups, share_lists(mesh, rows, device), strict=True):
        root = everyone.ranks.index(ranks[0])
        received: dict[int, Tensor] = {}
        for name, shape, dtype, number in table:
            if shape is None:
                result.setdefault(name, None)
                continue
            if number not in received:
                own = tensors[name] if rank in ranks else None
                if own is None:
                    full = torch.empty(shape, dtype=torch_dtype(dtype), device=device)
                else:
                    full = own.detach().to(device).contiguous()
                received[number] = everyone.broadcast(full, root).wait()
            result.setdefault(name, received[number])
    return result


def share_lists(
    mesh: ProcessMesh, items: Sequence[Any], device: torch.device | str = "cpu"
) -> list[list[Any]]:
    """Return the lists of all stages, transmitted as JSON; all ranks call it."""
    if len(mesh.groups) == 1:
        return [list(items)]
    own = list(items) if mesh.rank == 0 else None  # one rank of a stage speaks for all
    lists = mesh.everyone.gather_objects(own, device)
    return [lists[mesh.everyone.ranks.index(ranks[0])] for ranks in mesh.groups]
