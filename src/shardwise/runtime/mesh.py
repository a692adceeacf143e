"""The named axes along which ranks are arranged, and collectives along them.

Ranks are numbered row-major: the last axis changes fastest. An `Axis` is one mesh axis, or several
combined in the mesh's order; generated code passes it to every collective.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ProgramError, RankError, did_you_mean
from shardwise.runtime.tracing import Recorder
from shardwise.runtime.transport import Group, LocalTransport, Pending, Transport
from shardwise.shares import AxisSize, axes_of, num_ranks, part, product

TIME = "mb"  # the axis of micro-batches


class Axis:
    """One mesh axis, or several combined, seen from this rank.

    `size` is the number of ranks; `shares` is the same number, or the ranks' weights in a split.
    A `recorder` attributes collectives to a `cause`: "gradients" for gradient sums, "parameters"
    for units gathered for use, "update" for parameters distributed after an optimizer step, and
    "collectives" for all others of generated code.
    """

    __slots__ = (
        "_cause", "_details", "_group", "_recorder", "_transport", "index", "name", "shares", "size"
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        group: Group,
        transport: Transport,
        shares: AxisSize | None = None,
        recorder: Recorder | None = None,
        cause: str = "collectives",
        **details: Any,
    ) -> None:
        self.name, self.size, self.index = name, group.size, group.index
        self.shares = shares if shares is not None else group.size
        self._group, self._transport = group, transport
        self._recorder, self._cause, self._details = recorder, cause, details

    def __repr__(self) -> str:
        return f"Axis({self.name}: {self.index} of {self.size})"

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._group.ranks

    def start(self, n: int) -> int:
        """Return the start of this rank's part of `n` elements."""
        return part(n, self.shares, self.index)[0]

    def length(self, n: int) -> int:
        """Return the length of this rank's part of `n` elements."""
        return part(n, self.shares, self.index)[1]

    def about(self, cause: str, **details: Any) -> Axis:
        """Return this axis for collectives that a recorder attributes to `cause`."""
        if self._recorder is None:
            return self
        recorded = (self._recorder, cause)
        return Axis(self.name, self._group, self._transport, self.shares, *recorded, **details)

    def levels(self, node_ranks: int) -> tuple[Axis, Axis]:
        """Return the ranks of this rank's node, and the ranks at its place in all nodes.

        A node is a run of `node_ranks` ranks of the axis; all ranks call it at the same point.
        """
        ranks, node = self.ranks, self.index // node_ranks * node_ranks
        inside = Group(ranks[node : node + node_ranks], self.index - node)
        across = Group(ranks[self.index - node :: node_ranks], self.index // node_ranks)
        recorded = (None, self._recorder, self._cause)
        near = Axis(f"{self.name} nodes", inside, self._transport, *recorded)
        return near, Axis(f"{self.name} across", across, self._transport, *recorded)

    def bucket(self, numel: int, dtype: torch.dtype, operation: str) -> Tensor | None:
        """Return memory on which the axis runs an operation without copies, if any.

        All ranks of the axis call it at the same point.
        """
        make = getattr(self._transport, "bucket", None)
        if make is None or self.size == 1:
            return None
        result: Tensor | None = make(numel, dtype, operation, self._group)
        return result

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Pending:
        """Reduce a contiguous tensor in place over the axis."""
        if self.size == 1:
            return Pending(tensor)
        flat = tensor.detach().view(-1)
        return self._start(self._transport.all_reduce, flat, op, self._group).then(lambda _: tensor)

    def all_gather(
        self, flat: Tensor, sizes: Sequence[int], *, out: Tensor | None = None
    ) -> Pending:
        """Concatenate the ranks' 1-D tensors of `sizes` elements."""
        if self.size == 1:
            return Pending(flat if out is None else out.copy_(flat))
        return self._start(self._transport.all_gather, flat.detach(), sizes, self._group, out)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Pending:
        """Sum the ranks' 1-D tensors and keep this rank's part of `sizes`."""
        if self.size == 1:
            return Pending(flat)
        return self._start(self._transport.reduce_scatter, flat.detach(), sizes, self._group)

    def all_to_all(
        self, flat: Tensor, in_sizes: Sequence[int], out_sizes: Sequence[int]
    ) -> Pending:
        """Send part i of `flat` to rank i; concatenate the parts received."""
        if self.size == 1:
            return Pending(flat)
        sizes = (in_sizes, out_sizes)
        return self._start(self._transport.all_to_all, flat.detach(), *sizes, self._group)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Pending:
        """Overwrite a contiguous tensor with the one of index `root`."""
        if self.size == 1:
            return Pending(tensor)
        flat = tensor.detach().view(-1)
        return self._start(self._transport.broadcast, flat, root, self._group).then(
            lambda _: tensor
        )

    def _start(self, collective: Callable[..., Pending], flat: Tensor, *args: Any) -> Pending:
        """Start a collective of the transport; record its transfer and its waiting time."""
        recorder, cause = self._recorder, self._cause
        if recorder is None or not recorder.enabled:
            return collective(flat, *args)
        op = collective.__name__
        about = {"op": op, "bytes": flat.nbytes, "ranks": self.size, **self._details}
        transfer = recorder.span("communication", cause, **about)
        transfer.__enter__()
        pending = collective(flat, *args)

        def wait(_: Tensor) -> Tensor:
            with recorder.span("waiting", cause, op=op):
                result = pending.wait()
            transfer.__exit__(None, None, None)
            return result

        return Pending(flat).then(wait)

    def gather_integers(
        self, numbers: Sequence[int], device: torch.device | str
    ) -> list[list[int]]:
        """Return every rank's integers, of which all ranks have the same number."""
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        every = self.all_gather(own, [len(numbers)] * self.size).wait()
        result: list[list[int]] = every.view(self.size, len(numbers)).tolist()
        return result

    def gather_objects(self, value: Any, device: torch.device | str) -> list[Any]:
        """Return every rank's value, transmitted as JSON."""
        data = bytearray(json.dumps(value, default=str).encode())
        sizes = [size for [size] in self.gather_integers([len(data)], device)]
        flat = torch.frombuffer(data, dtype=torch.uint8).to(device)
        every = self.all_gather(flat, sizes).wait().cpu().numpy().tobytes()
        ends = itertools.accumulate(sizes)
        return [json.loads(every[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


class TimeAxis(Axis):
    """The axis of micro-batches, optionally combined with mesh axes; `index` is the current one.

    It has no collectives: generated code only takes the current micro-batch's part along it.
    """

    __slots__ = ("_inner", "_mesh")

    def __init__(self, mesh: ProcessMesh, inner: Axis | None) -> None:
        self.name = TIME if inner is None else f"{TIME}.{inner.name}"
        self._mesh, self._inner = mesh, inner

    @property
    def size(self) -> int:  # type: ignore[override]
        return num_ranks(self.shares)

    @property
    def shares(self) -> AxisSize:  # type: ignore[override]
        count = self._mesh.num_microbatches
        return count if self._inner is None else product([count, self._inner.shares])

    @property
    def index(self) -> int:  # type: ignore[override]
        inner = self._inner
        if inner is None:
            return self._mesh.microbatch
        return self._mesh.microbatch * inner.size + inner.index

    @property
    def final(self) -> bool:
        """Whether this is the last forward of the step."""
        return self._mesh.final


class ProcessMesh:
    """Named axes over ranks, seen from one of them, in one micro-batch.

    `rank` is this rank's index in `ranks`, by default 0 … product of sizes - 1. `groups` are the
    ranks of all stages' meshes. The executor of a step sets `microbatch`. An axis is given as a
    number of ranks, or as their weights in a split.

    >>> mesh = ProcessMesh({"dp": 1, "tp": 1})
    >>> mesh.axis("dp", "tp")
    Axis(dp.tp: 0 of 1)
    """

    def __init__(
        self,
        axes: Mapping[str, AxisSize | Sequence[int]],
        rank: int = 0,
        transport: Transport | None = None,
        *,
        ranks: Sequence[int] | None = None,
        groups: Sequence[tuple[int, ...]] = (),
        num_microbatches: int = 1,
        timed: bool = True,
    ) -> None:
        self.axes = axes_of(axes)
        self.size = math.prod(map(num_ranks, self.axes.values()))
        self.rank = rank
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(self.size))
        self.groups = tuple(groups) or (self.ranks,)
        self.num_microbatches, self.microbatch, self.final = num_microbatches, 0, True
        self.timed = timed and num_microbatches > 1  # micro-batches are parts of one batch
        self.transport: Transport = transport if transport is not None else LocalTransport()
        if not 0 <= rank < self.size:
            raise ProgramError(f"rank {rank} is not in {self!r} of {self.size} ranks")
        if self.size > self.transport.world_size:
            raise ProgramError(f"{self!r} has more ranks than the {self.transport.world_size} here")
        self.coordinates = coordinates(self.axes, rank)
        self._cached: dict[tuple[str, ...], Axis] = {}
        self.recorder: Recorder | None = None  # of the collectives of axes

    @property
    def place_axes(self) -> dict[str, AxisSize]:
        """The mesh axes, with the axis of micro-batches first."""
        return {TIME: self.num_microbatches, **self.axes} if self.timed else self.axes

    @property
    def place(self) -> dict[str, int]:
        """This rank's coordinates on `place_axes`, in the current micro-batch."""
        return {TIME: self.microbatch, **self.coordinates} if self.timed else self.coordinates

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})"

    def note(self, recorder: Recorder) -> None:
        """Record the collectives of axes that are created from now on."""
        self.recorder = recorder
        self._cached.clear()

    def axis(self, *names: str) -> Axis:
        """Return the combination of mesh axes, in the mesh's order; without any, only this rank."""
        if names and names[0] == TIME:
            return TimeAxis(self, self.space_axis(*names[1:]) if names[1:] else None)
        return self.space_axis(*names)

    def space_axis(self, *names: str) -> Axis:
        """Return an axis as `axis` does, but never one of micro-batches."""
        result = self._cached.get(names)
        if result is None:
            places = _ranks_along(self.axes, self.coordinates, self._checked(names))
            group = Group(tuple(self.ranks[p] for p in places), places.index(self.rank))
            shares = product(self.axes[name] for name in names)
            name = ".".join(names) or "self"
            result = Axis(name, group, self.transport, shares, self.recorder)
            self._cached[names] = result
        return result

    @property
    def world(self) -> Axis:
        """All ranks of the mesh as one axis."""
        return self.space_axis(*self.axes)

    @property
    def everyone(self) -> Axis:
        """All ranks of all stages as one axis."""
        if len(self.groups) == 1:
            return self.world
        ranks = tuple(sorted(rank for ranks in self.groups for rank in ranks))
        group = Group(ranks, ranks.index(self.ranks[self.rank]))
        return Axis("everyone", group, self.transport, recorder=self.recorder)

    def _checked(self, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in self.axes:
                raise ProgramError(f"no axis {name!r} in {self!r}{did_you_mean(name, self.axes)}")
        if names != tuple(name for name in self.axes if name in names):
            raise ProgramError(f"axes {names} of {self!r} must be given once, in the mesh's order")
        return names


def mesh_of(
    rank: int,
    stages: Iterable[tuple[tuple[int, ...], Mapping[str, AxisSize]]],
    transport: Transport | None,
    **microbatches: Any,
) -> ProcessMesh:
    """Return the mesh of a rank's group, given the ranks and axes of all stages."""
    groups = dict(stages)
    for ranks, axes in groups.items():
        if rank in ranks:
            index, others = ranks.index(rank), tuple(groups)
            return ProcessMesh(axes, index, transport, ranks=ranks, groups=others, **microbatches)
    raise RankError(f"rank {rank} has no stage in this plan")


def coordinates(axes: Mapping[str, AxisSize], rank: int) -> dict[str, int]:
    """Return a rank's coordinate on every axis."""
    result: dict[str, int] = {}
    for name, size in reversed(list(axes.items())):
        rank, result[name] = divmod(rank, num_ranks(size))
    return {name: result[name] for name in axes}


def _ranks_along(
    axes: Mapping[str, AxisSize], place: Mapping[str, int], names: Iterable[str]
) -> tuple[int, ...]:
    """Return the ranks whose coordinates equal `place` on all axes but `names`, ascending."""
    ranks, varying = [0], set(names)
    for name, size in axes.items():
        count = num_ranks(size)
        indices = range(count) if name in varying else (place[name],)
        ranks = [rank * count + index for rank in ranks for index in indices]
    return tuple(ranks)


def axis_groups(
    axes: Mapping[str, AxisSize],
    combinations: Iterable[Sequence[str]],
    ranks: Sequence[int] | None = None,
) -> list[tuple[int, ...]]:
    """Return the groups of two or more ranks that combinations of mesh axes need, each once.

    The order depends on the arguments alone, so that all ranks create groups in the same order.
    """
    groups: dict[tuple[int, ...], None] = {}
    for names in combinations:
        for rank in range(math.prod(map(num_ranks, axes.values()))):
            places = _ranks_along(axes, coordinates(axes, rank), names)
            if len(places) > 1:
                groups.setdefault(tuple(ranks[p] for p in places) if ranks else places)
    return list(groups)
