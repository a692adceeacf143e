"""Optimizers on this rank's part of a model.

`optimizer(pm, torch.optim.AdamW, lr=1e-3)` is a `torch.optim.Optimizer` that wraps an `AdamW` of
the pieces that this rank owns. The two share their parameter groups, so learning-rate schedulers
work as usual. Its state dict has full tensors under original names.
"""

from __future__ import annotations

import fnmatch
import inspect
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.errors import OptimizerError, did_you_mean
from shardwise.runtime.consistency import share, share_lists
from shardwise.runtime.grad_sync import stored_values
from shardwise.runtime.parameters import Entry
from shardwise.runtime.rounds import Rounds
from shardwise.runtime.shards import ShardTensor
from shardwise.runtime.store import ParameterStore

# Which parameters an optimizer works on, and in which groups.


Params = str | Tensor | Iterable[str | Tensor]


class _Selection:
    """Parameters by glob or tensor; every one of them must exist."""

    def __init__(self, store: ParameterStore, params: Params) -> None:
        items = [params] if isinstance(params, str | Tensor) else list(params)
        tensors = [item for item in items if isinstance(item, Tensor)]
        self.by_tensor = bool(tensors)
        self.names = set(_names_of(store, tensors))
        self.globs = [item for item in items if isinstance(item, str)]
        names = [name for e in store.entries for name in _names(e)]
        names += sorted(store.elsewhere)
        for glob in self.globs:
            if not fnmatch.filter(names, glob):
                raise OptimizerError(f"no parameter matches {glob!r}{did_you_mean(glob, names)}")

    def matches(self, names: Iterable[str]) -> bool:
        """Return whether the selection contains a parameter of these names."""
        return any(
            name in self.names or any(fnmatch.fnmatchcase(name, glob) for glob in self.globs)
            for name in names
        )


def _names_of(store: ParameterStore, tensors: Iterable[Tensor]) -> Iterator[str]:
    names = store.names_by_tensor()
    for tensor in tensors:
        name = names.get(id(tensor)) or store.original_name(tensor)
        if name is None:
            raise OptimizerError(
                f"a tensor of shape {tuple(tensor.shape)} is neither a parameter of the parallel "
                "module nor of the model that was parallelized",
                hint="pm.parameters(), the model's parameters, or globs on their names",
            )
        yield name


def _names(entry: Entry) -> tuple[str, ...]:
    return (entry.spec.name, *entry.spec.aliases)


def find_groups(
    store: ParameterStore,
    groups: Iterable[Mapping[str, Any] | Tensor],
    params: Params | None,
    *,
    rest: bool,
) -> tuple[list[tuple[dict[str, Any], list[Entry]]], set[str]]:
    """Return options and entries of each group, and the names of their parameters on all ranks.

    An entry belongs to the first group that matches.

    Selected parameters that no group matches form a last group, unless groups list tensors: these
    are complete, as in `torch.optim`. Frozen parameters belong to groups too, as in plain PyTorch:
    they have no gradient, and are updated once they are unfrozen.
    """
    selected = None if params is None else _Selection(store, params)
    inexact = [e for e in store.entries if e.dtype.is_floating_point or e.dtype.is_complex]
    local = [e for e in inexact if not e.spec.borrowed]
    # Groups have the same numbers on all stages, so that other stages' parameters count as well.
    borrowed = [_names(e) for e in store.entries if e.spec.borrowed]
    remote = [*borrowed, *store.parameters_elsewhere]
    if selected is not None:
        local = [e for e in local if selected.matches(_names(e))]
        remote = [names for names in remote if selected.matches(names)]
    result: list[tuple[dict[str, Any], list[Entry]]] = []
    selections: list[_Selection] = []
    for group in _as_dicts(groups):
        selection = _Selection(store, group["params"])
        # Of globs, the first match counts; a tensor in two groups is a mistake.
        for name in sorted(selection.names & {n for s in selections for n in s.names}):
            raise OptimizerError("the parameter is in two groups", where=name)
        selections.append(selection)
        matched = [e for e in local if selection.matches(_names(e))]
        local = [e for e in local if e not in matched]
        result.append(({k: v for k, v in group.items() if k != "params"}, matched))

    def is_matched(names: tuple[str, ...]) -> bool:
        return any(selection.matches(names) for selection in selections)

    rest = rest and not any(selection.by_tensor for selection in selections)
    if not result or (rest and (local or not all(map(is_matched, remote)))):
        result.append(({}, local))
    if not rest and selections:
        remote = [names for names in remote if is_matched(names)]
    local_names = (entry.spec.name for _, entries in result for entry in entries)
    return result, {*local_names, *(names[0] for names in remote)}


