"""The module that a user trains: this rank's part of the model, and the steps of all ranks.

`ParallelModule` joins the store of parameters with the compiled programs. It does not depend on the
compiler: it calls a function that compiles a program for a batch, once per batch signature.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.errors import BatchError, LossError, ProgramError, did_you_mean
from shardwise.runtime.consistency import BATCH_CHECK_EVERY, BatchCheck, leaves, share, signature
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.operators import widened
from shardwise.runtime.rendezvous import count_run, starting
from shardwise.runtime.rng import Rng
from shardwise.runtime.step import MAX_VARIANTS, ProgramKey, Programs, Specialize, StepProgram
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.tracing import Recorder, Trace, align, gather_events, merge, write_trace
from shardwise.runtime.user_model import (
    RegisteredHooks,
    TrainedFlags,
    copy_weights,
    describe,
    hooked,
    refuse_hooks_on_parts,
    sample_values,
)

T = TypeVar("T")
World = Callable[[], Hashable]
AGREED_CHANGES = 3  # times that ranks agree at once on a change from one world state to another


def _refusal(message: str, hint: str) -> Callable[..., NoReturn]:
    """Return a method that raises: it would be misleading on a parallel module."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ProgramError(message, hint=hint)

    refuse.__doc__ = f"Raise: {message}."
    return refuse


