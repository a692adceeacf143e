"""One training of a LightningModule: its parallel module, and the steps that ran.

While it lasts, the parameters are in the parallel module. The LightningModule's own are on meta,
so that code which would read stale weights fails; `whole` fills them in for a while.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from shardwise import runtime as rt
from shardwise.api.parallelize import parallelize
from shardwise.api.weights import Init
from shardwise.errors import BatchError, CaptureError, ProgramError
from shardwise.frontend.hooks import share_hooks
from shardwise.integrations.lightning.library import LightningModule, seed_worker
from shardwise.integrations.lightning.step import Recording, Tape, follow, replay, step_model
from shardwise.plans import Plan

__all__ = ["Training", "WholeBatches"]


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
        init: Init | None,
        timeout_s: float,
    ) -> Plan:
        """Plan, and take the weights; parameters that no optimizer has are not trained."""
        with _frozen(self.module, optimized):
            plan = make_plan(self.model)
            self.pm = parallelize(
                self.model,
                batch,
                plan,
                device=self.device,
                seed=seed,
                init=init,
                timeout_s=timeout_s,
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


# Whole batches, the same on every rank, from a place in the data that can be saved.
#
# A batch of the user's DataLoader is the batch of all ranks together. Every rank reads it, with the
# random state of rank 0 when an epoch begins, so that all shuffle alike. Where an epoch stands and
# the random state it began with are part of checkpoints: resuming goes on with the next batch.


class WholeBatches:
    """The user's loader, iterated alike on every rank.

    `taken` says how many batches of the epoch were trained on, and whether that were all.
    """

    def __init__(
        self, loader: Any, device: torch.device, taken: Callable[[], tuple[int, bool]]
    ) -> None:
        self._loader, self._device, self._taken = loader, device, taken
        self._begin: torch.Tensor | None = None
        self._resume: Mapping[str, Any] | None = None
        self._position = 0
        _require_whole(loader)
        seeded = int(os.environ.get("PL_SEED_WORKERS", 0))
        if seeded and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(seed_worker, rank=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def _iterator(self) -> Any:  # Lightning ends its workers at the end of a training
        return getattr(self._loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._loader._iterator = value

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        skipped = 0
        if resume is not None:
            skipped = int(resume["position"])
            torch.set_rng_state(resume["begin"] if skipped else resume["now"])
        _same_random_state(self._device)
        self._begin = torch.get_rng_state()
        self._position = 0
        return self._batches(iter(self._loader), skipped, resume)

    def _batches(
        self, batches: Iterator[Any], skipped: int, resume: Mapping[str, Any] | None
    ) -> Iterator[Any]:
        for _ in islice(batches, skipped):
            self._position += 1
        if skipped and resume is not None:
            torch.set_rng_state(resume["now"])
        for batch in batches:
            self._position += 1
            yield batch

    def place(self) -> dict[str, Any]:
        """Where the epoch stands; an epoch that is over is the beginning of the next."""
        now = torch.get_rng_state()
        taken, over = self._taken()
        if over or self._begin is None or _knows_its_place(self._loader):
            return {"position": 0, "begin": now, "now": now}
        return {"position": min(self._position, taken), "begin": self._begin, "now": now}

    def go_on_from(self, place: Mapping[str, Any]) -> None:
        """Begin there when next iterated."""
        self._resume = place


def _knows_its_place(loader: Any) -> bool:
    """Whether Lightning saves the loader's own place, as of torchdata's StatefulDataLoader."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _require_whole(loader: Any) -> None:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise BatchError(
            f"a DistributedSampler gives rank {sampler.rank} one of {sampler.num_replicas} parts "
            "of the data, and a batch here is the whole batch of all ranks",
            hint="DataLoader(dataset, batch_size=<of all ranks together>, shuffle=True)",
        )


def _same_random_state(device: torch.device) -> None:
    """Rank 0's state of torch's generator on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state = torch.get_rng_state()
    near = state.to(device) if dist.get_backend() == "nccl" else state
    dist.broadcast(near, 0)
    torch.set_rng_state(near.cpu())
