"""Run a step as a list of actions: forwards and backwards of stages and micro-batches.

A rank runs its group's list in order. An action waits for messages from other stages; its results
are sent in the next round of messages. The order of actions and rounds is proved free of deadlock
for all backends, see `schedules.messages`.

- F: forward of a stage for one micro-batch; its inputs and the gradient edges of its outputs are
  saved.
- B: backward, from the gradients of the values that the stage sent to those that it received.
- I and W: backward in two halves, for the inputs and for the weights.

`BatchReader` takes this rank's rows of every micro-batch from a batch.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwise.errors import ProgramError
from shardwise.runtime.mesh import TIME, ProcessMesh
from shardwise.runtime.operators import widened
from shardwise.runtime.parameters import torch_dtype
from shardwise.runtime.pipeline import OutputSpec, PipelineSpec, StageModules
from shardwise.runtime.pipeline.transfers import Exchange, TiedParameters
from shardwise.runtime.pipeline.weight_grad import WeightQueue
from shardwise.runtime.splits import Split, join, take_local
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.tracing import Recorder, called_submodules, probing
from shardwise.schedules import Action, Message, Round
from shardwise.shares import AxisSize, part


class BatchReader:
    """Take this rank's rows from batches.

    A batch is given in full, or as this rank's part of it (`local_part`): its rows of one
    micro-batch after another. An input is read in full if it has no batch dim, if something is
    precomputed from it, or if stages of this rank shard it differently; one that no stage of this
    rank uses is not read at all.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        stages: Mapping[int, StageModules],
        mesh: ProcessMesh,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self.spec, self.stages, self.mesh, self.device = spec, stages, mesh, device
        self.shapes = shapes  # of the full batch's inputs
        self._splits: dict[str, Any] = {}
        self._read_in_full: set[str] = set()
        for stage in stages.values():
            if stage.precompute is not None:
                self._read_in_full |= set(stage.precompute[1].INPUTS)
            for name, splits in stage.generated[0].INPUTS.items():
                first_splits = self._splits.setdefault(name, splits)
                if name not in spec.batch_dims or first_splits != splits:
                    self._read_in_full.add(name)
        self._num_rows = {  # of every micro-batch
            name: [rows.shape[dim] for rows in self._all_rows(name, self._without_data(name))]
            for name, dim in spec.batch_dims.items()
            if name in self._splits and name not in self._read_in_full
        }

    def precompute(self, inputs: Mapping[str, Tensor], stage: int) -> tuple[Any, ...]:
        """Compute the values of the full batch that all micro-batches of a stage use."""
        precompute = self.stages[stage].precompute
        if precompute is None:
            return ()
        module, generated = precompute
        local = [
            _part(inputs[name], splits, self.mesh.coordinates, self.mesh.axes)
            for name, splits in generated.INPUTS.items()
        ]
        with torch.no_grad():
            _, values = module(*(tensor.to(self.device) for tensor in local), outputs=True)
        return tuple(values)

    def microbatch(
        self, inputs: Mapping[str, Tensor], generated: Any, k: int, *, local: bool
    ) -> Iterator[Tensor]:
        """Iterate over this rank's rows of micro-batch `k`, in the order of the file's inputs."""
        for name, splits in generated.INPUTS.items():
            tensor = inputs[name]
            if not local or name in self._read_in_full:
                rows = self._rows(tensor, name, splits, k)
            else:
                counts = self._num_rows[name]
                rows = tensor.narrow(self.spec.batch_dims[name], sum(counts[:k]), counts[k])
            yield rows.to(self.device)

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a full input that this rank reads."""
        if name in self._read_in_full:
            return tensor
        if name not in self._splits:
            return tensor.new_empty(0)
        return torch.cat(self._all_rows(name, tensor), self.spec.batch_dims[name])

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the part of an input that this rank reads."""
        return tuple(self.local_part(name, self._without_data(name)).shape)

    def _without_data(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def _all_rows(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Return this rank's rows of every micro-batch of a full input."""
        count = self.spec.num_microbatches
        return [self._rows(tensor, name, self._splits[name], k) for k in range(count)]

    def _rows(self, tensor: Tensor, name: str, splits: Sequence[Split], k: int) -> Tensor:
        """Return this rank's rows of one micro-batch of a full input."""
        dim = self.spec.batch_dims.get(name)
        if not self.spec.timed and dim is not None:
            tensor = tensor.narrow(dim, *part(tensor.shape[dim], self.spec.num_microbatches, k))
        place = self.mesh.place
        place = {**place, TIME: k} if TIME in place else place
        return _part(tensor, splits, place, self.mesh.place_axes)


def _part(
    tensor: Tensor, splits: Sequence[Split], place: Mapping[str, int], axes: Mapping[str, AxisSize]
) -> Tensor:
    return take_local(tensor.detach(), splits, place, axes).contiguous()


@dataclass(slots=True)
class _InFlight:
    """A micro-batch between its forward and its backward."""

    received: dict[int, Tensor]
    edges: dict[str, GradientEdge]
    loss: Tensor | None
    queue: WeightQueue | None


@dataclass(slots=True)
class _Step:
    """The state of one run of the list."""

    inputs: Mapping[str, Tensor]
    local: bool  # whether the inputs are this rank's part of the batch
    outputs: bool  # whether the model's outputs are wanted
    training: bool
    scale: float  # of the loss
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    precomputed: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    # Output leaves by stage and micro-batch.
    leaves: dict[int, dict[int, tuple[Any, ...]]] = field(default_factory=dict)
    loss: Tensor | None = None


class Executor:
    """Run the actions of this rank; `shapes` are those of the full batch's inputs."""

    def __init__(
        self,
        spec: PipelineSpec,
        stages: Mapping[int, StageModules],
        mesh: ProcessMesh,
        store: ParameterStore,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device | str = "cpu",
        recorder: Recorder | None = None,
    ) -> None:
        self.spec, self.stages, self.mesh, self.store = spec, stages, mesh, store
        rank, device = mesh.ranks[mesh.rank], torch.device(device)
        self.recorder = recorder or Recorder(rank, enabled=False)
        group = next(g for g, ranks in enumerate(spec.groups) if rank in ranks)
        self.actions = spec.actions[group]
        self._training = spec.message_order("FBIW").lists[group]
        self._evaluation = spec.message_order("F").lists[group]
        self.reader = BatchReader(spec, stages, mesh, shapes, device)
        self.exchange = Exchange(spec, rank, mesh.transport, device, self.recorder)
        self.tied = TiedParameters(spec, store, rank)
        self._loss_dtype = widened(torch_dtype(spec.loss_dtype or "float32"))  # "" without a loss
        self._last_forward = _last(self.actions, "F")
        self._last_backward = _last(self.actions, "BW")  # every I is followed by its W
        self._split = any(a.kind == "I" for a in self.actions)
        modules = {id(m): m for stage in stages.values() for m in stage.modules}
        for module in modules.values() if recorder is not None else ():
            self.recorder.watch(module, called_submodules(module))

    def train(
        self,
        inputs: Mapping[str, Tensor],
        *,
        outputs: bool,
        scale: float = 1.0,
        local: bool = False,
    ) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Run all actions inside `store.step`; return the loss and, on demand, output leaves."""
        loss, leaves = self._run(self._training, _Step(inputs, local, outputs, True, scale))
        if loss is None:
            raise ProgramError("the model has no loss")
        return loss, leaves

    def evaluate(
        self, inputs: Mapping[str, Tensor], *, outputs: bool, local: bool = False
    ) -> tuple[Tensor | None, tuple[Any, ...] | None]:
        """Run the forwards only; return the loss, if there is one, and output leaves on demand."""
        return self._run(self._evaluation, _Step(inputs, local, outputs, False, 1.0))

    def received(self) -> Iterator[Message]:
        """Yield the message of each tensor that a training step receives from another rank."""
        for item in self._training:
            if isinstance(item, Round):
                yield from self.exchange.received(item)

    def _run(
        self, items: Sequence[Action | Round], step: _Step
    ) -> tuple[Tensor | None, tuple[Any, ...] | None]:
        """Run a list to its end with all of its sends, and clean up after one that fails."""
        self.exchange.begin()
        run = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights}
        try:
            for action in self._iterate(step, items):
                run[action.kind](step, action)
            loss = self._share_loss(step)
            leaves = self._share_outputs(step) if step.outputs else None
            self.exchange.sends.finish()
            return loss, leaves
        except BaseException:
            for microbatch in step.in_flight.values():
                if microbatch.queue is not None:
                    microbatch.queue.clear()
            self.exchange.abandon()
            raise
        finally:
            self.mesh.microbatch, self.mesh.final = 0, True

    def _iterate(self, step: _Step, items: Sequence[Action | Round]) -> Iterator[Action]:
        """Iterate over actions, with the mesh at their micro-batch; start rounds of messages."""
        for stage in dict.fromkeys(item.stage for item in items if isinstance(item, Action)):
            step.precomputed[stage] = self.reader.precompute(step.inputs, stage)
        for index, item in enumerate(items):
            if isinstance(item, Round):
                self.exchange.start(item)
                continue
            self.exchange.look_ahead(items, index)
            self.mesh.microbatch = item.microbatch
            self.mesh.final = self._last_forward.get(item.stage) == item
            yield item

    def _forward(self, step: _Step, action: Action) -> None:
        stage, k = action.stage, action.microbatch
        module, generated = self.stages[stage].modules[k], self.stages[stage].generated[k]
        received = self._received(stage, k, step.training)
        rows = self.reader.microbatch(step.inputs, generated, k, local=step.local)
        arguments = [*rows, *step.precomputed[stage], *received.values()]
        queue = WeightQueue() if self._split else None
        probing(f"{stage}.{k}.")
        with self._span(action), self.store.forward(stage), _deferring(queue):
            result = module(*arguments, **({"outputs": True} if step.outputs else {}))
        loss, sent = result[0], dict(zip(getattr(generated, "SENT", ()), result[1], strict=True))
        if step.outputs:
            step.leaves.setdefault(stage, {})[k] = result[2]
        for index, transfer in self.exchange.out_of.get(stage, ()):
            self.exchange.send(sent[transfer.value], (index, k, False))
        if loss is not None:
            term = loss.detach().to(self._loss_dtype)
            term = term if self.spec.timed else term / self.spec.num_microbatches
            step.loss = term if step.loss is None else step.loss + term
        if step.training:
            edges = {n: get_gradient_edge(t) for n, t in sent.items() if t.requires_grad}
            step.in_flight[stage, k] = _InFlight(received, edges, loss, queue)

    def _received(self, stage: int, k: int, training: bool) -> dict[int, Tensor]:
        """Return the values that earlier stages sent for this micro-batch, by transfer."""
        into = self.exchange.into.get(stage, ())
        arrived = {index: self.exchange.arrived((index, k, False)) for index, _ in into}
        return {i: arrived[i].requires_grad_(training and t.gradient) for i, t in into}

    def _backward(self, step: _Step, action: Action) -> None:
        stage, k = action.stage, action.microbatch
        microbatch = step.in_flight[stage, k]
        gradients: dict[str, Tensor] = {}
        for index, transfer in self.exchange.out_of.get(stage, ()):
            if not transfer.gradient:
                continue
            arrived = self.exchange.arrived((index, k, True))
            total = gradients.get(transfer.value)
            gradients[transfer.value] = arrived if total is None else total.add_(arrived)
        edges, loss = microbatch.edges, microbatch.loss
        roots: list[Any] = [edges[name] for name in gradients if name in edges]
        grads: list[Tensor | None] = [g for n, g in gradients.items() if n in edges]
        if loss is not None and loss.requires_grad:
            share = step.scale / (1 if self.spec.timed else self.spec.num_microbatches)
            roots.append(loss)
            grads.append(torch.full_like(loss, share))
        # Nothing may hold on to the graph, so that backward frees activations as it goes.
        gradients.clear()
        edges.clear()
        microbatch.loss = loss = None
        last = self._last_backward.get(stage) == action
        with (
            self._span(action),
            self.store.backward(stage, last=last),
            _deferring(microbatch.queue),
        ):
            if roots:
                torch.autograd.backward(roots, grads)
            if action.kind == "B" and microbatch.queue is not None:
                microbatch.queue.run()
        for index, transfer in self.exchange.into.get(stage, ()):
            if transfer.gradient:
                tensor = microbatch.received[index]
                grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                self.exchange.send(grad, (index, k, True))
        microbatch.received.clear()
        if action.kind == "B":
            del step.in_flight[stage, k]

    def _weights(self, step: _Step, action: Action) -> None:
        stage, k = action.stage, action.microbatch
        queue = step.in_flight.pop((stage, k)).queue
        assert queue is not None
        last = self._last_backward.get(stage) == action
        with self._span(action), self.store.backward(stage, last=last):
            queue.run()

    def _share_loss(self, step: _Step) -> Tensor | None:
        """Return the loss on all ranks, if the model has one."""
        if self.spec.loss_stage is None:
            return None
        return self.exchange.share(self.spec.loss_stage, step.loss, (), self._loss_dtype)

    def _share_outputs(self, step: _Step) -> tuple[Any, ...]:
        """Return the model's output leaves, in full on every rank."""
        leaves: list[Any] = []
        next_index = dict.fromkeys(range(len(self.spec.stages)), 0)
        for output in self.spec.outputs:
            if not isinstance(output, OutputSpec):
                leaves.append(output)
                continue
            rows, index = step.leaves.get(output.stage), next_index[output.stage]
            next_index[output.stage] += 1
            own = None if rows is None else _join(output, [rows[k][index] for k in sorted(rows)])
            dtype = torch_dtype(output.dtype)
            leaves.append(self.exchange.share(output.stage, own, output.shape, dtype))
        return tuple(leaves)

    def _span(self, action: Action) -> contextlib.AbstractContextManager[object]:
        return self.recorder.span(
            "compute", str(action), stage=action.stage, microbatch=action.microbatch
        )


def _join(output: OutputSpec, parts: list[Tensor]) -> Tensor:
    """Join one output leaf of all micro-batches."""
    if output.split is not None:
        return join(parts, output.split.dim, output.split.of)
    if output.summed or output.averaged:
        total = torch.stack(parts).sum(0)
        return total / len(parts) if output.averaged else total
    return parts[-1]


def _deferring(queue: WeightQueue | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if queue is None else queue.deferring()


def _last(actions: Sequence[Action], kinds: str) -> dict[int, Action]:
    """Return the last action of these kinds of every stage."""
    return {action.stage: action for action in actions if action.kind in kinds}