def _as_dicts(groups: Iterable[Mapping[str, Any] | Tensor]) -> list[Mapping[str, Any]]:
    """Return groups as dicts; a plain list of tensors is one group."""
    items = list(groups)
    if items and all(isinstance(item, Tensor) for item in items):
        return [{"params": items}]
    dicts: list[Mapping[str, Any]] = []
    for item in items:
        if not isinstance(item, Mapping) or "params" not in item:
            raise OptimizerError(
                f"a group is a dict with 'params', not {type(item).__name__}",
                hint='groups=[{"params": "*.bias", "weight_decay": 0.0}]',
            )
        dicts.append(item)
    return dicts


def require_claimed(
    store: ParameterStore, owner: torch.optim.Optimizer, names: Iterable[str]
) -> None:
    """Raise, on all ranks, if another optimizer has claimed one of these parameters."""
    for name in names:
        reference = store.optimizers.get(name)
        claimant = None if reference is None else reference()
        if claimant is not None and claimant is not owner:
            raise OptimizerError(
                f"two optimizers update this parameter: {type(owner).__name__} was created first, "
                "and another one after it",
                where=name,
                hint='select disjoint parameters: sw.optimizer(pm, cls, params="G.*", …)',
            )


# Optimizers whose update of an element only reads that element's gradient and state.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


# Optimizers whose update of a parameter only reads that parameter's gradient and state.
PER_TENSOR: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.SparseAdam,
)


