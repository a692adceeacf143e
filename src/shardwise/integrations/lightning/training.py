"""Train a LightningModule in parallel: its parallel module, and its steps.

During training, the parameters are in the parallel module. Those of the LightningModule are meta
tensors, so that code which would read stale weights fails; `gathered` fills them in temporarily.
"""

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
from shardwise.errors import BatchError, CaptureError
from shardwise.frontend.hooks import share_hooks
from shardwise.integrations.lightning.library import LightningModule, seed_worker
from shardwise.integrations.lightning.step import Recording, Tape, follow, replay, step_model
from shardwise.plans import Plan


class Training:
    """A LightningModule in parallel, from its first batch to the end of `fit`.

    It makes the plan and takes the weights; parameters without an optimizer are not trained.
    `options` are those of `parallelize`.
    """

    def __init__(
        self,
        module: LightningModule,
        device: torch.device,
        batch: Any,
        make_plan: Callable[[nn.Module], Plan],
        optimized: frozenset[str],
        **options: Any,
    ) -> None:
        self.module = module
        self.tape = Tape()
        self.model = step_model(module, self.tape, device)
        self.weights = Weights(module)
        self._recordings: dict[Any, Recording] = {}
        self._flags = _flags(module)
        with _frozen(module, optimized):
            self.plan = make_plan(self.model)
            self.parallel = parallelize(self.model, batch, self.plan, device=device, **options)
            self.parallel.flags.ignore_originals()  # the module's own are restored after this
        self._store_recording(self._key(batch, training=True))
        self.weights.release()

    def train(self, batch: Any) -> Any:
        """Run forward and backward, repeat the step's effects, and return its result."""
        self._update_flags()
        key = self._key(batch, training=True)
        loss, out = self._run(key, lambda: self.parallel.train_step(batch, outputs=True))
        returned = self._finish(key, out["tensors"])
        if isinstance(returned, Mapping):
            return {**returned, "loss": loss}
        return loss

    def evaluate(self, batch: Any) -> Any:
        """Run a step in eval mode, repeat its effects, and return its result."""
        key = self._key(batch, training=False)
        out = self._run(key, lambda: self.parallel.eval_step(batch))
        return self._finish(key, out["tensors"])

    def _key(self, batch: Any, *, training: bool) -> Any:
        """Return the key of a recording, and update the twin from the module."""
        follow(self.model, self.module)
        return (training, rt.signature(batch), self.parallel.world())

    def _run(self, key: Any, call: Any) -> Any:
        self.tape.recording = None
        result = call()
        self._store_recording(key)
        return result

    def _store_recording(self, key: Any) -> None:
        if self.tape.recording is not None:
            self._recordings[key] = self.tape.recording

    def _finish(self, key: Any, tensors: Any) -> Any:
        recording = self._recordings[key]
        replay(recording, self.module, tensors)
        return recording.result(tensors)

    def _update_flags(self) -> None:
        """Train the parameters that the module's flags now select."""
        flags = _flags(self.module)
        changed = set(flags) ^ set(self._flags)
        modes = sorted(name for kind, name in changed if kind == "train")
        if modes:
            raise CaptureError(
                f"the train mode of submodules changed during training: {modes[:3]}",
                hint="set it before trainer.fit, and resume from a checkpoint to change it",
            )
        for kind, name in sorted(changed):
            self.parallel.flags.set(name, (kind, name) in flags)
        self._flags = flags

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict with full tensors; all ranks call it."""
        with torch.no_grad():
            return {**self.module.state_dict(), **self.parallel.gather_state_dict()}

    @contextlib.contextmanager
    def gathered(self) -> Iterator[LightningModule]:
        """Yield the module with all its weights, to inspect or run; all ranks enter together."""
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
        """Clip every element of the gradients to [-limit, limit]."""
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
    """The parameters and saved buffers of a module, whose memory can be released and restored."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = []

    def release(self) -> None:
        """Replace the tensors by meta tensors, and free their memory."""
        placeholders: dict[int, Tensor] = {}
        self._slots = list(_tensor_slots(self.module))
        for owner, key, _, tensor in self._slots:
            if id(tensor) not in placeholders:
                meta = torch.empty_like(tensor, device="meta", requires_grad=False)
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, tensor.requires_grad)
                    share_hooks(tensor, meta)
                placeholders[id(tensor)] = meta
            owner[key] = placeholders[id(tensor)]
        for _, _, _, tensor in self._slots:
            tensor.grad = None
            if not tensor.is_meta:
                tensor.data = tensor.data.new_empty(0)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put the tensors back, with these values."""
        filled: dict[int, Tensor] = {}
        for owner, key, name, tensor in self._slots:
            if id(tensor) not in filled:
                filled[id(tensor)] = _filled(tensor, state[name])
            owner[key] = filled[id(tensor)]


def _filled(tensor: Tensor, value: Tensor) -> Tensor:
    """Return the tensor with a value, or a new tensor if it never had memory."""
    if not tensor.is_meta:
        tensor.data = value.to(tensor.device, tensor.dtype, copy=True)
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value.to(tensor.dtype, copy=True), tensor.requires_grad)
    return value.to(tensor.dtype, copy=True)


def _tensor_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, Tensor]]:
    """Yield parameters and saved buffers with the dict that has them, its key, and the name."""
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for key, parameter in child._parameters.items():
            if parameter is not None:
                yield child._parameters, key, prefix + key, parameter
        for key, buffer in child._buffers.items():
            if buffer is not None and key not in child._non_persistent_buffers_set:
                yield child._buffers, key, prefix + key, buffer


@contextlib.contextmanager
def _frozen(module: nn.Module, optimized: frozenset[str]) -> Iterator[None]:
    """Freeze the parameters that no optimizer has."""
    changed = [p for n, p in module.named_parameters() if p.requires_grad and n not in optimized]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


def _flags(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the trained parameters of a module, and its submodules in training mode."""
    trained = tuple(("trained", name) for name, p in module.named_parameters() if p.requires_grad)
    return trained + tuple(("train", name) for name, m in module.named_modules() if m.training)


