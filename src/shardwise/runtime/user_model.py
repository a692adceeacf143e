"""Connect a parallel module to the user's model: gradient hooks, frozen parameters, weights.

On one device a hook sees the full gradient of one backward. Here a gradient is complete when all
micro-batches, ranks and stages have added to it; a hook that is not elementwise then gets the full
tensor, gathered from its shards, and each rank takes its part of the result.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import PlanMismatch, did_you_mean
from shardwise.formatting import size as format_bytes
from shardwise.keras_model import without_keras
from shardwise.runtime.consistency import share_lists
from shardwise.runtime.parameters import Entry, torch_dtype
from shardwise.runtime.shards import hook_error
from shardwise.runtime.store import ParameterStore

if TYPE_CHECKING:
    from shardwise.runtime.module import ParallelModule


class Hook(Protocol):
    """A function of a parameter's full gradient, and of its value if `needs_value`."""

    @property
    def parameter(self) -> str: ...
    @property
    def accumulated(self) -> bool: ...  # sees the sum with the gradients of earlier steps
    @property
    def elementwise(self) -> bool: ...
    @property
    def needs_value(self) -> bool: ...
    @property
    def function(self) -> Callable[..., Tensor]: ...


class RegisteredHooks:
    """Count the hooks that were ever registered in this process, except by the runtime's steps.

    While the count stays the same, no tensor or module has got a new hook.
    """

    def __init__(self) -> None:
        self._num_ignored = 0

    def __call__(self) -> int:
        return RemovableHandle.next_id - self._num_ignored

    def ignore_since(self, count: int) -> None:
        """Do not count the hooks that were registered after the count was `count`."""
        self._num_ignored += self() - count


@contextlib.contextmanager
def hooked(store: ParameterStore, hooks: Sequence[Hook]) -> Iterator[None]:
    """Apply the hooks to a step's gradients before they are added to earlier ones."""
    by_name: dict[str, list[Hook]] = {}
    for hook in hooks:
        by_name.setdefault(hook.parameter, []).append(hook)
    hooked_entries = [e for e in store.entries if e.spec.name in by_name and e.trained]
    earlier = {entry: store.take_gradient(entry) for entry in hooked_entries}
    try:
        yield
    except BaseException:
        for entry, grad in earlier.items():
            store.set_gradient(entry, grad)
        raise
    with torch.no_grad():
        for entry in hooked_entries:
            _apply(store, entry, by_name[entry.spec.name], earlier[entry])


def refuse_hooks_on_parts(store: ParameterStore) -> None:
    """Refuse gradient hooks on this rank's own tensors: they would see parts and partial sums."""
    for entry in store.entries:
        hooks = (entry.shown._post_accumulate_grad_hooks or {}).values()
        modules = [getattr(hook, "__module__", "") for hook in hooks]
        if entry.shown._backward_hooks or any(
            not module.startswith("shardwise.runtime") for module in modules
        ):
            raise hook_error(entry.spec.name)


def _apply(
    store: ParameterStore, entry: Entry, hooks: Sequence[Hook], earlier: Tensor | None
) -> None:
    grad = store.gradient(entry)
    if grad is None:  # no gradient in this step: autograd would not have called the hooks
        store.set_gradient(entry, earlier)
        return
    for hook in hooks:
        if not hook.accumulated:
            grad = _run(store, entry, hook, grad)
    if earlier is not None:
        grad = earlier.add_(grad)
    for hook in hooks:
        if hook.accumulated:
            grad = _run(store, entry, hook, grad)
    store.set_gradient(entry, grad)


def _run(store: ParameterStore, entry: Entry, hook: Hook, grad: Tensor) -> Tensor:
    if hook.elementwise:
        return hook.function(grad.clone(), None).to(grad.dtype)
    value = store.full_value(entry) if hook.needs_value else None
    full = store.gather_full(entry, grad, piece=entry.zero >= 2)
    result = hook.function(full, value).to(grad.dtype)
    return store.part_of_gradient(entry, result).clone().view(grad.shape)


# `requires_grad` may change between any two steps, in `pm.parameters()` or in the user's own model.
# `TrainedFlags` detects a change of either and passes it to the other and to the programs, whose
# key contains the names of frozen parameters. Parameters of other pipeline stages appear as
# stand-ins on meta, so that code that freezes parameters by name works on every rank.


