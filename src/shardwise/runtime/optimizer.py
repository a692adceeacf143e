"""Optimizers on this rank's part of a model.

`optimizer(pm, torch.optim.AdamW, lr=1e-3)` is a `torch.optim.Optimizer` around one of the class
asked for, which works on the pieces that this rank owns. The two share their parameter groups, so
learning-rate schedulers work as ever. Its state dict has full tensors under original names.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.errors import OptimizerError, did_you_mean
from shardwise.runtime.flat import Entry
from shardwise.runtime.sharing import share, share_lists
from shardwise.runtime.store import ParameterStore

__all__ = ["HasStore", "ShardedOptimizer", "clip_grad_norm_", "optimizer"]

# Their update of an element reads that element's own gradient and state only.
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


class HasStore(Protocol):
    """A parallel module, as far as optimizers are concerned."""

    @property
    def store(self) -> ParameterStore: ...


def optimizer(
    pm: HasStore,
    cls: Callable[..., torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]] | None = None,
    *,
    elementwise: bool | None = None,
    rest: bool = True,
    **options: Any,
) -> ShardedOptimizer:
    """An optimizer of class `cls` for a parallel module.

    `groups` are dicts of options with "params": a glob, or several, on original names; what no
    glob matches goes into a last group with the defaults, or with `rest=False` into none. Frozen
    parameters belong to groups too, and are updated from when they are unfrozen.
    `elementwise=True` says of a class unknown here that it may work on parts of tensors.
    """
    store = pm.store
    known = isinstance(cls, type) and cls in ELEMENTWISE
    whole_only = not (known if elementwise is None else elementwise)
    if whole_only:
        _require_whole(store, cls, [entry for entry in store.entries if entry.trained])
    grouped = _group(store, groups or [], rest_group=rest)
    inner = cls([{**g, "params": [e.piece for e in entries]} for g, entries in grouped], **options)
    found = ShardedOptimizer(store, inner, [entries for _, entries in grouped])
    found.whole_only = whole_only
    return found


def _require_whole(store: ParameterStore, cls: object, entries: Iterable[Entry]) -> None:
    name = getattr(cls, "__name__", str(cls))
    for entry in entries:
        if entry.group is not None or _is_cut(store, entry):
            raise OptimizerError(
                f"{name} is not known to be element-wise, and {entry.spec.name} of shape "
                f"{entry.spec.shape} is sharded here",
                hint=f"a plan that keeps parameters whole (ddp), or optimizer(pm, {name}, "
                "elementwise=True) if each element's update reads that element alone",
            )


def _is_cut(store: ParameterStore, entry: Entry) -> bool:
    return any(store.mesh.axes[split.axis] > 1 for split in entry.spec.splits)


def _group(
    store: ParameterStore, groups: Sequence[Mapping[str, Any]], *, rest_group: bool
) -> list[tuple[dict[str, Any], list[Entry]]]:
    """Options and entries of each group; an entry goes to the first group that matches."""
    # As in plain PyTorch, frozen parameters belong to groups too: without a gradient they stay as
    # they are, and they are updated once they are unfrozen.
    rest = [e for e in store.entries if not e.spec.borrowed and _has_gradients(e.dtype)]
    known = [name for e in store.entries for name in (e.spec.name, *e.spec.aliases)]
    known += sorted(store.elsewhere)
    found: list[tuple[dict[str, Any], list[Entry]]] = []
    every: list[str] = []
    for group in groups:
        globs = [group["params"]] if isinstance(group["params"], str) else list(group["params"])
        every += globs
        for glob in globs:
            if not fnmatch.filter(known, glob):
                raise OptimizerError(f"no parameter matches {glob!r}{did_you_mean(glob, known)}")
        matched = [e for e in rest if _matches((e.spec.name, *e.spec.aliases), globs)]
        rest = [e for e in rest if e not in matched]
        found.append(({k: v for k, v in group.items() if k != "params"}, matched))
    # Other stages may have a rest: groups have the same numbers on all of them.
    borrowed = [e.spec for e in store.entries if e.spec.borrowed]
    others = (*((s.name, *s.aliases) for s in borrowed), *store.parameters_elsewhere)
    unmatched = bool(rest) or any(not _matches(names, every) for names in others)
    if not found or (rest_group and unmatched):
        found.append(({}, rest))
    return found


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _matches(names: Iterable[str], globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps an inner optimizer on this rank's pieces, then gives all ranks the new parameters."""

    def __init__(
        self,
        store: ParameterStore,
        inner: torch.optim.Optimizer,
        entries: Sequence[Sequence[Entry]],
    ) -> None:
        self.store, self.inner = store, inner
        self._entries = [list(group) for group in entries]
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.state = inner.state
        self.skipped_steps = 0
        self.whole_only = False  # whether an update of an element reads others of its tensor
        self._updates = 0

    @property
    def grouped_entries(self) -> list[list[Entry]]:
        """The parameters of every group on this rank."""
        return [list(group) for group in self._entries]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. A closure runs `pm.train_step` and returns the loss.

        With a loss scaler, a step with an infinite or undefined gradient on any rank is skipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaler = self.store.scaler
        overflow = scaler is not None and self.store.overflowed()
        if scaler is not None:
            scaler.update(overflow)
        if overflow:
            self.skipped_steps += 1
            return loss
        recorder = self.store.recorder
        with recorder.span("compute", "optimizer"):
            self.store.link_gradients()
            if self.whole_only:  # what was frozen when the optimizer was made may have been cut
                every = (entry for group in self._entries for entry in group)
                trained = [entry for entry in every if entry.piece.grad is not None]
                _require_whole(self.store, type(self.inner), trained)
            try:
                self.inner.step()
            finally:
                self.store.unlink_gradients()
        with recorder.span("waiting", "update"):
            self.store.gather_updates()
        self._updates += 1
        self.store.replicas.check(self._updates, self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients of the module."""
        self.store.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are named when the optimizer is made."""
        if len(self.param_groups) < len(self._entries):
            super().add_param_group(param_group)
            return
        raise OptimizerError(
            "groups cannot be added later", hint="optimizer(pm, cls, groups=[{'params': glob}])"
        )

    def state_dict(self) -> dict[str, Any]:
        """State and groups under original names, with full tensors; all ranks call it."""
        state = {
            entry.spec.name: {
                key: self._whole(entry, value)
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
            {**{k: v for k, v in options.items() if k != "params"}, "params": list(mine)}
            for options, mine in zip(self.param_groups, names, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def _names(self) -> list[list[str]]:
        return [[entry.spec.name for entry in group] for group in self._entries]

    def _whole(self, entry: Entry, value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim():
            if value.shape != entry.piece.shape:
                raise OptimizerError(
                    f"state of shape {tuple(value.shape)} for {entry.spec.name}, of which this "
                    f"rank has {tuple(entry.piece.shape)}"
                )
            return self.store.gather_full(entry, value, piece=True)
        return value.clone() if isinstance(value, Tensor) else value

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's part of a state with full tensors under original names."""
        saved = state_dict["param_groups"]
        borrowed = {e.spec.name for e in self.store.entries if e.spec.borrowed}
        elsewhere = self.store.elsewhere | borrowed
        frozen = {e.spec.name for group in self._entries for e in group if not e.leaf.requires_grad}
        frozen -= {name for g in saved for name in g["params"]}
        mine = [[name for name in g["params"] if name not in elsewhere] for g in saved]
        names = [[name for name in group if name not in frozen] for group in self._names()]
        if _without_empty_end(mine) != _without_empty_end(names):
            raise OptimizerError(
                f"the state's groups {[g['params'] for g in saved]} are not the optimizer's "
                f"{self._names()}"
            )
        for group, options in zip(self.param_groups, saved, strict=False):
            group.update({k: v for k, v in options.items() if k != "params"})
        for group_entries in self._entries:
            for entry in group_entries:
                if entry.spec.name in state_dict["state"]:
                    values = state_dict["state"][entry.spec.name]
                    self.state[entry.piece] = {k: self._part(entry, v) for k, v in values.items()}

    def _part(self, entry: Entry, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() and tuple(value.shape) == entry.spec.shape:
            part = self.store.piece_of(entry, value)
            return part.to(entry.piece.device, copy=True).contiguous()
        return value.clone()


def _without_empty_end(groups: Sequence[Sequence[str]]) -> list[list[str]]:
    """Sorted names of groups; with stages, a last one may be empty."""
    found = [sorted(names) for names in groups]
    while found and not found[-1]:
        found.pop()
    return found


def _share_state(
    store: ParameterStore, state: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The state of all stages' parameters; plain numbers travel as tensors."""
    if len(store.mesh.groups) == 1:
        return state
    flat: dict[str, Tensor | None] = {}
    for name, values in state.items():
        for key, value in values.items():
            plain = isinstance(value, (bool, int, float))
            flat[json.dumps([name, key, plain])] = (
                torch.tensor(value, device=store.device) if plain else value
            )
    found: dict[str, dict[str, Any]] = {}
    for label, tensor in share(store.mesh, flat, store.device).items():
        name, key, plain = json.loads(label)
        value = tensor.item() if plain and tensor is not None else tensor
        found.setdefault(name, {})[key] = value
    return found


@torch.no_grad()
def clip_grad_norm_(
    pm: HasStore, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; the norm before.

    The norm is that of the whole model's gradient: every element of every rank's part counts
    once. It is the same on all ranks, which call this together.
    """
    with pm.store.recorder.span("compute", "clipping"):
        return _clip(pm.store, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


def _clip(
    store: ParameterStore, max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> Tensor:
    held = [(e, grad) for e in store.entries if (grad := store.gradient(e)) is not None]
    mine = [grad for entry, grad in held if _counts(store, entry) and grad.numel()]
    total = _total_norm(store, mine, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise OptimizerError(f"the norm of the gradients is {total.item()}, so they stay as is")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, grad in held:
        grad.mul_(scale.to(grad.device))
    return total


def _counts(store: ParameterStore, entry: Entry) -> bool:
    """Whether this rank is the one, among those with the same part, whose part counts."""
    if entry.spec.borrowed:
        return False
    distinct = {split.axis for split in entry.spec.splits}
    if entry.zero >= 2:
        distinct |= set(entry.spec.sync)
    return all(at == 0 or name in distinct for name, at in store.mesh.coordinates.items())


def _total_norm(store: ParameterStore, grads: list[Tensor], norm_type: float) -> Tensor:
    wide = any(e.master is torch.float64 for e in store.entries)
    dtype = torch.float64 if wide else torch.float32
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=dtype).to(store.device) for g in grads]
    # Stages of a pipeline may have other types; what all ranks add up is always of one.
    stacked = torch.stack(norms).double() if norms else torch.zeros(1).double().to(store.device)
    everyone = store.mesh.everyone
    if norm_type == float("inf"):
        return everyone.all_reduce(stacked.max().reshape(1), "max").wait()[0].to(dtype)
    powers = stacked.pow(norm_type).sum().reshape(1)
    return everyone.all_reduce(powers).wait()[0].pow(1.0 / norm_type).to(dtype)