class ParallelModule(nn.Module):
    """This rank's part of a model that all ranks train together.

    `about` is metadata stored in every trace.
    """

    def __init__(
        self,
        store: ParameterStore,
        mesh: ProcessMesh,
        rng: Rng,
        specialize: Specialize,
        *,
        flags: TrainedFlags | None = None,
        world: World = tuple,  # nothing outside the batch
        registered: RegisteredHooks | None = None,
        programs: Mapping[ProgramKey, StepProgram] | None = None,
        steps: Sequence[str] = ("",),
        check_batches: bool = True,
        names: Sequence[str] = (),
        attributes: Collection[str] = (),
        recorder: Recorder | None = None,
        timeout_s: float = 60.0,
        about: Mapping[str, str] | None = None,
        title: str = "",
    ) -> None:
        super().__init__()
        self.store, self.mesh, self.rng = store, mesh, rng
        self.flags = flags if flags is not None else TrainedFlags(store)
        self.recorder, self.timeout_s = recorder, timeout_s
        self.about, self.title = dict(about or {}), title
        # Samples of the values that were last gathered, loaded or copied to a model.
        self.exchanged: dict[str, Tensor] = {}
        if recorder is not None:
            store.recorder = recorder
        self._position = {name: position for position, name in enumerate(names)}
        self._world = world
        self._registered = registered or RegisteredHooks()
        self._num_runs, self._history = 0, 0
        self._mode: bool | None = None  # whether the last step trained
        self._next_meeting = 0  # the number of runs from which a switch is a meeting
        self._last_world, self._changes = world(), Counter[tuple[Hashable, Hashable]]()
        self._num_registered = -1  # hooks when this rank's tensors were last checked for them
        self.steps = tuple(steps)
        self._programs = Programs(store, specialize, programs or {}, warns=mesh.rank == 0)
        self._check_batch = BatchCheck(mesh.everyone, store.device) if check_batches else None
        self._model_attributes = frozenset(attributes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the full model's state dict, in its order."""
        return tuple(self._position)

    def train_step(
        self,
        batch: Any,
        outputs: bool = False,
        *,
        step: str = "",
        scale: float = 1.0,
        local: bool = False,
    ) -> Any:
        """Run forward and backward of the full batch; return its loss, the same on every rank.

        Gradients are accumulated. With `outputs`, return the model's outputs too. `step` is the
        name of one of several steps. `scale` multiplies the loss before backward, and with it the
        returned loss and the gradients: `scale=1/n` to accumulate n batches. With `local`, the
        batch is a result of `local_batch`.
        """
        if not self.training:
            raise ProgramError(
                "the parallel module is in eval mode, but train_step runs in training mode",
                hint="pm.train(). To train without dropout or with frozen batch statistics, put "
                "those modules of the model into eval mode before sw.parallelize",
            )
        if not (isinstance(scale, int | float) and math.isfinite(scale)):
            raise ProgramError(
                f"scale is {scale!r}, not a finite number", hint="pm.train_step(batch, scale=1 / n)"
            )
        with self.store.naming_failures(self._verb(training=True)):
            registered = self._registered()
            if registered != self._num_registered:
                refuse_hooks_on_parts(self.store)
                self._num_registered = registered
            key, program = self._program(batch, step, training=True, local=local)
            registered = self._registered()
            with (
                self.rng.next_step() as at,
                self.store.recorder.span("step", "step", step=at),
                hooked(self.store, program.hooks),
            ):
                with self.store.step(key, scale):
                    loss, out = program.train(batch, self.store, outputs=outputs, local=local)
                program.finish()
            self._registered.ignore_since(registered)
        loss = _public_loss(loss if scale == 1.0 else loss.detach() * scale)
        return (loss, _detach(out)) if outputs else loss

    def eval_step(
        self, batch: Any, *, loss: bool = False, step: str = "", local: bool = False
    ) -> Any:
        """Return the outputs in eval mode, without gradients; with `loss`, the loss and them."""
        value, outputs = self._evaluate(batch, step, local, outputs=True)
        return (value, outputs) if loss else outputs

    def eval_loss(self, batch: Any, *, step: str = "", local: bool = False) -> Tensor:
        """Return the full batch's loss in eval mode, without gradients, the same on every rank."""
        loss, _ = self._evaluate(batch, step, local, outputs=False)
        if loss is None:
            raise LossError("the model returns no loss in eval mode", hint="labels in the batch")
        return _public_loss(loss)

    def _evaluate(
        self, batch: Any, step: str, local: bool, *, outputs: bool
    ) -> tuple[Tensor | None, Any]:
        with self.store.naming_failures(self._verb(training=False)):
            key, program = self._program(batch, step, training=False, local=local)
            with self.store.evaluate(key):
                return program.evaluate(batch, self.store, outputs=outputs, local=local)

    def local_batch(self, batch: Any, training: bool = True, *, step: str = "") -> Any:
        """Return this rank's part of a full batch, for `train_step(…, local=True)`."""
        return self.program(batch, training, step=step).local_batch(batch)

    def program(self, batch: Any, training: bool = True, *, step: str = "") -> StepProgram:
        """Return the compiled step for such full batches; all ranks call it for a new signature."""
        key = self._variant(self._key(batch, step, training), batch)
        return self._programs.get(key, batch)

    @property
    def is_guarded(self) -> bool:
        """Whether Python looked at values of the batch when some step was captured."""
        return self._programs.is_guarded

    def world(self) -> Hashable:
        """Return the state of everything outside the batch that programs depend on."""
        return self._world()

    def _key(self, batch: Any, step: str, training: bool) -> ProgramKey:
        self._require_step(step)
        return ProgramKey(step, training, signature(batch), self._world())

    def _require_step(self, step: str) -> None:
        if step not in self.steps:
            named = [name for name in self.steps if name]
            if not named:
                raise ProgramError(
                    f"there is no step {step!r}", hint="parallelize(…, steps={name: function})"
                )
            problem = f"there is no step {step!r}" if step else "no step was named"
            raise ProgramError(
                f"{problem}{did_you_mean(step, named)}; the steps are {named}",
                hint=f"pm.train_step(batch, step={named[0]!r})",
            )

    def _verb(self, *, training: bool) -> str:
        """Return the verb at which ranks meet before a step, or nothing.

        Ranks whose data differ in length differ in when they change to evaluation and back.
        """
        is_switch, self._mode = self._mode not in (None, training), training
        if not is_switch or self._num_runs < self._next_meeting:
            return ""
        self._next_meeting = self._num_runs + min(self._num_runs, BATCH_CHECK_EVERY)
        return "train" if training else "evaluate"

    def _program(
        self, batch: Any, step: str, *, training: bool, local: bool
    ) -> tuple[ProgramKey, StepProgram]:
        self.store.require_values()
        if local:
            chosen = self._local_program(batch, step, training)
        else:
            key = self._key(batch, step, training)
            if key.world != self._last_world:
                self._agree_on_world(key)
            if self._check_batch is not None:
                self._check_batch(batch, self._history)
            key = self._variant(key, batch)
            chosen = key, self._programs.get(key, batch)
        self._num_runs += 1
        count_run()
        return chosen

    def _variant(self, key: ProgramKey, batch: Any) -> ProgramKey:
        """Return the key of the program whose guards hold for a full batch.

        All ranks evaluate the guards on the full batch, and compare what they found: if it is a
        new combination of values, they capture the step together.
        """
        if not self._programs.is_guarded:
            return key
        variants = self._programs.variants(key)
        if not any(program.is_guarded for _, program in variants):
            return key
        broken = {k: program.broken_guard(batch, self.store) for k, program in variants}
        chosen = next((k.variant for k, line in broken.items() if line is None), -1)
        everyone = self.mesh.everyone
        every = [c for [c] in everyone.gather_integers([chosen], self.store.device)]
        line = next(filter(None, broken.values()), "")
        if len(set(every)) > 1:
            different = [r for r, c in zip(everyone.ranks, every, strict=True) if c != every[0]]
            lines = everyone.gather_objects(line, self.store.device)
            raise BatchError(
                f"the batches of ranks {different} differ from rank {everyone.ranks[0]} in a value "
                "that Python looks at",
                where=next(filter(None, lines), None),
                hint="give every rank the same full batch (seed its data loader equally)",
            )
        if chosen >= 0:
            return replace(key, variant=chosen)
        new = self._programs.next_variant(key)
        if new.variant >= MAX_VARIANTS:
            raise BatchError(
                f"Python looks at a value of the batch that has had {MAX_VARIANTS} different "
                "combinations of values; each costs as much as a first step",
                where=line,
                hint="keep the value a tensor (torch.where, masks); compare before converting: "
                "`if x.max() > 3`, not `x.max().item() > 3`; or pad the batch to a few sizes",
            )
        return new

    def _agree_on_world(self, key: ProgramKey) -> None:
        """Agree with other ranks that flags or Python state have changed.

        A loop that alternates between two states is trusted after a few changes: its history is
        then compared together with batches. Ranks agree on new programs when they are compiled.
        """
        change = (self._last_world, key.world)
        self._last_world = key.world
        text = repr((self._num_runs, key.world)).encode(errors="backslashreplace")
        self._history = zlib.crc32(text, self._history)
        self._changes[change] += 1
        if key in self._programs and self._changes[change] <= AGREED_CHANGES:
            with starting(self.timeout_s, "flags or Python state have changed") as agree:
                agree(f"{self._history:08x}")

    def _local_program(
        self, batch: Any, step: str, training: bool
    ) -> tuple[ProgramKey, StepProgram]:
        """Return the first program whose local batches have these shapes on every rank."""
        self._require_step(step)
        state = (step, training, self._world())
        programs = [
            (k, p) for k, p in self._programs.items() if (k.step, k.training, k.world) == state
        ]
        if any(program.is_guarded for _, program in programs):
            raise BatchError(
                "Python looks at values of the batch, and a local batch does not have all of them",
                hint="pm.train_step(batch) with the full batch",
            )
        mask = sum(1 << i for i, (_, program) in enumerate(programs) if program.takes(batch))
        masks = self.mesh.everyone.gather_integers([mask], self.store.device)
        for index, (key, program) in enumerate(programs):
            if all(mask >> index & 1 for [mask] in masks):
                self._programs.use(key)
                return key, program
        shapes = [tuple(v.shape) for _, v in leaves(batch) if isinstance(v, Tensor)]
        raise BatchError(
            f"no program takes a local batch of shapes {shapes} on every rank",
            hint="pm.local_batch(full_batch) once for each new shape of the full batch",
        )

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the full model's state dict on every rank; all ranks call it."""
        self.store.require_values()
        with self.store.naming_failures("gather the state dict"):
            shared = self._share(self.store.gather_state_dict())
        state = {name: tensor for name, tensor in shared.items() if tensor is not None}
        self.exchanged |= {name: sample_values(tensor) for name, tensor in state.items()}
        return state

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Return the full model's gradients by parameter name on every rank; all ranks call it."""
        with self.store.naming_failures("gather the gradients"):
            return self._share(self.store.gather_gradients())

    def _share(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return the tensors of all stages, in the model's order."""
        return self._in_order(share(self.mesh, tensors, self.store.device))

    def _in_order(self, tensors: Mapping[str, T]) -> dict[str, T]:
        last = len(self._position)
        return {n: tensors[n] for n in sorted(tensors, key=lambda n: self._position.get(n, last))}

    def trace(self, path: str | Path | None = None) -> Trace | None:
        """Return on rank 0 a trace of all ranks since the last call; all ranks call it.

        It has the Chrome trace event format, which Perfetto opens, and is also written to `path`.
        """
        if self.recorder is None:
            raise ProgramError(
                "nothing was recorded", hint="parallelize(model, batch, plan, record=True)"
            )
        everyone, device = self.mesh.everyone, self.store.device
        clocks = align(everyone, device=device)
        events = gather_events(everyone, self.recorder.take(), device)
        if events is None:
            return None
        result = merge(events, clocks, self.about)
        if path is not None:
            write_trace(path, result)
        return result

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over parameters under their original names and shapes, in the model's order.

        A parameter of which this rank holds a part is a `ShardParameter`: elementwise arithmetic
        means the same as on one device, and everything else raises. Parameters that only other
        pipeline stages hold are stand-ins on meta.
        """
        dot = prefix + "." if prefix else ""
        parameters = {e.spec.name: self.store.parameter(e) for e in self.store.entries}
        for name, parameter in self._in_order(parameters | self.store.stand_ins).items():
            yield dot + name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over buffers under their original names."""
        dot = prefix + "." if prefix else ""
        for name, value in self.store.buffers.items():
            yield dot + name, value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.store.zero_grad(set_to_none)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> None:
        """Copy this rank's part of a full model's state dict."""
        self.store.load_state_dict(state_dict)
        self.exchanged |= {name: sample_values(tensor) for name, tensor in state_dict.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse the model's attributes: setting them here would silently have no effect."""
        attributes = self.__dict__
        if name in attributes.get("_model_attributes", ()) and name not in attributes:
            raise ProgramError(
                f"{name} is an attribute of the model, not of the parallel module",
                hint=f"model.{name} = ...; the next step uses it",
            )
        super().__setattr__(name, value)

    def copy_to(
        self, model: nn.Module | Mapping[str, nn.Module] | None, *, strict: bool = True
    ) -> None:
        """Copy the trained weights and buffers into a model; all ranks call it.

        Each rank may pass its own model, or None to only take part. One full tensor exists at a
        time. With `strict`, the model must have the names of the one that was parallelized.
        """
        with self.store.naming_failures("copy the weights to a model"):
            copy_weights(self, model, strict=strict)

    def __repr__(self) -> str:
        return describe(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ParallelModule:
        """Accept `to`, `cuda`, `half` and the like if they change nothing, and raise otherwise."""
        for dtype, device in {(e.master, e.leaf.device) for e in self.store.entries}:
            before = torch.empty(0, dtype=dtype, device=device)
            after = fn(before)
            if after.dtype != before.dtype or after.device != before.device:
                raise ProgramError(
                    f"a parallel module stays in {before.dtype} on {before.device}; it cannot "
                    f"become {after.dtype} on {after.device}",
                    hint="sw.strategies.…(graph, cluster, precision=…) for dtypes, "
                    "sw.parallelize(…, device=…) for the device",
                )
        return self

    __deepcopy__ = _refusal(
        "a parallel module cannot be copied: its memory is shared with programs and ranks",
        "for an average of its weights: {name: p.detach().clone() for name, p in "
        "pm.named_parameters()}, updated with lerp_ (docs/guides/loops.md); for the weights: "
        "pm.gather_state_dict() or pm.copy_to(model)",
    )
    __reduce_ex__ = _refusal(
        "a parallel module cannot be pickled",
        "sw.save_checkpoint(folder, pm, optimizer), or torch.save(pm.gather_state_dict())",
    )
    apply = _refusal(
        "a parallel module has no submodules for apply",
        "initialize the model before sw.parallelize, or change pm.named_parameters()",
    )
    to_empty = _refusal(
        "a parallel module cannot be emptied", "pm.load_state_dict(state) for new weights"
    )
    forward = _refusal(
        "a parallel module is not called", "pm.train_step(batch) or pm.eval_step(batch)"
    )
    state_dict = _refusal(
        "the state of a parallel module is sharded over ranks", "pm.gather_state_dict()"
    )
    register_forward_pre_hook = register_forward_hook = _refuse_hook = _refusal(
        "a hook on the parallel module would never run",
        "register it on the model: the next step captures it",
    )
    register_full_backward_pre_hook = register_full_backward_hook = _refuse_hook
    register_backward_hook = _refuse_hook


class StepLoss(Tensor):
    """A loss whose backward has already run, and everything computed from it alone.

    `(loss / 2).backward()` and `scaler.scale(loss).backward()` explain themselves like
    `loss.backward()`. Only scalars and lists of losses without a graph stay in this class.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            _refuse_backward(args[0])
        # Called on plain tensors: printing, formatting and copying ask for the exact class.
        args, kwargs = tree_map_only(cls, _plain, (args, kwargs))
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            raise ProgramError(
                "backward of this loss has already run: a term that is added to it now, or "
                "multiplied by it, is not part of the training",
                hint="compute the term in the model's forward or in loss_fn; float(loss) is the "
                "value of the loss",
            )
        if type(result) is not Tensor or result.dim() > 1 or not result.is_floating_point():
            return result
        return result.as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Saved as a plain tensor, which torch.load reads with weights_only.
        return _plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _plain(loss: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return loss.as_subclass(Tensor)


def _public_loss(loss: Tensor) -> Tensor:
    """Return a loss as users get it: detached, in float32 or wider."""
    loss = loss.detach().to(widened(loss.dtype))
    # A fake tensor, of a rank whose memory is predicted, cannot change its class.
    return loss.as_subclass(StepLoss) if type(loss) is Tensor else loss


def _refuse_backward(losses: Any) -> None:
    """Raise for a loss without a graph."""
    if isinstance(losses, StepLoss) or not isinstance(losses, Tensor):
        raise ProgramError(
            "backward has already run: pm.train_step computes the gradients and returns the loss "
            "without its graph",
            hint="remove loss.backward(); train_step(batch, scale=…) scales the loss, and a "
            'strategy\'s precision="fp16" has a loss scaler that replaces GradScaler; gradients of '
            "gradients (create_graph) belong in the step's own loss",
        )


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):  # in place: a subclass may not be constructible from items
        for key in value:
            value[key] = _detach(value[key])
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_detach, value))
    return type(value)(map(_detach, value)) if isinstance(value, (tuple, list)) else value
