"""Gradient hooks of the user's parameters, applied to complete gradients.

On one device a hook sees the whole gradient of one backward. Here a gradient is complete when all
micro-batches, ranks and stages have added to it; a hook that is not elementwise is then given the
full tensor, gathered from its parts, and each rank keeps its part of the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shardwise.runtime.flat import Entry
from shardwise.runtime.shards import hook_error
from shardwise.runtime.store import ParameterStore

__all__ = ["Hook", "RegisteredHooks", "hooked", "refuse_hooks_on_parts"]


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
    """Counts the hooks that were ever registered in this process, but for those of our own steps.

    While the count stays the same, no tensor and no module has got a hook.
    """

    def __init__(self) -> None:
        self._ours = 0

    def __call__(self) -> int:
        return RemovableHandle.next_id - self._ours

    def ignore_since(self, count: int) -> None:
        """Do not count the hooks that were registered since there were `count`."""
        self._ours += self() - count


@contextlib.contextmanager
def hooked(store: ParameterStore, hooks: Sequence[Hook]) -> Iterator[None]:
    """Around one step: apply the hooks to its gradients before they are added to earlier ones."""
    by_entry = _by_entry(store, hooks)
    earlier = {entry: store.take_gradient(entry) for entry in by_entry}
    try:
        yield
    except BaseException:
        for entry, grad in earlier.items():
            store.set_gradient(entry, grad)
        raise
    with torch.no_grad():
        for entry, mine in by_entry.items():
            _apply(store, entry, mine, earlier[entry])


def refuse_hooks_on_parts(store: ParameterStore) -> None:
    """Refuse gradient hooks on this rank's own tensors: they would see parts and partial sums."""
    for entry in store.entries:
        after = entry.shown._post_accumulate_grad_hooks
        if entry.shown._backward_hooks or (after and any(map(_is_foreign, after.values()))):
            raise hook_error(entry.spec.name)


def _is_foreign(hook: Callable[..., None]) -> bool:
    return not getattr(hook, "__module__", "").startswith("shardwise.runtime")


def _by_entry(store: ParameterStore, hooks: Sequence[Hook]) -> dict[Entry, list[Hook]]:
    """The hooks of each parameter whose gradient ends up on this rank, in the store's order."""
    wanted: dict[str, list[Hook]] = {}
    for hook in hooks:
        wanted.setdefault(hook.parameter, []).append(hook)
    return {
        entry: wanted[entry.spec.name]
        for entry in store.entries
        if entry.spec.name in wanted and entry.trained
    }


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
    value = None
    if hook.needs_value:
        stored, piece = store.stored(entry)
        value = store.gather_full(entry, stored, piece=piece)
    full = store.gather_full(entry, grad, piece=entry.zero >= 2)
    result = hook.function(full, value).to(grad.dtype)
    return store.part_of_gradient(entry, result).clone().view(grad.shape)