def is_by_row(state: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a tensor has an element for each row of a parameter of this shape."""
    return state.dim() == 1 < len(shape) and len(state) == shape[0]


def _updates_rows(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it takes sparse gradients, and changes only the rows that they have."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return True
    plain = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad)
    options = ("weight_decay", "momentum")
    return plain and not any(g.get(name) for g in optimizer.param_groups for name in options)


FUSED = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def _is_fused(cls: object, entries: Sequence[Entry], options: Mapping[str, Any]) -> bool:
    """Return whether an optimizer on GPUs is fused, which torch leaves to the user."""
    if cls not in FUSED or options.keys() & {"fused", "foreach", "differentiable"}:
        return False
    pieces = [entry.piece for entry in entries if not entry.spec.sparse]
    on_gpu = all(p.is_cuda and p.is_floating_point() for p in pieces)
    return bool(pieces) and len(pieces) == len(entries) and on_gpu


class HasStore(Protocol):
    """The attribute of a parallel module that optimizers use."""

    @property
    def store(self) -> ParameterStore: ...


def optimizer(
    pm: HasStore,
    cls: Callable[..., torch.optim.Optimizer],
    groups: Iterable[Mapping[str, Any] | Tensor] | None = None,
    *,
    params: Params | None = None,
    elementwise: bool | None = None,
    rowwise: bool = False,
    rest: bool = True,
    **options: Any,
) -> ShardedOptimizer:
    """Create an optimizer of class `cls` for a parallel module, or for its parameters `params`.

    `params` selects parameters by a glob on original names, several globs, or tensors of
    `pm.parameters()` or of the original model. Several optimizers have disjoint parameters.

    `groups` are dicts of options with "params", which selects parameters in the same way. The
    remaining parameters form a last group with the defaults, unless `rest=False`; groups of tensors
    are complete, as in `torch.optim`. Frozen parameters belong to groups too, and are updated once
    they are unfrozen. `elementwise=True` asserts that an unknown class may update parts of tensors;
    `rowwise=True`, that it takes sparse gradients, and updates only their rows, each from its own
    gradient and state. Its state may have an element per row, and is sharded like the rows.
    On GPUs, the classes of torch that can be are `fused`, unless options say otherwise.
    """
    store = pm.store
    if elementwise is None:
        elementwise = isinstance(cls, type) and cls in ELEMENTWISE
    grouped, names = find_groups(store, groups or [], params, rest=rest)
    if not elementwise:
        entries = [entry for _, group in grouped for entry in group if entry.trained]
        _require_full_tensors(store, cls, entries, rowwise)
        _require_all_stages(store, cls, rowwise)
    if _is_fused(cls, [entry for _, group in grouped for entry in group], options):
        options["fused"] = True
    inner = cls([{**g, "params": [e.piece for e in group]} for g, group in grouped], **options)
    result = ShardedOptimizer(store, inner, [group for _, group in grouped])
    result.elementwise, result.claimed = elementwise, tuple(sorted(names))
    result.rowwise = rowwise
    # An earlier optimizer of these parameters may not step any more.
    store.optimizers.update(dict.fromkeys(result.claimed, weakref.ref(result)))
    return result


def _require_all_stages(store: ParameterStore, cls: object, rowwise: bool) -> None:
    """Refuse optimizers that read all parameters at once where a pipeline stage has only some."""
    name = getattr(cls, "__name__", str(cls))
    if len(store.mesh.groups) > 1 and cls not in PER_TENSOR and not rowwise:
        raise OptimizerError(
            f"{name} may read several parameters for one update, but each rank only has the "
            "parameters of its pipeline stages",
            hint=f"a plan without stages, or optimizer(pm, {name}, elementwise=True) if each "
            "parameter's update reads that parameter alone",
        )


def _require_full_tensors(
    store: ParameterStore, cls: object, entries: Iterable[Entry], rowwise: bool = False
) -> None:
    """Refuse optimizers that may not be elementwise for sharded parameters."""
    name = getattr(cls, "__name__", str(cls))
    for entry in entries:
        by_rows = entry.spec.sparse and cls is torch.optim.SparseAdam
        by_rows |= rowwise and entry.piece.shape[1:] == entry.spec.shape[1:]
        if not by_rows and (entry.group is not None or store.is_split(entry)):
            raise OptimizerError(
                f"{name} is not known to be elementwise, and {entry.spec.name} of shape "
                f"{entry.spec.shape} is sharded here",
                hint=f"a plan that replicates parameters (ddp), or optimizer(pm, {name}, "
                "elementwise=True) if each element's update reads that element alone; "
                "rowwise=True with shards along dim 0, if each row's update reads that row alone",
            )


class ShardedOptimizer(torch.optim.Optimizer):
    """Step an inner optimizer on this rank's pieces, then distribute the new parameters."""

    def __init__(
        self,
        store: ParameterStore,
        inner: torch.optim.Optimizer,
        entries: Sequence[Sequence[Entry]],
    ) -> None:
        self.store, self.inner = store, inner
        self._entries = [list(group) for group in entries]
        self._shown = [[store.parameter(entry) for entry in group] for group in self._entries]
        self._pieces = [[entry.piece for entry in group] for group in self._entries]
        self._all_entries = [entry for group in self._entries for entry in group]
        self.elementwise = True  # whether an update of an element only reads that element
        self.rowwise = False  # whether it takes sparse gradients, and only changes their rows
        self.claimed: tuple[str, ...] = ()  # names of its parameters, also on other ranks
        closure = inspect.signature(inner.step).parameters.get("closure")
        # LBFGS and the like require a closure.
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        if self.needs_closure:
            self._require_replicated()
        _own_optimizers.add(inner)
        self._show(self._shown, inner.param_groups)
        super().__init__(inner.param_groups, inner.defaults)
        _own_optimizers.add(self)
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.skipped_steps = 0
        self._updates = 0
        self._rounds = Rounds(store, self._all_entries)

    def _show(self, parameters: list[list[Any]], groups: list[dict[str, Any]]) -> None:
        """Put these tensors into the groups, which schedulers share."""
        for group, tensors in zip(groups, parameters, strict=False):
            group["params"] = tensors

    def _require_replicated(self) -> None:
        """Require full parameters and gradients for a closure, which runs within a step."""
        store, name = self.store, type(self.inner).__name__
        for entry in self._all_entries:
            if entry.spec.inexact is not None:
                raise OptimizerError(
                    f"{name} evaluates the loss several times in a step, but the synchronization "
                    f"of {entry.spec.name} ({', '.join(entry.spec.inexact.words())}) counts steps",
                    where=entry.spec.name,
                    hint="synchronous training for it: sw.strategies.ddp",
                )
            if not store.is_replicated(entry) or entry.piece is not entry.leaf or store.scaler:
                raise OptimizerError(
                    f"{name} calls its closure several times in a step and reads all parameters at "
                    f"once, but not every rank has the full {entry.spec.name} in optimized form",
                    where=entry.spec.name,
                    hint="a plan that replicates everything: sw.strategies.ddp without precision",
                )

    @property
    def grouped_entries(self) -> list[list[Entry]]:
        """The parameters of every group on this rank."""
        return [list(group) for group in self._entries]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. A closure runs `pm.train_step` and returns the loss.

        With a loss scaler, a step with an infinite or NaN gradient on any rank is skipped.
        """
        with self.store.naming_failures():
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        require_claimed(self.store, self, self.claimed)
        if self.needs_closure and closure is None:
            raise OptimizerError(
                f"{type(self.inner).__name__} needs a closure",
                hint="def closure(): opt.zero_grad(); return pm.train_step(batch)",
            )
        if closure is not None and not self.needs_closure:
            with torch.enable_grad():
                loss = closure()
        store = self.store
        overflow = store.scaler is not None and store.overflowed(self._all_entries)
        if store.scaler is not None:
            store.scaler.update(overflow)
        if overflow:
            self.skipped_steps += 1
            return loss
        recorder = store.recorder
        with recorder.span("compute", "optimizer"):
            store.link_gradients(self._all_entries)
            by_rows = self.rowwise or _updates_rows(self.inner)
            if not by_rows:
                for entry in self._all_entries:
                    if entry.piece.grad is not None and entry.piece.grad.is_sparse:
                        entry.piece.grad = entry.piece.grad.to_dense()
            if self.rowwise or isinstance(self.inner, torch.optim.SparseAdam):
                for entry in self._all_entries:
                    if (grad := entry.piece.grad) is not None and grad.dim() > 1:
                        entry.piece.grad = grad if grad.is_sparse else grad.to_sparse(1)
            if not self.elementwise:  # parameters that were frozen at first may be sharded
                trained = [entry for entry in self._all_entries if entry.piece.grad is not None]
                _require_full_tensors(store, type(self.inner), trained, self.rowwise)
            self._rounds.begin()
            self._show(self._pieces, self.inner.param_groups)
            try:
                if self.needs_closure:
                    loss = self.inner.step(closure)
                else:
                    self.inner.step()
            finally:
                self._show(self._shown, self.inner.param_groups)
                store.unlink_gradients(self._all_entries)
        with recorder.span("waiting", "update"):
            store.gather_updates(self._all_entries, by_rows=by_rows)
            self._rounds.finish()
        self._updates += 1
        store.replicas.check(self._updates, self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of this optimizer's parameters."""
        self.store.zero_grad(set_to_none, self._all_entries)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: groups are defined when the optimizer is created."""
        if len(self.param_groups) < len(self._entries):
            super().add_param_group(param_group)
            return
        raise OptimizerError(
            "groups cannot be added later", hint="optimizer(pm, cls, groups=[{'params': glob}])"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups under original names, with full tensors; all ranks call it."""
        state = {
            entry.spec.name: {
                key: self._full_value(entry, value)
                for key, value in sorted(self.state[entry.piece].items())
            }
            for group in self._entries
            for entry in group
            if entry.piece in self.state
        }
        state = _share_state(self.store, state)
        tables = share_lists(self.store.mesh, self._names(), self.store.device)
        names = [[n for table in tables for n in table[i]] for i in range(len(self._entries))]
        groups = [
            {**{k: v for k, v in options.items() if k != "params"}, "params": list(params)}
            for options, params in zip(self.param_groups, names, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _names(self) -> list[list[str]]:
        return [[entry.spec.name for entry in group] for group in self._entries]

    def _full_value(self, entry: Entry, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim():
            if is_by_row(value, entry.piece.shape):
                rows = value.unsqueeze(1).expand(-1, math.prod(entry.piece.shape[1:]))
                return self.store.gather_full(entry, rows, piece=True).flatten(1)[:, 0].clone()
            if value.shape != entry.piece.shape:
                raise OptimizerError(
                    f"the state of {entry.spec.name} has shape {tuple(value.shape)}, but this "
                    f"rank's piece has {tuple(entry.piece.shape)}"
                )
            return self.store.gather_full(entry, value, piece=True)
        return value.clone() if isinstance(value, Tensor) else value

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state with full tensors under original names."""
        saved = state_dict["param_groups"]
        borrowed = {e.spec.name for e in self.store.entries if e.spec.borrowed}
        elsewhere = self.store.elsewhere | borrowed
        frozen = {e.spec.name for group in self._entries for e in group if not e.leaf.requires_grad}
        frozen -= {name for g in saved for name in g["params"]}
        saved_names = [[name for name in g["params"] if name not in elsewhere] for g in saved]
        names = [[name for name in group if name not in frozen] for group in self._names()]
        if _without_empty_end(saved_names) != _without_empty_end(names):
            raise OptimizerError(
                f"the state's groups {[g['params'] for g in saved]} differ from the optimizer's "
                f"{self._names()}"
            )
        for group, options in zip(self.param_groups, saved, strict=False):
            group.update({k: v for k, v in options.items() if k != "params"})
        for entry in self._all_entries:
            if entry.spec.name in state_dict["state"]:
                values = state_dict["state"][entry.spec.name]
                self.state[entry.piece] = {k: self._part(entry, v) for k, v in values.items()}

    def _part(self, entry: Entry, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() and tuple(value.shape) == entry.spec.shape:
            part = self.store.piece_of(entry, value)
            return part.to(entry.piece.device, copy=True).contiguous()
        if is_by_row(value, entry.spec.shape):
            rows = value.unsqueeze(1).expand(-1, math.prod(entry.spec.shape[1:]))
            part = self.store.piece_of(entry, rows.reshape(entry.spec.shape))
            return part.to(entry.piece.device).flatten(1)[:, 0].clone()
        return value.clone()


def _without_empty_end(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the sorted names of groups; with stages, a last one may be empty."""
    result = [sorted(names) for names in groups]
    while result and not result[-1]:
        result.pop()
    return result


def _share_state(
    store: ParameterStore, state: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the state of all stages' parameters; plain numbers are sent as tensors."""
    if len(store.mesh.groups) == 1:
        return state
    flat: dict[str, Tensor | None] = {}
    for name, values in state.items():
        for key, value in values.items():
            plain = isinstance(value, (bool, int, float))
            flat[json.dumps([name, key, plain])] = (
                torch.tensor(value, device=store.device) if plain else value
            )
    result: dict[str, dict[str, Any]] = {}
    for label, tensor in share(store.mesh, flat, store.device).items():
        name, key, plain = json.loads(label)
        value = tensor.item() if plain and tensor is not None else tensor
        result.setdefault(name, {})[key] = value
    return result


_own_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def _refuse_foreign(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a torch optimizer, which would update shards without the other ranks."""
    if optimizer in _own_optimizers:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, ShardTensor):
                name = type(optimizer).__name__
                raise OptimizerError(
                    f"torch.optim.{name} has a parameter that is sharded over ranks",
                    where=parameter.place.entry.spec.name,
                    hint=f"sw.optimizer(pm, torch.optim.{name}, …), which takes the same options",
                )


register_optimizer_step_pre_hook(_refuse_foreign)


@torch.no_grad()
def clip_grad_norm_(
    pm: HasStore,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    params: Params | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    The norm is that of the full model's gradient, or only of the parameters `params`, selected as
    for `optimizer`: every element of every rank's part counts once. It is the same on all ranks,
    which call this together. Gradients that a rank uses for its own replica between rounds
    (`every`) are clipped apart, by their norm on this rank, which the result then includes.
    """
    store, entries = pm.store, pm.store.entries
    if params is not None:
        selection = _Selection(store, params)
        entries = [entry for entry in entries if selection.matches(_names(entry))]
    with store.naming_failures(), store.recorder.span("compute", "clipping"):
        grads = {e: grad for e in entries if (grad := store.gradient(e)) is not None}
        grads = {e: stored_values(grad) for e, grad in grads.items()}
        counted = {e: g for e, g in grads.items() if _is_counted(store, e) and g.numel()}
        total, norms = _total_norm(store, counted, norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise OptimizerError(
                f"the norm of the gradients is {total.item()}; they are left unchanged"
            )
        scales = [torch.clamp(max_norm / (norm + 1e-6), max=1.0) for norm in norms]
        for entry, grad in grads.items():
            grad.mul_(scales[entry.spec.is_local].to(grad.device))
        return total


def _is_counted(store: ParameterStore, entry: Entry) -> bool:
    """Return whether this rank is the one that counts, among those that hold the same part."""
    if entry.spec.borrowed:
        return False
    distinct = {split.axis for split in entry.spec.splits}
    if entry.zero >= 2 or entry.spec.is_local:
        distinct |= set(entry.spec.sync)
    return all(i == 0 or name in distinct for name, i in store.mesh.coordinates.items())


def _total_norm(
    store: ParameterStore, grads: Mapping[Entry, Tensor], norm_type: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the norm of all gradients, of those that ranks sum, and of this rank's own ones."""
    wide = any(e.master is torch.float64 for e in store.entries)
    dtype = torch.float64 if wide else torch.float32
    is_max = norm_type == float("inf")
    mesh = store.mesh
    # Two tensors: a rank that counts no gradient reduces the first of them in place.
    powers = [torch.zeros(1, dtype=torch.float64, device=store.device) for _ in range(2)]
    for entry, grad in grads.items():
        # Pipeline stages may have different dtypes, but all ranks must reduce the same one.
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=dtype).to(store.device).double()
        terms = [powers[entry.spec.is_local], (norm if is_max else norm.pow(norm_type)).reshape(1)]
        powers[entry.spec.is_local] = torch.maximum(*terms) if is_max else torch.add(*terms)
    op = "max" if is_max else "sum"
    powers[0] = mesh.everyone.all_reduce(powers[0], op).wait()
    replicas = {axis for e in store.entries if e.spec.is_local for axis in e.spec.sync}
    if replicas:  # other ranks may have other parts of this rank's replica
        axis = mesh.space_axis(*(name for name in mesh.axes if name not in replicas))
        powers[1] = axis.all_reduce(powers[1], op).wait()
    total = torch.maximum(*powers) if is_max else torch.add(*powers)
    norms = [p[0] if is_max else p[0].pow(1.0 / norm_type) for p in (total, *powers)]
    return norms[0].to(dtype), [norm.to(dtype) for norm in norms[1:]]