# ------------------------------------------------------------ data
# A batch of the user's DataLoader is the global batch. Every rank reads it, with the random state
# that rank 0 had at the start of the epoch, so that all shuffle the same way. Checkpoints have the
# position in the epoch and that random state: a resumed run continues with the next batch.


class GlobalBatches:
    """The user's loader, with the same batches on every rank.

    `progress` returns the number of batches trained in the epoch, and whether it is complete.
    """

    def __init__(
        self, loader: Any, device: torch.device, progress: Callable[[], tuple[int, bool]]
    ) -> None:
        self._loader, self._device, self._progress = loader, device, progress
        self._begin: torch.Tensor | None = None
        self._resume: Mapping[str, Any] | None = None
        self._position = 0
        _refuse_distributed_sampler(loader)
        seeds_workers = int(os.environ.get("PL_SEED_WORKERS", 0))
        if seeds_workers and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
            loader.worker_init_fn = partial(seed_worker, rank=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def _iterator(self) -> Any:  # through which Lightning ends workers
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
        _share_random_state(self._device)
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

    def position(self) -> dict[str, Any]:
        """Return the position in the epoch; a complete epoch is the start of the next."""
        now = torch.get_rng_state()
        num_trained, is_complete = self._progress()
        # Lightning saves the state of loaders that have one, such as StatefulDataLoader.
        is_stateful = hasattr(self._loader, "state_dict") and hasattr(
            self._loader, "load_state_dict"
        )
        if is_complete or self._begin is None or is_stateful:
            return {"position": 0, "begin": now, "now": now}
        return {"position": min(self._position, num_trained), "begin": self._begin, "now": now}

    def resume_from(self, position: Mapping[str, Any]) -> None:
        """Start at a position when iterated next."""
        self._resume = position


def _refuse_distributed_sampler(loader: Any) -> None:
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise BatchError(
            f"a DistributedSampler yields one of {sampler.num_replicas} parts of the data on rank "
            f"{sampler.rank}, but a batch here is the global batch of all ranks",
            hint="DataLoader(dataset, batch_size=<global batch size>, shuffle=True)",
        )


def _share_random_state(device: torch.device) -> None:
    """Copy the state of torch's generator from rank 0 to all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    state = torch.get_rng_state()
    state = state.to(device) if dist.get_backend() == "nccl" else state
    dist.broadcast(state, 0)
    torch.set_rng_state(state.cpu())
