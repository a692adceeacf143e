"""This rank's part of a model: its memory, its gradients, and the full model on demand.

`load_full` loads full tensors one at a time, so that no rank ever needs the full model;
`gather_state_dict` and `gather_gradients`, which all ranks call together, return full tensors.

A rank may run several generated modules ("parts", pipeline stages), each several times per step:

    with store.step(key):
        with store.forward(part, key): …                # for every micro-batch of every part,
        with store.backward(part, last=last_of_part): …  # in any order
"""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from shardwise.errors import PlanMismatch, ProgramError, WeightsError, did_you_mean
from shardwise.runtime.consistency import Replicas
from shardwise.runtime.failures import GRACE_S, naming_failures
from shardwise.runtime.fsdp import Units
from shardwise.runtime.grad_sync import (
    LossScaler,
    Reducer,
    dense,
    overflow_on_any_rank,
    stored_values,
    sync_axis,
)
from shardwise.runtime.memory import host_empty, settle
from shardwise.runtime.mesh import ProcessMesh, coordinates
from shardwise.runtime.operators import widened
from shardwise.runtime.parameters import (
    BufferSpec,
    Entry,
    FlatGroup,
    ParameterSpec,
    buckets,
    group_key,
    locate,
    torch_dtype,
)
from shardwise.runtime.shards import ShardParameter
from shardwise.runtime.splits import assemble, local_runs, local_shape, offsets, take_local
from shardwise.runtime.tracing import Recorder
from shardwise.runtime.transport.process_group import ProcessGroupTransport


