"""One training of a LightningModule: its parallel module, and the steps that ran.

While it lasts, the parameters are in the parallel module. The LightningModule's own are on meta,
so that code which would read stale weights fails; `whole` fills them in for a while.

Enters: a module, its first batch and a plan. Leaves: steps, states, the module at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import runtime as rt
from shardwise.api.parallel import parallelize
from shardwise.errors import CaptureError, ProgramError
from shardwise.frontend.hooks import share_hooks
from shardwise.plans import Plan
from shardwise.training.integrations.lightning.library import LightningModule
from shardwise.training.integrations.lightning.step import follow, step_model
from shardwise.training.integrations.lightning.tape import Recording, Tape, replay

__all__ = ["Training"]


class Training:
    """A LightningModule in parallel, from its first batch to the end of `fit`."""

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        self.module, self.device = module, device
        self.tape = Tape()
        self.model = step_model(module, self.tape, device)
        self.pm: rt.ParallelModule | None = None
        self.weights = Weights(module)
        self._recordings: dict[Any, Recording] = {}
        self._flags = _flags(module)

    def start(
        self,
        batch: Any,
        make_plan: Callable[[nn.Module], Plan],
        optimized: frozenset[str],
        *,
        seed: int,
        timeout_s: float,
    ) -> Plan:
        """Plan, and take the weights; parameters that no optimizer has are not trained."""
        with _frozen(self.module, optimized):
            plan = make_plan(self.model)
            self.pm = parallelize(
                self.model, batch, plan, device=self.device, seed=seed, timeout_s=timeout_s
            )
            self.pm.flags.ignore_originals()  # the module's own flags are back after this
        self._remember(self._key(batch, training=True))
        self.weights.release()
        return plan

    @property
    def parallel(self) -> rt.ParallelModule:
        if self.pm is None:
            raise ProgramError("training has not started: its first batch is yet to come")
        return self.pm

    def train(self, batch: Any) -> Any:
        """Forward and backward; what `training_step` returns, after what it logs."""
        self._take_flags()
        key = self._key(batch, training=True)
        loss, out = self._run(key, lambda: self.parallel.train_step(batch, outputs=True))
        returned = self._finish(key, out["tensors"])
        if isinstance(returned, Mapping):
            return {**returned, "loss": loss}
        return loss

    def evaluate(self, batch: Any) -> Any:
        """A step in eval mode: what it returns, after what it logs."""
        key = self._key(batch, training=False)
        out = self._run(key, lambda: self.parallel.eval_step(batch))
        return self._finish(key, out["tensors"])

    def _key(self, batch: Any, *, training: bool) -> Any:
        """What a recording belongs to; the module's attributes are those of now."""
        follow(self.model, self.module)
        return (training, rt.signature(batch), self.parallel.world())

    def _run(self, key: Any, call: Any) -> Any:
        self.tape.recording = None
        found = call()
        self._remember(key)
        return found

    def _remember(self, key: Any) -> None:
        if self.tape.recording is not None:
            self._recordings[key] = self.tape.recording

    def _finish(self, key: Any, tensors: Any) -> Any:
        recording = self._recordings[key]
        replay(recording, self.module, tensors)
        return recording.result(tensors)

    def _take_flags(self) -> None:
        """Train what the module says by now is trained."""
        flags = _flags(self.module)
        changed = set(flags) ^ set(self._flags)
        modes = sorted(name for kind, name in changed if kind == "train")
        if modes:
            raise CaptureError(
                f"train() of a part of the module was changed during training: {modes[:3]}",
                hint="set it before trainer.fit, and resume from a checkpoint to change it",
            )
        for kind, name in sorted(changed):
            self.parallel.flags.set(name, (kind, name) in flags)
        self._flags = flags

    def state_dict(self) -> dict[str, Any]:
        """The module's own state dict, with whole tensors; all ranks call it."""
        with torch.no_grad():
            return {**self.module.state_dict(), **self.parallel.gather_state_dict()}

    @contextlib.contextmanager
    def whole(self) -> Iterator[LightningModule]:
        """The module with all its weights, to look at or to run; all ranks enter it."""
        self.weights.restore(self.parallel.gather_state_dict())
        try:
            yield self.module
        finally:
            self.weights.release()

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for grad in self._gradients():
            grad.mul_(factor)

    def clip_by_value(self, limit: float) -> None:
        """Bring every element of the gradient into [-limit, limit]."""
        for grad in self._gradients():
            grad.clamp_(-limit, limit)

    def _gradients(self) -> Iterator[Tensor]:
        store = self.parallel.store
        with torch.no_grad():
            for entry in store.entries:
                grad = store.gradient(entry)
                if grad is not None:
                    yield grad


class Weights:
    """The parameters and saved buffers of a module, which can be away and come back."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._home: list[tuple[dict[str, Any], str, str, Tensor]] = []
        self._was_meta = any(p.is_meta for p in module.parameters())

    def release(self) -> None:
        """Put stand-ins on meta in their places, and free their memory."""
        stand_ins: dict[int, Tensor] = {}
        self._home = list(_places(self.module))
        for place, key, _, tensor in self._home:
            if id(tensor) not in stand_ins:
                meta = torch.empty_like(tensor, device="meta", requires_grad=False)
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, tensor.requires_grad)
                    share_hooks(tensor, meta)
                stand_ins[id(tensor)] = meta
            place[key] = stand_ins[id(tensor)]
        for _, _, _, tensor in self._home:
            tensor.grad = None
            if not tensor.is_meta:
                tensor.data = tensor.data.new_empty(0)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put the tensors back where they were, with these values."""
        seen: dict[int, Tensor] = {}
        for place, key, name, tensor in self._home:
            if id(tensor) not in seen:
                seen[id(tensor)] = _filled(tensor, state[name])
            place[key] = seen[id(tensor)]


def _filled(tensor: Tensor, value: Tensor) -> Tensor:
    """The same tensor with a value; a new one where it never had memory."""
    if not tensor.is_meta:
        tensor.data = value.to(tensor.device, tensor.dtype, copy=True)
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value.to(tensor.dtype, copy=True), tensor.requires_grad)
    return value.to(tensor.dtype, copy=True)


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, Tensor]]:
    """Parameters and saved buffers: the dict they are in, the key there, the full name."""
    for path, found in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for key, parameter in found._parameters.items():
            if parameter is not None:
                yield found._parameters, key, prefix + key, parameter
        for key, buffer in found._buffers.items():
            if buffer is not None and key not in found._non_persistent_buffers_set:
                yield found._buffers, key, prefix + key, buffer


@contextlib.contextmanager
def _frozen(module: nn.Module, kept: frozenset[str]) -> Iterator[None]:
    """Without gradients for what no optimizer would use them for."""
    changed = [p for n, p in module.named_parameters() if p.requires_grad and n not in kept]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


def _flags(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """What of a module is trained, and what is in which mode."""
    trained = tuple(("trained", name) for name, p in module.named_parameters() if p.requires_grad)
    return trained + tuple(("train", name) for name, m in module.named_modules() if m.training)
