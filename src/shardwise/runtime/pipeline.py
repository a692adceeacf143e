"""Runs a step as a list of actions: forwards and backwards of stages and micro-batches.

A rank runs its group's list in order. An action waits for what other stages send it and starts to
send what they wait for; sends never block, so that a schedule which was checked cannot deadlock.
Receives are posted before the action in front of them is computed.

- F: forward of a stage for one micro-batch; its inputs and the edges of its outputs are kept.
- B: backward, from the gradients of what the stage sent to those of what it received.
- I and W: backward in two halves, for the inputs and for the weights.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.errors import ProgramError
from shardwise.runtime.deferred import WeightQueue
from shardwise.runtime.mesh import TIME, ProcessMesh, part
from shardwise.runtime.parameters import torch_dtype
from shardwise.runtime.probe import probing
from shardwise.runtime.recorder import Recorder
from shardwise.runtime.retire import Retirement
from shardwise.runtime.splits import Split, join, take_local
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.tied import TiedParameters, TiedSpec
from shardwise.runtime.transfers import Arrival, Holding, Route, TransferSpec
from shardwise.runtime.transport import Transport

__all__ = ["Action", "Executor", "OutputSpec", "PipelineSpec", "StageModules", "StageSpec"]

LOOKAHEAD = 1  # actions whose receives are posted ahead of the one being computed
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """`0F3`: stage 0 computes the forward of micro-batch 3."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ProgramError(f"{text!r} is not an action", hint="0F3, 0B3, 0I3 or 0W3")
        return Action(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """The ranks of a stage, arranged along axes."""

    ranks: tuple[int, ...]
    axes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """One leaf of the model's output: who gives it, and what micro-batches hold of it."""

    stage: int
    shape: tuple[int, ...]
    dtype: str
    split: Split | None = None
    summed: bool = False
    averaged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """What all ranks know of the step."""

    stages: tuple[StageSpec, ...]
    transfers: tuple[TransferSpec, ...]
    outputs: tuple[Any, ...]  # OutputSpec, or a constant
    tied: tuple[TiedSpec, ...]
    microbatches: int
    timed: bool  # whether micro-batches are parts of one batch, or batches of their own
    batch_dims: Mapping[str, int]  # inputs with a dim of samples
    actions: tuple[tuple[Action, ...], ...]
    loss_stage: int | None
    loss_dtype: str

    @staticmethod
    def of(generated: Any) -> PipelineSpec:
        """What a generated pipeline file says."""
        lines = [line.split()[2:] for line in generated.SCHEDULE.strip().splitlines()]
        rows = [[text for text in row if text != "."] for row in lines]
        return PipelineSpec(
            stages=generated.STAGES,
            transfers=generated.TRANSFERS,
            outputs=generated.OUTPUTS,
            tied=generated.TIED,
            microbatches=generated.MICROBATCHES,
            timed=generated.TIMED,
            actions=tuple(tuple(Action.parse(text) for text in row) for row in rows),
            batch_dims=generated.BATCH_DIMS,
            loss_stage=generated.LOSS_STAGE,
            loss_dtype=generated.LOSS_DTYPE,
        )

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    def mesh(self, rank: int, transport: Transport | None = None) -> ProcessMesh:
        """The mesh of a rank's group, as that rank sees it."""
        stage = next(s for s in self.stages if rank in s.ranks)
        return ProcessMesh(
            stage.axes,
            stage.ranks.index(rank),
            transport,
            ranks=stage.ranks,
            groups=self.groups,
            microbatches=self.microbatches,
            timed=self.timed,
        )

    def of_rank(self, rank: int) -> tuple[Action, ...]:
        """The actions of a rank."""
        for ranks, actions in zip(self.groups, self.actions, strict=True):
            if rank in ranks:
                return actions
        raise ProgramError(f"rank {rank} has no stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModules:
    """One stage's generated modules: one for each micro-batch, though most are the same one.

    `generated` are the files they come from; `beforehand` computes what is needed of the whole
    batch.
    """

    modules: Sequence[nn.Module]
    generated: Sequence[Any]
    beforehand: tuple[nn.Module, Any] | None = None


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and its backward."""

    received: dict[int, Tensor]
    edges: dict[str, GradientEdge]
    loss: Tensor | None
    queue: WeightQueue | None


@dataclass(slots=True)
class _Step:
    """What one run of the list holds."""

    inputs: Mapping[str, Tensor]
    whole: bool  # whether the inputs are of the whole batch, or this rank's part of it
    arrivals: dict[tuple[int, int, bool], tuple[Arrival, int]] = field(default_factory=dict)
    kept: dict[tuple[int, int, bool], Tensor] = field(default_factory=dict)
    flying: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    before: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    leaves: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    loss: Tensor | None = None


class Executor:
    """Runs the actions of this rank."""

    def __init__(
        self,
        spec: PipelineSpec,
        stages: Mapping[int, StageModules],
        mesh: ProcessMesh,
        store: ParameterStore,
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
    ) -> None:
        self.spec, self.stages, self.mesh, self.store = spec, stages, mesh, store
        self.rank, self.transport = mesh.ranks[mesh.rank], mesh.transport
        self.device = torch.device(device)
        self.recorder = recorder or Recorder(self.rank, enabled=False)
        self._steps = 0
        self.actions = spec.of_rank(self.rank)
        self.retirement = Retirement()
        self.tied = TiedParameters(spec, store, self.rank)
        self._routes: dict[tuple[int, int, bool], Route] = {}
        self._into = _by_stage(spec.transfers, "target")
        self._out_of = _by_stage(spec.transfers, "source")
        self._last_forward = _last(self.actions, "F")
        self._last_backward = _last(self.actions, "BW")  # every I is followed by its W
        self._split = any(a.kind == "I" for a in self.actions)
        self._row_counts: dict[str, list[int]] = {}
        self._whole_inputs = self._find_whole_inputs()
        if self.recorder.enabled:
            self._watch()

    def _find_whole_inputs(self) -> set[str]:
        """Inputs without samples, used otherwise in another stage here, or needed beforehand."""
        found: set[str] = set()
        seen: dict[str, Any] = {}
        for stage in self.stages.values():
            if stage.beforehand is not None:
                found |= set(stage.beforehand[1].INPUTS)
            for name, splits in stage.generated[0].INPUTS.items():
                if name not in self.spec.batch_dims or seen.setdefault(name, splits) != splits:
                    found.add(name)
        return found

    # --- a whole step --------------------------------------------------------------------

    def train(
        self, inputs: Mapping[str, Tensor], *, outputs: bool, scale: float = 1.0, whole: bool = True
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """All actions, inside `store.step`: the loss, and the model's output leaves if asked."""
        step = _Step(inputs, whole)
        self._steps += 1
        try:
            self._before(step, self.actions)
            for index, action in enumerate(self.actions):
                self.retirement.release()
                self._post(step, index, self.actions)
                self.mesh.microbatch = action.microbatch
                self.mesh.final = self._last_forward.get(action.stage) == action
                self._run(step, action, outputs=outputs, scale=scale)
            loss = self._share_loss(step)
            leaves = self._share_outputs(step) if outputs else None
        except BaseException:
            for flying in step.flying.values():
                if flying.queue is not None:
                    flying.queue.clear()
            self.retirement.abandon()
            raise
        finally:
            self.mesh.microbatch, self.mesh.final = 0, True
        self.retirement.finish()
        return loss, leaves

    def evaluate(self, inputs: Mapping[str, Tensor], *, whole: bool = True) -> tuple[Any, ...]:
        """The forwards alone: the model's output leaves."""
        step = _Step(inputs, whole)
        forwards = tuple(a for a in self.actions if a.kind == "F")
        try:
            self._before(step, forwards)
            for index, action in enumerate(forwards):
                self.retirement.release()
                self._post(step, index, forwards)
                self.mesh.microbatch = action.microbatch
                self.mesh.final = self._last_forward.get(action.stage) == action
                self._forward(step, action, outputs=True, training=False)
            leaves = self._share_outputs(step)
        except BaseException:
            self.retirement.abandon()
            raise
        finally:
            self.mesh.microbatch, self.mesh.final = 0, True
        self.retirement.finish()
        return leaves

    def _run(self, step: _Step, action: Action, *, outputs: bool, scale: float) -> None:
        if action.kind == "F":
            self._forward(step, action, outputs=outputs, training=True)
        elif action.kind in "BI":
            self._backward(step, action, scale)
        else:
            self._weights(step, action)

    # --- actions -------------------------------------------------------------------------

    def _forward(self, step: _Step, action: Action, *, outputs: bool, training: bool) -> None:
        stage, k = action.stage, action.microbatch
        here = self.stages[stage]
        received = self._received(step, stage, k, training)
        arguments = [*self._inputs(step, here.generated[k], k), *step.before.get(stage, ())]
        arguments += received.values()
        queue = WeightQueue() if self._split else None
        probing(f"{stage}.{k}.")
        with self._span(action), self.store.forward(stage), _deferring(queue):
            found = here.modules[k](*arguments, **({"outputs": True} if outputs else {}))
        loss, sent = found[0], dict(zip(_sent(here.generated[k]), found[1], strict=True))
        if outputs:
            step.leaves.setdefault(stage, []).append((k, found[2]))
        for index, transfer in self._out_of.get(stage, ()):
            self._send(step, index, k, sent[transfer.value], back=False)
        if loss is not None:
            term = loss.detach().to(self._loss_dtype())
            term = term if self.spec.timed else term / self.spec.microbatches
            step.loss = term if step.loss is None else step.loss + term
        if training:
            edges = {n: get_gradient_edge(t) for n, t in sent.items() if t.requires_grad}
            step.flying[stage, k] = _InFlight(received, edges, loss, queue)

    def _received(self, step: _Step, stage: int, k: int, training: bool) -> dict[int, Tensor]:
        """What earlier stages sent for this micro-batch, by transfer."""
        found: dict[int, Tensor] = {}
        for index, transfer in self._into.get(stage, ()):
            tensor = self._arrived(step, index, k, back=False)
            if transfer.gradient and training:
                tensor.requires_grad_()
            found[index] = tensor
        return found

    def _backward(self, step: _Step, action: Action, scale: float) -> None:
        stage, k = action.stage, action.microbatch
        flying = step.flying[stage, k]
        gradients: dict[str, Tensor] = {}
        for index, transfer in self._out_of.get(stage, ()):
            if not transfer.gradient:
                continue
            arrived = self._arrived(step, index, k, back=True)
            known = gradients.get(transfer.value)
            gradients[transfer.value] = arrived if known is None else known.add_(arrived)
        roots: list[Any] = [flying.edges[name] for name in gradients if name in flying.edges]
        grads: list[Tensor | None] = [g for n, g in gradients.items() if n in flying.edges]
        if flying.loss is not None and flying.loss.requires_grad:
            share = scale if self.spec.timed else scale / self.spec.microbatches
            roots.append(flying.loss)
            grads.append(torch.full_like(flying.loss, share))
        gradients.clear()
        flying.edges.clear()
        flying.loss = None
        last = self._last_backward.get(stage) == action
        with (
            self._span(action),
            self.store.backward(stage, last=last),
            _deferring(flying.queue),
        ):
            if roots:
                torch.autograd.backward(roots, grads)
            if action.kind == "B" and flying.queue is not None:
                flying.queue.run()
        for index, transfer in self._into.get(stage, ()):
            if transfer.gradient:
                tensor = flying.received[index]
                grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self._send(step, index, k, grad, back=True)
        flying.received.clear()
        if action.kind == "B":
            del step.flying[stage, k]

    def _weights(self, step: _Step, action: Action) -> None:
        stage, k = action.stage, action.microbatch
        queue = step.flying.pop((stage, k)).queue
        assert queue is not None
        last = self._last_backward.get(stage) == action
        with self._span(action), self.store.backward(stage, last=last):
            queue.run()

    # --- what actions take and give --------------------------------------------------------

    def _before(self, step: _Step, actions: Sequence[Action]) -> None:
        """Compute what micro-batches need of the whole batch."""
        for stage in dict.fromkeys(action.stage for action in actions):
            found = self.stages[stage].beforehand
            if found is None:
                continue
            module, generated = found
            place, axes = self.mesh.coordinates, self.mesh.axes
            local = [  # these inputs are whole in local batches too
                _part(step.inputs[name], splits, place, axes)
                for name, splits in generated.INPUTS.items()
            ]
            with torch.no_grad():
                _, values = module(*(t.to(self.device) for t in local), outputs=True)
            step.before[stage] = values

    def _inputs(self, step: _Step, generated: Any, k: int) -> Iterator[Tensor]:
        """This rank's part of the batch for one micro-batch."""
        for name, splits in generated.INPUTS.items():
            tensor = step.inputs[name]
            if step.whole or name in self._whole_inputs:
                yield self._rows(tensor, name, splits, k).to(self.device)
            else:
                counts = self._row_counts[name]
                dim = self.spec.batch_dims[name]
                yield tensor.narrow(dim, sum(counts[:k]), counts[k]).to(self.device)

    def _rows(self, tensor: Tensor, name: str, splits: Sequence[Split], k: int) -> Tensor:
        """This rank's rows of one micro-batch of a whole input."""
        if not self.spec.timed:
            tensor = self._own_batch(tensor, name, k)
        place, axes = dict(self.mesh.place), self.mesh.place_axes
        if TIME in place:
            place[TIME] = k
        return _part(tensor, splits, place, axes)

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """What this rank reads of a whole input: its rows of every micro-batch, one after another.

        An input of which something is computed beforehand, or without rows, is read whole; one that
        no stage here uses not at all.
        """
        files = [f for stage in self.stages.values() for f in stage.generated[:1]]
        using = [file for file in files if name in file.INPUTS]
        if name in self._whole_inputs:
            return tensor
        if not using:
            return tensor.new_empty(0)
        splits = using[0].INPUTS[name]
        rows = [self._rows(tensor, name, splits, k) for k in range(self.spec.microbatches)]
        dim = self.spec.batch_dims[name]
        self._row_counts[name] = [part.shape[dim] for part in rows]
        return torch.cat(rows, dim)

    def _own_batch(self, tensor: Tensor, name: str, k: int) -> Tensor:
        """One micro-batch of an input, where each is a batch of its own."""
        dim = self.spec.batch_dims.get(name)
        if dim is None:
            return tensor
        return tensor.narrow(dim, *part(tensor.shape[dim], self.spec.microbatches, k))

    def _holdings(self, index: int, k: int) -> tuple[Holding, Holding]:
        transfer = self.spec.transfers[index]
        place = {TIME: (k, self.spec.microbatches)} if self.spec.timed else {}
        pair = ((transfer.source, transfer.sent), (transfer.target, transfer.received))
        source, target = (
            Holding(
                self.spec.stages[stage].ranks,
                self.spec.stages[stage].axes,
                transfer.shape,
                splits,
                place,
            )
            for stage, splits in pair
        )
        return source, target

    def _route(self, index: int, k: int, back: bool) -> Route:
        key = (index, k, back)
        if key not in self._routes:
            source, target = self._holdings(index, k)
            pair = (target, source) if back else (source, target)
            self._routes[key] = Route(self.rank, *pair)
        return self._routes[key]

    def _tag(self, index: int, k: int, back: bool) -> int:
        return (2 * index + back) * self.spec.microbatches + k

    def _send(self, step: _Step, index: int, k: int, tensor: Tensor, *, back: bool) -> None:
        route = self._route(index, k, back)
        if route.is_local:
            step.kept[index, k, back] = tensor.detach()
            return
        if any(piece.peer == self.rank for piece in route.sends):
            step.kept[index, k, back] = route.own(tensor)
        start, done = time.perf_counter_ns(), None
        sends = route.send(self.transport, tensor, self._tag(index, k, back))
        if sends and self.recorder.enabled:
            done = functools.partial(self._record, "send", index, k, back, start)
        self.retirement.add(sends, done)

    def _arrived(self, step: _Step, index: int, k: int, *, back: bool) -> Tensor:
        route = self._route(index, k, back)
        own = step.kept.pop((index, k, back), None)
        if route.is_local:
            assert own is not None
            return own
        arrival, start = step.arrivals.pop((index, k, back))
        arrived = arrival.wait(own)
        if self.recorder.enabled and route.receives:
            self._record("receive", index, k, back, start)
        return arrived

    def _receive(self, index: int, k: int, back: bool) -> tuple[Arrival, int]:
        dtype, start = torch_dtype(self.spec.transfers[index].dtype), time.perf_counter_ns()
        route = self._route(index, k, back)
        tag = self._tag(index, k, back)
        return route.receive(self.transport, dtype, self.device, tag), start

    def _post(self, step: _Step, index: int, actions: Sequence[Action]) -> None:
        """Post the receives of this action and of those after it."""
        for action in actions[index : index + 1 + LOOKAHEAD]:
            if action.kind == "W":
                continue
            back = action.kind != "F"
            wanted = (self._out_of if back else self._into).get(action.stage, ())
            for number, transfer in wanted:
                key = (number, action.microbatch, back)
                if (back and not transfer.gradient) or key in step.arrivals:
                    continue
                if not self._route(*key).is_local:
                    step.arrivals[key] = self._receive(*key)

    # --- results ---------------------------------------------------------------------------

    def _share_loss(self, step: _Step) -> Tensor:
        """The loss on all ranks."""
        if self.spec.loss_stage is None:
            raise ProgramError("the model has no loss")
        tag = 2 * len(self.spec.transfers) * self.spec.microbatches
        return self._from_stage(self.spec.loss_stage, step.loss, (), self._loss_dtype(), tag)

    def _loss_dtype(self) -> torch.dtype:
        """The type in which terms of the loss are added up."""
        own = torch_dtype(self.spec.loss_dtype)
        return torch.float32 if own.itemsize < 4 else own

    def _from_stage(
        self,
        stage: int,
        mine: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        tag: int,
    ) -> Tensor:
        """A whole tensor of one stage's ranks, on all ranks."""
        holders = self.spec.stages[stage].ranks
        others = [r for ranks in self.spec.groups for r in ranks if r not in holders]
        if self.rank not in holders:
            out = torch.empty(shape, dtype=dtype, device=self.device)
            source = holders[others.index(self.rank) % len(holders)]
            return self.transport.receive(out.view(-1), source, tag).wait().view(shape)
        assert mine is not None
        wire = mine.detach().to(dtype).reshape(-1).contiguous()
        for turn, other in enumerate(others):
            if holders[turn % len(holders)] == self.rank:
                self.retirement.add([self.transport.send(wire, other, tag)])
        return mine.detach()

    def _share_outputs(self, step: _Step) -> tuple[Any, ...]:
        """The model's output leaves, whole on every rank."""
        leaves: list[Any] = []
        position: dict[int, int] = {}
        base = 2 * len(self.spec.transfers) * self.spec.microbatches + 1
        for number, output in enumerate(self.spec.outputs):
            if not isinstance(output, OutputSpec):
                leaves.append(output)
                continue
            place = position.get(output.stage, 0)
            position[output.stage] = place + 1
            mine = None
            if output.stage in step.leaves:
                found = [row[place] for _, row in sorted(step.leaves[output.stage], key=_first)]
                mine = self._joined(output, found)
            dtype = torch_dtype(output.dtype)
            leaves.append(self._from_stage(output.stage, mine, output.shape, dtype, base + number))
        return tuple(leaves)

    def _joined(self, output: OutputSpec, parts: list[Tensor]) -> Tensor:
        """One leaf of all micro-batches."""
        if output.split is not None:
            return join(parts, output.split.dim, output.split.of)
        if output.summed or output.averaged:
            total = torch.stack(parts).sum(0)
            return total / len(parts) if output.averaged else total
        return parts[-1]

    # --- recording -------------------------------------------------------------------------

    def _watch(self) -> None:
        """Record the blocks of every module of this rank."""
        seen: list[nn.Module] = []
        for stage in self.stages.values():
            for module in stage.modules:
                if not any(module is known for known in seen):
                    seen.append(module)
                    self.recorder.watch(module, _blocks(module))

    def _span(self, action: Action) -> contextlib.AbstractContextManager[object]:
        return self.recorder.span(
            "compute", str(action), stage=action.stage, microbatch=action.microbatch
        )

    def _record(self, what: str, index: int, k: int, back: bool, start: int) -> None:
        """A send or receive that began at `start` and has now ended."""
        value = self.spec.transfers[index].value
        name = f"{what} {'gradient of ' * back}{value}"
        self.recorder.add(
            "communication",
            name,
            start,
            time.perf_counter_ns(),
            microbatch=k,
            transfer=f"{self._steps}.{self._tag(index, k, back)}",
        )


def _blocks(module: nn.Module) -> list[str]:
    """Paths of the submodules that are called: blocks of the model."""
    return [
        path
        for path, child in module.named_modules()
        if path and type(child).forward is not nn.Module.forward
    ]


def _deferring(queue: WeightQueue | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if queue is None else queue.deferring()


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _sent(generated: Any) -> tuple[str, ...]:
    return getattr(generated, "SENT", ())


def _part(
    tensor: Tensor, splits: Sequence[Split], place: Mapping[str, int], axes: Mapping[str, int]
) -> Tensor:
    return take_local(tensor.detach(), splits, place, axes).contiguous()


def _by_stage(
    transfers: Sequence[TransferSpec], end: str
) -> dict[int, list[tuple[int, TransferSpec]]]:
    found: dict[int, list[tuple[int, TransferSpec]]] = {}
    for index, transfer in enumerate(transfers):
        found.setdefault(getattr(transfer, end), []).append((index, transfer))
    return found


def _last(actions: Sequence[Action], kinds: str) -> dict[int, Action]:
    """The last action of these kinds of every stage."""
    return {action.stage: action for action in actions if action.kind in kinds}