class ParameterStore:
    """The parameters and buffers of the generated modules on this rank.

    `module` is a single module, or a mapping from parts to modules, or pairs of these.
    """

    def __init__(
        self,
        module: nn.Module | Mapping[Hashable, nn.Module] | Sequence[tuple[Hashable, nn.Module]],
        mesh: ProcessMesh,
        specs: Sequence[ParameterSpec],
        buffers: Sequence[BufferSpec] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.mesh, self.device = mesh, torch.device(device)
        modules: list[tuple[Hashable, nn.Module]] = (
            [(0, module)]
            if isinstance(module, nn.Module)
            else list(module.items() if isinstance(module, Mapping) else module)
        )
        self.entries = [
            Entry(spec, local_shape(spec.shape, spec.splits, mesh.coordinates, mesh.axes))
            for spec in specs
        ]
        for entry in self.entries:
            entry.parts = {part for part, owner in modules if _slots(owner, entry)}
        self.groups = self._group()
        self._shards: dict[Entry, ShardParameter] = {}
        self.optimizers: dict[str, weakref.ref[torch.optim.Optimizer]] = {}
        self.original_name: Callable[[Tensor], str | None] = lambda tensor: None
        self._by_name = {n: e for e in self.entries for n in (e.spec.name, *e.spec.aliases)}
        self.buffer_specs = tuple(buffers)
        self.buffers = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device)
            for spec in buffers
        }
        # The names under which buffers are stored, by their names and aliases.
        self.buffer_names = {a: spec.name for spec in buffers for a in (spec.name, *spec.aliases)}
        self.reducer = Reducer(mesh, self.entries)
        self.units = Units([g for g in self.groups if g.zero == 3], self.reducer.flush)
        self.with_gradient: set[Entry] = set()
        self.scaler: LossScaler | None = None
        self._user_scale = 1.0
        self.recorder = Recorder(mesh.rank, enabled=False)
        self.after_update: list[Callable[[], None]] = []
        self.replicas = Replicas(self, mesh)
        self.uninitialized: dict[str, str] = {}  # tensors without values, and the reasons
        self.received_weights = False  # whether initial values were sent between ranks
        self.elsewhere: frozenset[str] = frozenset()  # names that only other stages hold
        self.stand_ins: dict[str, nn.Parameter] = {}  # on meta, for parameters of other stages
        self.parameters_elsewhere: tuple[tuple[str, ...], ...] = ()  # with their aliases
        for part, owner in modules:
            self.attach(owner, part)

    def naming_failures(self, verb: str = "") -> contextlib.AbstractContextManager[None]:
        """Make other ranks name a rank that fails in the body, where ranks are processes.

        With a `verb`, ranks meet first: one may still be in a step, because it has more batches.
        """
        transport = self.mesh.transport
        if isinstance(transport, ProcessGroupTransport):
            return naming_failures(transport.timeout_s or GRACE_S, transport, verb)
        return contextlib.nullcontext()

    def _group(self) -> list[FlatGroup]:
        """Allocate every entry, separately or in flat groups, and return the groups.

        Gradients arrive from the last entry on, so groups are formed in this order. A unit of
        zero 3 needs all of its parameters at once: they are gathered in one message of any size.
        """

        def size(entry: Entry) -> int:
            by_unit = entry.spec.unit and (entry.spec.zero == 3 or entry.leaves_device)
            return 0 if by_unit else entry.numel * entry.dtype.itemsize

        flat: list[Entry] = []
        for entry in self.entries:
            if self._is_flat(entry):
                flat.append(entry)
            else:
                entry.allocate(self.device)
        groups = buckets(reversed(flat), group_key, size)
        return [
            FlatGroup(entries[::-1], sync_axis(entries[0], self.mesh), self.device)
            for entries in reversed(groups)
        ]

    def _is_flat(self, entry: Entry) -> bool:
        spec, axis = entry.spec, sync_axis(entry, self.mesh)
        if entry.leaves_device and spec.zero < 3 and axis.size > 1:
            raise ProgramError(
                f"{spec.name} cannot be offloaded to host memory: with zero {spec.zero} each of "
                f"the {axis.size} ranks of {axis.name} needs all of it on its device",
                hint='zero 3, or offload=("optimizer",)',
            )
        if spec.borrowed or not spec.shape:
            return False
        return entry.leaves_device or (spec.zero > 0 and axis.size > 1)

    def unfreeze(self, spec: ParameterSpec) -> None:
        """Begin to train a parameter that was frozen when the store was created.

        A parameter of a flat group stays in it, so that gradient and optimizer state are sharded.
        """
        entry = self.entry(spec.name)
        if entry.group is not None and entry.group.axis.size > 1:
            spec = dataclasses.replace(entry.spec, requires_grad=True)
        elif entry.group is not None and sync_axis(entry, self.mesh, spec.sync).size > 1:
            raise ProgramError(
                f"{spec.name} was frozen when it was given to parallelize, and is offloaded as a "
                "frozen parameter, which several ranks cannot train",
                where=spec.name,
                hint="parallelize with requires_grad=True, then freeze it before the first step",
            )
        entry.spec = dataclasses.replace(
            spec, zero=entry.spec.zero, offload=entry.spec.offload, inexact=None
        )
        entry.take_gradients_in(entry.master)
        self.reducer.add(entry)

    def attach(
        self, module: nn.Module, part: Hashable = 0, specs: Iterable[ParameterSpec] = ()
    ) -> None:
        """Make a generated module use this memory; several may share it, also as one part.

        `specs` are those of the module: a parameter that it uses outside of the unit with which it
        is stored stays gathered while the module runs.
        """
        for entry in self.entries:
            if slots := _slots(module, entry):
                entry.slots += slots
                entry.parts.add(part)
                entry.show(entry.shown)
        for alias, name in self.buffer_names.items():
            with contextlib.suppress(AttributeError):
                owner, last = locate(module, alias)
                if last in owner._buffers:
                    owner._buffers[last] = self.buffers[name]
        used = {spec.name: spec.unit for spec in specs}
        spread = {
            e.spec.unit for e in self.entries if used.get(e.spec.name, e.spec.unit) != e.spec.unit
        }
        self.units.attach(module, part, spread)

    def detach(self, key: Hashable, modules: Iterable[nn.Module]) -> None:
        """Release generated modules that will not run again, and their program's state."""
        released = {id(inner) for module in modules for inner in module.modules()}
        for entry in self.entries:
            entry.slots = [slot for slot in entry.slots if id(slot[0]) not in released]
        self.reducer.forget(key)
        self.units.forget(key)

    def entry(self, name: str) -> Entry:
        """Return the parameter of this name or alias."""
        if name not in self._by_name:
            names = [*self._by_name, *self.buffer_names]
            raise PlanMismatch(f"no parameter or buffer {name!r}{did_you_mean(name, names)}")
        return self._by_name[name]

    # --- parameters as users see them ---------------------------------------------------

    def parameter(self, entry: Entry) -> nn.Parameter:
        """Return the parameter as `pm.parameters()` yields it, of full shape; always the same one.

        It is a plain parameter if every rank has all of it and of its gradient, else a
        `ShardParameter`.
        """
        if self.is_replicated(entry) and not entry.has_master_copy and entry.zero < 2:
            return entry.shown
        if entry not in self._shards:
            self._shards[entry] = ShardParameter.of(self, entry)
        return cast(nn.Parameter, self._shards[entry])

    def is_replicated(self, entry: Entry) -> bool:
        """Return whether every rank of the model has the full tensor during forward."""
        return not self.is_split(entry) and len(self.mesh.groups) == 1 and not entry.spec.borrowed

    def is_split(self, entry: Entry) -> bool:
        """Return whether ranks use different parts of the parameter."""
        return any(self.mesh.axes[split.axis] != 1 for split in entry.spec.splits)

    def names_by_tensor(self) -> dict[int, str]:
        """Return the names of `pm.parameters()`, by their ids."""
        names = {id(self.parameter(entry)): entry.spec.name for entry in self.entries}
        return names | {id(stand_in): name for name, stand_in in self.stand_ins.items()}

    @torch.no_grad()
    def value_changed(self, entry: Entry) -> None:
        """Make the forward use stored values that the user has changed; all ranks call it."""
        if entry.group is not None:
            entry.group.refresh()
            if entry.has_master_copy and entry.zero < 3:
                entry.group.gather().wait()
        elif entry.has_master_copy:
            entry.leaf.detach().copy_(entry.piece)

    # --- full tensors in and out ---------------------------------------------------------

    def load_full(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's part of one full parameter or buffer."""
        shape = self.full_shape(name)
        if tuple(tensor.shape) != shape:
            raise PlanMismatch(f"{name} has shape {tuple(tensor.shape)}, the plan is for {shape}")
        self.load_rows(name, 0, tensor)

    @torch.no_grad()
    def load_rows(self, name: str, begin: int, rows: Tensor) -> None:
        """Copy this rank's part of consecutive rows of a full tensor, which start at row `begin`.

        A tensor without dims is one row.
        """
        self.uninitialized.pop(name, None)
        if name in self.buffer_names:
            target = self.buffers[self.buffer_names[name]]
            (target.narrow(0, begin, len(rows)) if rows.dim() else target).copy_(rows)
            return
        entry = self.entry(name)
        if not rows.dim():
            self._write(entry, 0, rows)
            return
        spec, mesh = entry.spec, self.mesh
        # Rows are full along the first dim only: take this rank's part of the other dims.
        inner_splits = [s for s in spec.splits if s.dim % rows.dim()]
        local = take_local(rows, inner_splits, mesh.coordinates, mesh.axes)
        width = math.prod(local.shape[1:])
        first_dim = local_runs(spec.shape, spec.splits, mesh.coordinates, mesh.axes)[0]
        for start, offset, length in offsets(first_dim):
            low, high = max(start, begin), min(start + length, begin + len(rows))
            if low < high:
                values = local[low - begin : high - begin]
                self._write(entry, (offset + low - start) * width, values)
        if entry.group is not None and entry.zero == 3:
            entry.group.refresh()

    def _write(self, entry: Entry, at: int, values: Tensor) -> None:
        """Store consecutive elements of the local tensor, from element `at` on."""
        values = values.to(entry.master).reshape(-1)
        if entry.spec.inexact is not None:
            self.reducer.state.forget(entry.spec.name)
        if entry.on_host:
            settle(self.device)
        if entry.zero < 3:
            entry.leaf.detach().view(-1)[at : at + len(values)].copy_(values)
        if entry.has_master_copy or entry.zero == 3:
            group = entry.group
            if group is not None and group.dim:
                rows = values.view(-1, *entry.local_shape[1:])
                first, shape = at // max(1, rows[:1].numel()), group.part_shape(entry)
                own = group.restored(entry.piece.detach(), shape)[first : first + len(rows)]
                begin = group.row_starts[group.axis.index]
                own.copy_(rows.narrow(group.dim, begin, shape[group.dim]))
                return
            begin, end = entry.bounds
            low, high = max(begin, at), min(end, at + len(values))
            if low < high:
                piece = entry.piece.detach().view(-1)[low - begin : high - begin]
                piece.copy_(values[low - at : high - at])

    def require_values(self) -> None:
        """Raise if parameters or buffers of a model on meta have not been given values."""
        if not self.uninitialized:
            return
        name, reason = next(iter(self.uninitialized.items()))
        others = len(self.uninitialized) - 1
        raise WeightsError(
            f"{name} was on meta and has no value: {reason}"
            + (f"; {others} more parameters and buffers have no value either" if others else ""),
            where=name,
            hint="parallelize(…, init=lambda: Model(config)) builds the model with its weights on "
            "rank 0, init=function initializes each module; or sw.load_checkpoint(path, pm) first",
        )

    def holds(self, name: str) -> bool:
        """Return whether this rank stores a part of this parameter or buffer."""
        return name in self._by_name or name in self.buffer_names

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a full parameter or buffer."""
        if name in self.buffer_names:
            return tuple(self.buffers[self.buffer_names[name]].shape)
        return self.entry(name).spec.shape

    def stored(self, entry: Entry) -> tuple[Tensor, bool]:
        """Return the authoritative values, and whether they are this rank's piece only.

        Those of replicas that ranks train on their own are the values of the last round.
        """
        anchor = self.reducer.state.anchors.get(entry.spec.name)
        if anchor is not None:
            return anchor, entry.has_master_copy
        piece = entry.has_master_copy or entry.zero == 3
        return (entry.piece if piece else entry.leaf).detach(), piece

    @torch.no_grad()
    def local_value(self, entry: Entry) -> Tensor:
        """Return the local tensor of the forward; for zero 3 all ranks of its axis call this."""
        if entry.group is None or entry.zero < 3:
            return entry.leaf.detach()
        own = entry.piece.detach().to(self.device, entry.dtype)
        sizes = entry.group.piece_sizes(entry)
        return entry.group.axis.all_gather(own, sizes).wait().view(entry.local_shape)

    @torch.no_grad()
    def set_local(self, entry: Entry, tensor: Tensor) -> None:
        """Replace the local tensor's values."""
        assert tuple(tensor.shape) == entry.local_shape, (entry, tensor.shape)
        self._write(entry, 0, tensor)
        if entry.group is not None and entry.zero == 3:
            entry.group.refresh()

    def local_of(self, entry: Entry, full: Tensor) -> Tensor:
        """Return the part of a full tensor that the forward uses on this rank."""
        return take_local(full, entry.spec.splits, self.mesh.coordinates, self.mesh.axes)

    def piece_of(self, entry: Entry, full: Tensor) -> Tensor:
        """Return the part of a full tensor that this rank's optimizer updates, as `entry.piece`."""
        local = self.local_of(entry, full)
        if entry.group is None:
            return local
        return entry.group.arranged(local)[slice(*entry.bounds)].view(entry.piece.shape)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts of a full model's state dict; every key must be there."""
        persistent = [s for s in self.buffer_specs if s.persistent]
        names = {e.spec.name for e in self.entries} | {s.name for s in persistent}
        missing = sorted(names - set(state))
        if missing:
            raise PlanMismatch(f"the state dict lacks {', '.join(missing)}")
        for name, tensor in state.items():
            self.uninitialized.pop(name, None)
            if self.holds(name) or name not in self.elsewhere:
                self.load_full(name, tensor)

    def full_value(self, entry: Entry) -> Tensor:
        """Return the full parameter; all ranks that hold a part of it call it."""
        value, piece = self.stored(entry)
        return self.gather_full(entry, value, piece=piece)

    @torch.no_grad()
    def gather_full(self, entry: Entry, value: Tensor, *, piece: bool) -> Tensor:
        """Gather a full tensor from every rank's local tensor, or from its piece of it."""
        device = value.device
        value = dense(value).detach().to(self.device)
        if piece and entry.group is not None:
            sizes = entry.group.piece_sizes(entry)
            flat = entry.group.axis.all_gather(value.reshape(-1).contiguous(), sizes).wait()
            value = entry.group.restored(flat, entry.local_shape)
        return self._join_splits(entry, value.reshape(entry.local_shape)).to(device)

    def _join_splits(self, entry: Entry, local: Tensor) -> Tensor:
        spec = entry.spec
        split_axes = {split.axis for split in spec.splits}
        axes = {n: size for n, size in self.mesh.axes.items() if n in split_axes and size != 1}
        if not axes:
            return local.clone()
        all_axes = {**dict.fromkeys(self.mesh.axes, 1), **axes}
        axis = self.mesh.axis(*axes)
        places = [coordinates(axes, index) for index in range(axis.size)]
        zeros = dict.fromkeys(self.mesh.axes, 0)
        shapes = [local_shape(spec.shape, spec.splits, {**zeros, **p}, all_axes) for p in places]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        parts = torch.split(axis.all_gather(local.contiguous().view(-1), sizes).wait(), sizes)
        located = {
            tuple({**zeros, **place}.values()): part.view(shape)
            for place, part, shape in zip(places, parts, shapes, strict=True)
        }
        return assemble(located, spec.shape, spec.splits, all_axes)

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return full parameters and persistent buffers under all their names, on every rank."""
        state: dict[str, Tensor] = {}
        for entry in self.entries:
            if entry.spec.borrowed:
                continue
            full = self.full_value(entry)
            state.update(dict.fromkeys((entry.spec.name, *entry.spec.aliases), full))
        for spec in self.buffer_specs:
            if spec.persistent:
                value = self.buffers[spec.name].clone()
                state.update(dict.fromkeys((spec.name, *spec.aliases), value))
        return state

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return full gradients by parameter name, on every rank; None where there is none."""
        gradients: dict[str, Tensor | None] = {}
        for entry in self.entries:
            if not entry.spec.borrowed:
                grad = self.gradient(entry)
                if grad is not None:
                    grad = self.gather_full(entry, grad, piece=entry.zero >= 2)
                gradients[entry.spec.name] = grad
        return gradients

    # --- gradients -----------------------------------------------------------------------

    def gradient(self, entry: Entry) -> Tensor | None:
        """Return this rank's part of the gradient, as a plain tensor."""
        return (entry.piece if entry.zero >= 2 else entry.leaf).grad

    @torch.no_grad()
    def add_to_gradient(self, entry: Entry, local_grad: Tensor) -> None:
        """Add to the synchronized gradient, or to this rank's piece of it, between steps."""
        value = local_grad.to(entry.master)
        if entry.group is not None and entry.zero >= 2:
            value = entry.group.arranged(value)[slice(*entry.bounds)].view(entry.piece.shape)
            value = value.to(entry.piece.device)
        grad = self.gradient(entry)
        if grad is not None and not grad.is_sparse:
            grad.add_(value)
            return
        self.set_gradient(entry, (value if grad is None else grad.to_dense() + value).clone())

    def take_gradient(self, entry: Entry) -> Tensor | None:
        """Remove the gradient and return a copy of it."""
        grad = self.gradient(entry)
        entry.clear_gradient()
        return None if grad is None else grad.clone()

    def set_gradient(self, entry: Entry, grad: Tensor | None) -> None:
        """Replace the gradient by one in the form that `gradient` returns."""
        entry.clear_gradient()
        if grad is None:
            return
        if entry.zero < 2:
            entry.take_gradients_in(entry.master)
            grad = grad if grad.is_sparse else grad.view(entry.local_shape)
        (entry.piece if entry.zero >= 2 else entry.leaf).grad = grad

    def part_of_gradient(self, entry: Entry, full: Tensor) -> Tensor:
        """Return this rank's part of a full gradient, in the form that `gradient` returns."""
        return (self.piece_of if entry.zero >= 2 else self.local_of)(entry, full)

    def link_gradients(self, entries: Iterable[Entry]) -> None:
        """Give an optimizer's pieces their part of the gradients."""
        linked = [e for e in entries if e.piece is not e.leaf]
        for entry in linked:
            grad = self.gradient(entry)
            if grad is not None and entry.zero == 1:
                grad = grad.view(-1)[slice(*entry.bounds)]
            if grad is not None and entry.on_host and entry.zero < 2:
                host = host_empty(grad.shape, grad.dtype, self.device)
                grad = host.copy_(grad, non_blocking=True)
            entry.piece.grad = grad
        if any(entry.on_host for entry in linked):
            settle(self.device)

    def unlink_gradients(self, entries: Iterable[Entry]) -> None:
        """Free the copies that `link_gradients` made."""
        for entry in entries:
            if entry.on_host and entry.zero < 2:
                entry.piece.grad = None

    def overflowed(self, entries: Iterable[Entry]) -> bool:
        """Return whether any rank's gradient is infinite or NaN; all ranks of the plan call it."""
        grads = [stored_values(grad) for e in entries if (grad := self.gradient(e)) is not None]
        return overflow_on_any_rank(grads, self.mesh, self.device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to start backward from."""
        if self.loss_scale == 1.0:
            return loss
        return loss.to(widened(loss.dtype)) * self.loss_scale

    @property
    def loss_scale(self) -> float:
        """The factor on the loss before backward: the scaler's times the user's."""
        return self._user_scale * (1.0 if self.scaler is None else self.scaler.scale)

    def zero_grad(self, set_to_none: bool = True, entries: Iterable[Entry] | None = None) -> None:
        """Remove the gradients of some entries, by default all, or set them to zero."""
        for entry in self.entries if entries is None else entries:
            if set_to_none:
                entry.clear_gradient()
            elif (grad := self.gradient(entry)) is not None:
                grad.zero_()

    @contextlib.contextmanager
    def step(self, key: Hashable = None, scale: float = 1.0) -> Iterator[None]:
        """Surround forward and backward of one batch; gradients are accumulated at the end.

        They are those of the loss times `scale`. Without windows of `forward` and `backward` in
        the body, it is one forward and one backward.
        """
        self._user_scale = scale
        self.reducer.begin(key, 1.0 if self.scaler is None else self.scaler.scale)
        self.units.begin(("train", key))
        try:
            yield
            self.units.finish()
            self.with_gradient = self.reducer.finish()
        except BaseException:
            self.reducer.abort()
            self.units.finish(abort=True)
            raise

    @contextlib.contextmanager
    def forward(self, part: Hashable = 0, key: Hashable = None) -> Iterator[None]:
        """Surround the forward of one micro-batch of a part, in a `step` or `evaluate`."""
        self.reducer.begin_window(part, last=False)
        self.units.begin_forward(part, key)
        yield
        self.units.end_forward()
        self.reducer.end_window()

    @contextlib.contextmanager
    def backward(self, part: Hashable = 0, *, last: bool) -> Iterator[None]:
        """Surround the backward of one micro-batch of a part, or only its weight gradients.

        `last` marks the last window of this step that adds to the part's gradients, in which they
        are summed over ranks.
        """
        self.reducer.begin_window(part, last)
        self.units.begin_backward(part, last)
        yield
        self.units.end_backward()
        self.reducer.end_window()

    @contextlib.contextmanager
    def evaluate(self, key: Hashable = None) -> Iterator[None]:
        """Surround a forward without gradients."""
        self.units.begin(("eval", key))
        try:
            with torch.no_grad():
                yield
        finally:
            self.units.finish()

    @torch.no_grad()
    def gather_updates(self, entries: Iterable[Entry], *, by_rows: bool = False) -> None:
        """Distribute the ranges that their owners updated in an optimizer step to all ranks.

        With `by_rows`, the optimizer left all rows without a gradient as they were.
        """
        updated = set(entries)
        for entry in self.entries:
            if entry in updated and entry.group is None and entry.has_master_copy:
                entry.leaf.detach().copy_(entry.piece, non_blocking=True)
        groups = [g for g in self.groups if not updated.isdisjoint(g.entries)]
        for group in groups:
            group.refresh()
        sparse = [g for g in groups if by_rows and g.entries[0].spec.sparse]
        gathered = [g for g in groups if g.zero in (1, 2) and g not in sparse]
        for pending in [group.gather() for group in gathered]:
            pending.wait()
        for group in sparse:
            group.gather_changed()
        for group in groups:
            group.changed.clear()
        for call in self.after_update:
            call()

    def load_with(self, load: Callable[[str], Tensor]) -> None:
        """Load everything, one full tensor after the other."""
        for entry in self.entries:
            self.load_full(entry.spec.name, load(entry.spec.name))
        for spec in self.buffer_specs:
            self.load_full(spec.name, load(spec.name))


def _slots(module: nn.Module, entry: Entry) -> list[tuple[nn.Module, str]]:
    """Return the owners and names of the entry's parameter in the module, under all its names."""
    slots: list[tuple[nn.Module, str]] = []
    for name in (entry.spec.name, *entry.spec.aliases):
        with contextlib.suppress(AttributeError):
            owner, last = locate(module, name)
            if last in owner._parameters:
                slots.append((owner, last))
    return slots