class TrainedFlags:
    """The flags of all parameters of a model, the same on every rank."""

    def __init__(
        self,
        store: ParameterStore,
        originals: Mapping[str, weakref.ref[nn.Parameter]] | None = None,
    ) -> None:
        self._store = store
        self._shown = {entry.spec.name: entry.shown for entry in store.entries} | store.stand_ins
        self._trained = {name: shown.requires_grad for name, shown in self._shown.items()}
        self._names = sorted(self._trained)
        self._originals = {n: p for n, p in (originals or {}).items() if n in self._trained}
        self._note()

    def _note(self) -> None:
        """Prepare the comparisons of every step."""
        self._frozen = tuple(name for name in self._names if not self._trained[name])
        self._flags = list(self._trained.values())
        self._original_flags = [self._trained[name] for name in self._originals]

    def frozen(self) -> tuple[str, ...]:
        """Return the names of the parameters that the user has frozen, as of now."""
        if [shown.requires_grad for shown in self._shown.values()] != self._flags:
            self._follow(self._shown)
        try:
            originals = [ref().requires_grad for ref in self._originals.values()]  # type: ignore[union-attr]
        except AttributeError:  # some parameters of the user's model no longer exist
            self._originals = {n: ref for n, ref in self._originals.items() if ref() is not None}
            self._note()
            return self.frozen()
        if originals != self._original_flags:
            self._follow({name: ref() for name, ref in self._originals.items()})
        return self._frozen

    def _follow(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        """Take over the flags of these parameters where they have changed."""
        for name, parameter in parameters.items():
            if parameter is not None and parameter.requires_grad != self._trained[name]:
                self.set(name, parameter.requires_grad)

    def set(self, name: str, trained: bool) -> None:
        """Train a parameter from now on, or freeze it; all ranks make the same calls."""
        self._trained[name] = trained
        self._note()
        self._shown[name].requires_grad_(trained)
        if self._store.holds(name):
            self._store.entry(name).set_trained(trained)
        reference = self._originals.get(name)
        original = reference() if reference is not None else None
        if original is not None:
            original.requires_grad_(trained)

    def ignore_originals(self) -> None:
        """Ignore the flags of the user's own model from now on."""
        self._originals.clear()
        self._note()


# Copy trained weights into the user's model; describe a parallel module as text.


def sample_values(tensor: Tensor) -> Tensor:
    """Return a copy of up to 64 of a tensor's values."""
    values = tensor.detach()
    if values.layout is not torch.strided:
        return torch.empty(0)
    if not values.is_contiguous():
        return values[tuple(slice(4) for _ in values.shape[:3])].flatten()[:64].clone()
    flat = values.reshape(-1)
    return flat[:: max(1, len(flat) // 64)][:64].clone()


@torch.no_grad()
def copy_weights(
    pm: ParallelModule, model: nn.Module | Mapping[str, nn.Module] | None, *, strict: bool
) -> None:
    """Copy parameters and persistent buffers into a model, one full tensor at a time."""
    targets = None if model is None else _targets(model)
    if targets is not None:
        _check(pm, targets, strict)
    for names, tensor in full_tensors(pm):
        for name in names:
            if targets is not None and name in targets:
                targets[name].copy_(tensor)
                pm.exchanged[name] = sample_values(targets[name])


def full_tensors(
    pm: ParallelModule, *, frozen: bool = True
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the full parameters and persistent buffers one by one, each with all its names.

    All ranks iterate together.
    """
    store, mesh = pm.store, pm.mesh
    local: dict[str, Callable[[], Tensor]] = {}
    rows: list[Any] = []
    for entry in store.entries:
        if not entry.spec.borrowed and (frozen or entry.trained):
            local[entry.spec.name] = functools.partial(store.full_value, entry)
            names = (entry.spec.name, *entry.spec.aliases)
            rows.append([names, entry.spec.shape, str(entry.master)])
    for spec in store.buffer_specs:
        if spec.persistent:
            local[spec.name] = store.buffers[spec.name].clone
            rows.append([(spec.name, *spec.aliases), spec.shape, spec.dtype])
    yielded: set[str] = set()
    for ranks, table in zip(mesh.groups, share_lists(mesh, rows, store.device), strict=True):
        root = mesh.everyone.ranks.index(ranks[0])
        for names, shape, dtype in table:
            if names[0] in yielded:
                continue
            yielded.add(names[0])
            if mesh.ranks[mesh.rank] in ranks:
                tensor = local[names[0]]()
            else:
                tensor = torch.empty(shape, dtype=torch_dtype(dtype), device=store.device)
            if len(mesh.groups) > 1:
                tensor = tensor.to(store.device).contiguous()
                tensor = mesh.everyone.broadcast(tensor, root).wait()
            yield tuple(names), tensor


def _targets(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, Tensor]:
    if isinstance(model, nn.Module):
        root = without_keras(model)
    else:
        root = nn.ModuleDict({name: without_keras(module) for name, module in model.items()})
    tensors: dict[str, Tensor] = dict(root.named_parameters(remove_duplicate=False))
    tensors |= dict(root.named_buffers(remove_duplicate=False))
    return {name: tensors[name] for name in root.state_dict() if name in tensors}


def _check(pm: ParallelModule, targets: Mapping[str, Tensor], strict: bool) -> None:
    for name in (*pm.names, *targets):
        if strict and not (name in targets and name in pm.names):
            lacking = "the model" if name not in targets else "the parallel module"
            candidates = list(targets) if name not in targets else pm.names
            raise PlanMismatch(
                f"{lacking} has no {name}{did_you_mean(name, candidates)}",
                hint="copy into the model that was given to sw.parallelize, or strict=False",
            )
    for name in pm.names:
        if name not in targets:
            continue
        if targets[name].is_meta:
            raise PlanMismatch(
                "the model's tensor is on meta and has no memory",
                where=name,
                hint='model.to_empty(device="cpu") first',
            )
        if pm.store.holds(name) and tuple(targets[name].shape) != pm.store.full_shape(name):
            raise PlanMismatch(
                f"the model's tensor has shape {tuple(targets[name].shape)}, the trained one "
                f"{pm.store.full_shape(name)}",
                where=name,
            )


def describe(pm: ParallelModule) -> str:
    """Describe the model, this rank's place in its plan, and the parameters that it holds."""
    stored = [pm.store.stored(entry)[0] for entry in pm.store.entries]
    numel = sum(tensor.numel() for tensor in stored)
    size = sum(tensor.nbytes for tensor in stored)
    mesh = pm.mesh
    place = ", ".join(f"{axis} {index}" for axis, index in mesh.coordinates.items())
    lines = [
        f"ParallelModule({pm.title or 'model'}",
        f"  rank {mesh.ranks[mesh.rank]} of {mesh.everyone.size}{', at ' * bool(place)}{place}",
        f"  holds {numel:,} elements of {len(stored)} parameters ({format_bytes(size)})",
    ]
    named = [name for name in pm.steps if name]
    if named:
        lines.append(f"  steps: {', '.join(named)}")
    return "\n".join([*lines, ")"])
