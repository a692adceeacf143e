"""What this rank holds of a model: full tensors as boxes of its memory.

Enters: a parallel module, or a plain one that is whole on every rank. Leaves: `Held` tensors, from
which a checkpoint is written and into which one is read; `cut` makes more of them for tensors that
are cut as a parameter is (optimizer state, averages).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import CheckpointError, did_you_mean
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.offload import settle
from shardwise.runtime.parameters import Entry
from shardwise.runtime.splits import local_runs
from shardwise.training.checkpoint.boxes import Box, Placed, cut_boxes

__all__ = ["Held", "State", "state_of"]


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
            if entry.apart or entry.zero == 3:
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
        cut = {split.axis for split in entry.spec.splits if self.mesh.axes[split.axis] > 1}
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
