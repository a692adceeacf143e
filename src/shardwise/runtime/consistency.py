"""Exchange and compare values of all ranks: replicas, batches, and the state of pipeline stages.

A checksum is computed where the tensor is, from its bits, in integer arithmetic: equal tensors have
equal checksums on every kind of device.

`Replicas` compares, after some of the optimizer's steps, what several ranks hold: parameters that
are replicated or equally sharded on them, buffers, and optimizer options (learning rates). Ranks
that compute the same thing on different devices may differ by rounding, which is not an error; so
values whose checksums differ are compared once more, by magnitude.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import BatchError, RankError
from shardwise.runtime.mesh import Axis, ProcessMesh, coordinates
from shardwise.runtime.parameters import Entry, torch_dtype
from shardwise.runtime.transport import unwrap_transport
from shardwise.runtime.transport.process_group import ProcessGroupTransport

if TYPE_CHECKING:
    from shardwise.runtime.store import ParameterStore

__all__ = [
    "BATCH_CHECK_EVERY",
    "BatchCheck",
    "Replicas",
    "check_same_batch",
    "checksum",
    "gather_rows",
    "leaves",
    "require_same_lengths",
    "share",
    "share_lists",
    "signature",
]


BLOCK = 1 << 20  # elements that are summed up at a time
FIRST_CHECKS = (1, 10)  # steps of an optimizer after which values are compared,
CHECK_EVERY = 100  # and then every hundredth


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
    """Return odd multipliers without a pattern, so that exchanged elements change the sum."""
    place = torch.arange(BLOCK, dtype=torch.int64, device=device)
    mixed = (place + 1) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return (mixed ^ (mixed >> 32)) | 1


def gather_rows(axis: Axis, rows: list[list[int]], device: torch.device) -> list[list[list[int]]]:
    """Gather the rows of integers of every rank of an axis; all ranks have equally many."""
    if axis.size == 1:
        return [rows]
    flat = torch.tensor(rows, dtype=torch.int64).reshape(-1).to(device)
    every = axis.all_gather(flat, [flat.numel()] * axis.size).wait()
    width = len(rows[0]) if rows else 0
    shape = (axis.size, len(rows), width)
    result: list[list[list[int]]] = every.reshape(shape).tolist()
    return result


def require_same_lengths(
    mesh: ProcessMesh, data: Mapping[str, object], device: torch.device
) -> None:
    """Raise a `RankError` on all ranks if datasets or loaders have other lengths on some.

    What has no length is left out; all ranks call it.
    """
    everyone = mesh.everyone
    for what, source in data.items():
        result = [length for [[length]] in gather_rows(everyone, [[_length(source)]], device)]
        other = [rank for rank, n in zip(everyone.ranks, result, strict=True) if n != result[0]]
        if other:
            lengths = {rank: n for rank, n in zip(everyone.ranks, result, strict=True) if n >= 0}
            raise RankError(
                f"{what} has another length on ranks {other} than on rank {everyone.ranks[0]}: "
                + ", ".join(f"{n} on rank {rank}" for rank, n in list(lengths.items())[:8]),
                where=what,
                hint="give every rank all of the data: the plan decides which rows each one reads",
            )


def _length(source: object) -> int:
    try:
        return len(source)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return -1


class Replicas:
    """Compares what ranks hold in common, after some of an optimizer's steps."""

    def __init__(self, store: ParameterStore, mesh: ProcessMesh) -> None:
        self.store, self.mesh = store, mesh

    def check(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compare after an optimizer's `step` (1, 2, …), if it is time to; all ranks call it."""
        if step not in FIRST_CHECKS and step % CHECK_EVERY:
            return
        between_processes = isinstance(unwrap_transport(self.mesh.transport), ProcessGroupTransport)
        if between_processes and self.mesh.everyone.size > 1:
            self.compare(groups)

    @torch.no_grad()
    def compare(self, groups: Sequence[Mapping[str, Any]] = ()) -> None:
        """Raise a `RankError` on all ranks if parameters, buffers or groups' options differ."""
        self._compare_options(groups)
        error = self._compare_values()
        everyone = self.mesh.everyone
        failed = gather_rows(everyone, [[error is not None]], self.store.device)
        if error is not None:
            raise error
        differing = [rank for rank, ((bad,),) in zip(everyone.ranks, failed, strict=True) if bad]
        if differing:
            raise RankError(f"values that ranks {differing} hold in common differ between them")

    # --- options of optimizers -----------------------------------------------------------

    def _compare_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        everyone, device = self.mesh.everyone, self.store.device
        options = [
            (index, key, value)
            for index, group in enumerate(groups)
            for key in sorted(set(group) - {"params", "param_names"})
            if _is_plain(value := _plain(group[key]))
        ]
        counts = [count for [[count]] in gather_rows(everyone, [[len(options)]], device)]
        if len(set(counts)) > 1:
            raise RankError(
                f"the optimizers of ranks {list(everyone.ranks)} have {counts} options",
                hint="make the same optimizer on every rank",
            )
        sums = [[zlib.crc32(repr(value).encode())] for _, _, value in options]
        every = gather_rows(everyone, sums, device) if sums else []
        for place, (index, key, value) in enumerate(options):
            here = [rank_sums[place][0] for rank_sums in every]
            other = [r for r, s in zip(everyone.ranks, here, strict=True) if s != here[0]]
            if other:
                raise RankError(
                    f"ranks {other} have another {key!r} than rank {everyone.ranks[0]}; on this "
                    f"rank it is {value!r}",
                    where=f"parameter group {index} of the optimizer",
                    hint="set learning rates and other options equally on ranks, also where they "
                    "follow from a metric or a clock",
                )

    # --- parameters and buffers ----------------------------------------------------------

    def _compare_values(self) -> RankError | None:
        """Compare within this rank's mesh; what to raise, the same on its ranks."""
        held = list(self._held())
        if not held or self.mesh.size == 1:
            return None
        sums = torch.stack([checksum(value).cpu() for _, value, _, _ in held]).tolist()
        rows = [[number, *bounds] for number, (*_, bounds) in zip(sums, held, strict=True)]
        every = gather_rows(self.mesh.world, rows, self.store.device)
        for place, (name, value, classes, _) in enumerate(held):
            column = [row[place] for row in every]
            classes = _of_equal_bounds(classes, [bounds for _, *bounds in column])
            if any(len({column[rank][0] for rank in ranks}) > 1 for ranks in classes):
                longest = max(high - low for _, low, high in column)
                error = self._compare_closely(name, value, classes, longest)
                if error is not None:
                    return error
        return None

    def _held(self) -> Iterator[tuple[str, Tensor, list[list[int]], tuple[int, int]]]:
        """Iterate over this rank's tensors: name, value, mesh positions that may hold the same,
        and which elements of the rank's part of the tensor these are.
        """
        if self.mesh.size > 1:
            for name, value in self.store.buffers.items():
                yield name, value, [list(range(self.mesh.size))], (0, value.numel())
        for entry in self.store.entries:
            if classes := self._alike(entry):
                value = entry.piece if entry.zero == 3 else entry.leaf
                bounds = entry.bounds if entry.zero == 3 else (0, entry.numel)
                yield entry.spec.name, value.detach(), classes, bounds

    def _alike(self, entry: Entry) -> list[list[int]]:
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
        """Return whether values differ by more than rounding; all ranks of the mesh call it."""
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
        kind = value.dtype
        rounding = 0.0 if not (kind.is_floating_point or kind.is_complex) else torch.finfo(kind).eps
        bad = (gaps > math.sqrt(rounding) * scales).tolist()
        if not any(bad):
            return None
        other = [self.mesh.ranks[rank] for rank in range(size) if bad[rank]]
        first = first_of[bad.index(True)]
        return RankError(
            f"{name} is not the same on ranks {other} as on rank {self.mesh.ranks[first]}: it "
            f"differs by up to {float(gaps.max()):.3g}, its largest value is "
            f"{float(scales.max()):.3g}",
            where=name,
            hint="change parameters and buffers on all ranks, from values that are equal "
            "everywhere",
        )


def _of_equal_bounds(classes: list[list[int]], bounds: list[list[int]]) -> list[list[int]]:
    """Divide classes of ranks by the elements that each holds.

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


# Every rank gets the same full batch, of which it reads its part. A data loader that is seeded
# differently on one rank would train it on other data without any error, so ranks compare checksums
# of their batches: in the first steps, and later in every `BATCH_CHECK_EVERY`th.


FIRST_BATCH_CHECKS = 3  # the first steps are compared one by one,
BATCH_CHECK_EVERY = 32  # and then every so many: a difference is detected within as many steps


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
    """Compares the batches of all ranks now and then, at the same steps on every rank."""

    def __init__(self, axis: Axis, device: torch.device | str) -> None:
        self._axis, self._device = axis, device
        self._steps = 0

    def __call__(self, batch: Any, history: int = 0) -> None:
        """Count a step, and raise if it is one of those that are checked and ranks differ.

        `history` stands for the programs that this rank has chosen so far.
        """
        due = self._steps < FIRST_BATCH_CHECKS or self._steps % BATCH_CHECK_EVERY == 0
        self._steps += 1
        if due:
            check_same_batch(batch, self._axis, self._device, history)


_STATE = "the model's attributes, hooks or requires_grad, or variables that its code reads"


def check_same_batch(
    batch: Any, axis: Axis, device: torch.device | str = "cpu", history: int = 0
) -> None:
    """Refuse batches that differ between ranks, naming the ranks and the input."""
    if axis.size == 1:
        return
    parts = list(leaves(batch))
    shape = [history, len(parts), zlib.crc32(repr(signature(batch)).encode())]
    _compare(shape, [_STATE, *["the batch's shapes, types or plain values"] * 2], axis, device)
    _compare([_checksum(value) for _, value in parts], [path for path, _ in parts], axis, device)


def _compare(numbers: list[int], names: list[str], axis: Axis, device: torch.device | str) -> None:
    count = len(numbers)
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    every = axis.all_gather(own, [count] * axis.size).wait().view(axis.size, count)
    for column, name in enumerate(names):
        values = every[:, column].tolist()
        different = [rank for rank, value in enumerate(values) if value != values[0]]
        if different:
            raise BatchError(
                f"ranks {different} have other data than rank 0",
                where=name,
                hint="give every rank the same full batch (seed its data loader equally), or each "
                "its part with train_step(pm.local_batch(batch), local=True)",
            )


def _checksum(value: Any) -> int:
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode())
    flat = value.detach().cpu().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def share(
    mesh: ProcessMesh,
    mine: Mapping[str, Tensor | None],
    device: torch.device | str = "cpu",
) -> dict[str, Tensor | None]:
    """Return the tensors of all groups by name; ranks of a group hold the same. All ranks call it.

    A name that several groups have is taken from the first.
    """
    if len(mesh.groups) == 1:
        return dict(mine)
    everyone, rank = mesh.everyone, mesh.ranks[mesh.rank]
    tables = share_lists(mesh, _described(mine), device)
    result: dict[str, Tensor | None] = {}
    for ranks, names in zip(mesh.groups, tables, strict=True):
        root = everyone.ranks.index(ranks[0])
        same: dict[int, Tensor] = {}
        for name, shape, dtype, number in names:
            if shape is None:
                result.setdefault(name, None)
                continue
            if number not in same:
                held = mine[name] if rank in ranks else None
                full = (
                    torch.empty(shape, dtype=torch_dtype(dtype), device=device)
                    if held is None
                    else held.detach().to(device).contiguous()
                )
                same[number] = everyone.broadcast(full, root).wait()
            result.setdefault(name, same[number])
    return result


def share_lists(
    mesh: ProcessMesh, mine: Sequence[Any], device: torch.device | str = "cpu"
) -> list[list[Any]]:
    """Return the lists of all groups, as JSON transmits them; all ranks call it."""
    if len(mesh.groups) == 1:
        return [list(mine)]
    everyone, rank = mesh.everyone, mesh.ranks[mesh.rank]
    result = []
    for ranks in mesh.groups:
        root = everyone.ranks.index(ranks[0])
        text = json.dumps(list(mine)).encode() if rank in ranks else b""
        length = everyone.broadcast(torch.tensor([len(text)], device=device), root).wait()
        data = torch.zeros(int(length), dtype=torch.uint8, device=device)
        if rank in ranks:
            data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        data = everyone.broadcast(data, root).wait()
        result.append(json.loads(bytes(data.cpu().numpy())))
    return result


def _described(tensors: Mapping[str, Tensor | None]) -> list[list[object]]:
    """Name, shape, type and number of every tensor; names of the same tensor share a number."""
    numbers: dict[int, int] = {}
    rows: list[list[object]] = []
    for name, tensor in tensors.items():
        if tensor is None:
            rows.append([name, None, "", -1])
            continue
        number = numbers.setdefault(id(tensor), len(numbers))
        rows.append([name, list(tensor.shape), str(tensor.dtype), number])
    return rows
