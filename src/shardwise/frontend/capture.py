"""Capture a model's step on a batch as a `Graph`.

The model is copied without its weights and exported on fake tensors; the exported graph is then
functionalized and normalized. Nothing of the user's is changed.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from shardwise.batch import Call, read_batch
from shardwise.errors import CaptureError
from shardwise.frontend import tracing
from shardwise.frontend.attention import masked_attention
from shardwise.frontend.build_graph import Sources, assemble
from shardwise.frontend.builder import REGION, Alias, Builder, NotFunctional
from shardwise.frontend.convert import Converter, Recorder, recording
from shardwise.frontend.errors import (
    ROOT,
    capture_error,
    check_regions_can_go,
    cure_for,
    explained,
    origin_of,
)
from shardwise.frontend.experts import routed_experts
from shardwise.frontend.fake import fake_copy, fake_tensor, logical_device, new_fake_mode
from shardwise.frontend.hooks import check_module_hooks, gradient_hooks, hooks_of, recording_hooks
from shardwise.frontend.known_values import Inquiry, known_values
from shardwise.frontend.objective import (
    Around,
    Model,
    Objective,
    Step,
    StepFn,
    StepFunction,
    as_module,
    check_objective,
    objective,
)
from shardwise.frontend.packed_sequences import padded_sequences
from shardwise.frontend.python_state import Change, Place, Reads, Watch
from shardwise.frontend.rolled_loops import roll_loops
from shardwise.ir import GradientHook, Graph


def capture(
    model: Model,
    batch: Any,
    loss_fn: Objective = None,
    *,
    step: StepFn | None = None,
    training: bool | None = None,
    device: torch.device | str | None = None,
    around: Around = nullcontext,
    reads: Reads | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """Capture a step in the model's own dtypes; `sw.capture` describes the other arguments.

    The forward pass and the loss are traced inside the context manager `around()`. `reads`
    collects the Python state that the graph depends on. `buffers` has the data of a model without
    any. Where Python looks at values of the batch, the step is traced again with their data, and
    the graph gets guards.
    """
    chosen, data = objective(loss_fn, step), dict(buffers or as_module(model).named_buffers())
    inquiry = Inquiry([tensor for _, tensor in read_batch(batch).tensors], data)
    run = functools.partial(
        trace_step, model, batch, chosen,
        training=training, device=device, around=around, inquiry=inquiry,
    )  # fmt: skip
    try:
        traced = run()
        graph = traced.graph(traced.call)
    except CaptureError:
        if not inquiry.num_unanswered:
            raise
        inquiry.guarding = True
        traced = run()
        graph = traced.graph(traced.call)
        _check_guards(graph, inquiry)
    if changes := traced.changes:
        _check_next_step(graph, changes, run)
    if reads is not None:
        reads.add(traced.watch.reads)
    return graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """An exported step, before it becomes a graph."""

    model: nn.Module
    call: Call
    step: Step
    watch: Watch
    recorder: Recorder
    hooks: tuple[GradientHook, ...]
    program: ExportedProgram
    device: torch.device

    @property
    def changes(self) -> list[Change]:
        """Return the attributes that the step reads and changes, except tensors."""
        return [change for change in self.watch.changes if not change.tensors]

    def graph(self, call: Call) -> Graph:
        """Return the graph for a call with the sizes of the exported program."""
        sources = Sources.of(self.model, call, _argument_names(self.model))
        sources.trained_outside = self.watch.reach.trained_tensors()
        with tracing.cuda_uninitialized(), explained(type(self.model).__name__):
            try:
                graph = self._convert(self.program, sources)
            except NotFunctional as reason:
                graph = self._convert_decomposed(sources, reason)
        graph = roll_loops(graph)
        if not self.hooks:
            return graph
        functions = {**graph.functions, "gradient hooks": self.hooks}
        return replace(graph, hooks=self.hooks, functions=functions)

    def _convert(self, program: ExportedProgram, sources: Sources) -> Graph:
        """Return an exported program of this step as a `Graph`."""
        kind = self.device.type
        ambient = (kind, torch.get_autocast_dtype(kind), True)
        autocast = ambient if torch.is_autocast_enabled(kind) else None
        builder = Builder(region=replace(REGION, autocast=autocast))
        roots = sources.declare(builder)
        inputs = _placeholders(program, builder, sources, roots)
        results = Converter(builder, self.recorder).run(program.graph_module, inputs)
        results = _apply_mutations(program, builder, roots, results)
        return assemble(builder, sources, roots, self.step, results, self.recorder)

    def _convert_decomposed(self, sources: Sources, reason: NotFunctional) -> Graph:
        """Return the graph by torch's own functionalization, which handles more writes."""
        check_regions_can_go(self.program.graph_module, reason)
        try:
            with tracing.quiet(), recording(self.recorder):
                decomposed = self.program.run_decompositions({})
            graph = self._convert(decomposed, sources)
        except (NotFunctional, RuntimeError) as error:
            second = error if isinstance(error, NotFunctional) else reason
            cure = cure_for(str(second))
            hint = "replace the in-place write by an operation that returns a new tensor"
            raise CaptureError(
                f"{cure.reason if cure else 'the graph cannot be made functional'} ({second})",
                where=second.where,
                hint=cure.hint if cure else hint,
            ) from error
        if not self.recorder.num_groups:
            return graph
        lost = f"activation checkpoints do not become recompute groups ({reason})"
        return replace(graph, warnings=(*graph.warnings, lost))


def trace_step(
    model: Model,
    batch: Any,
    chosen: Objective = None,
    *,
    training: bool | None = None,
    device: torch.device | str | None = None,
    around: Around = nullcontext,
    attributes: Mapping[Place, Any] | None = None,
    inquiry: Inquiry | None = None,
    dims: Sequence[Collection[int]] | None = None,
) -> Traced:
    """Export the step of a copy of the model, with other values for some `attributes`.

    `dims` lists for every tensor of the batch the dims whose size is a symbol.
    """
    call, model = read_batch(batch), as_module(model)
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a model must be an nn.Module, not a {type(model).__name__}")
    check_objective(chosen)
    tensors = [tensor for _, tensor in call.tensors]
    logical = torch.device(device) if device is not None else logical_device(model, tensors)
    with tracing.cuda_uninitialized(), explained(type(model).__name__), tracing.deep_stack():
        mode = new_fake_mode()
        copy = fake_copy(model, logical, mode)
        if training is not None and training != copy.training:
            copy.train(training)
        for (path, name), value in (attributes or {}).items():
            vars(copy.get_submodule(path))[name] = value
        functions: list[Any] = [chosen.fn if isinstance(chosen, StepFunction) else chosen]
        functions += [hook for parameter in copy.parameters() for hook in hooks_of(parameter)]
        watch = Watch(copy, [function for function in functions if function is not None])
        inquiry = inquiry or Inquiry(tensors, {})
        step = Step(copy, call, chosen, watch=watch, inquiry=inquiry, around=around)
        recorder = Recorder()
        fakes = tuple(fake_tensor(tensor, logical, mode) for tensor in tensors)
        check_module_hooks(copy)
        with watch.watching():
            hooks = gradient_hooks(copy)
        program = _export(step, fakes, recorder, inquiry, type(model).__name__, dims)
    return Traced(
        model=model,
        call=call,
        step=step,
        watch=watch,
        recorder=recorder,
        hooks=hooks,
        program=program,
        device=logical,
    )


def _check_next_step(graph: Graph, changes: Sequence[Change], run: Callable[..., Traced]) -> None:
    """Refuse attributes that forward changes, unless the next step leaves them as they are.

    A value that is computed once and stored (a length, a flag) is harmless if the next step
    computes the same and changes nothing.
    """
    traced = run(attributes={change.place: change.after for change in changes})
    for change in traced.changes:
        before, after = repr(change.before)[:40], repr(change.after)[:40]
        raise change.refusal(f"each step would see a different value ({before}, then {after})")
    if traced.graph(traced.call).fingerprint != graph.fingerprint:
        raise changes[0].refusal("the second step would compute something else")


def _check_guards(graph: Graph, inquiry: Inquiry) -> None:
    """Raise unless the guards of a graph hold for the batch that it was captured with."""
    if graph.guards is None:
        return
    inputs = dict(zip((source.name for source in graph.inputs), inquiry.inputs, strict=True))
    broken = graph.guards.find_broken(inputs, inquiry.buffers)
    if broken is not None:
        raise CaptureError(
            f"the captured computation of a value that Python looks at disagrees with the model: "
            f"{broken}",
            where=broken.source,
            hint="compute the value in the data loader, and pass it in the batch as a plain number",
        )


def _export(
    step: Step,
    fakes: tuple[torch.Tensor, ...],
    recorder: Recorder,
    inquiry: Inquiry,
    name: str,
    dims: Sequence[Collection[int]] | None,
) -> ExportedProgram:
    shapes = None
    if dims is not None:
        shapes = {"tensors": tuple(dict.fromkeys(own, torch.export.Dim.AUTO) for own in dims)}
    try:
        with (
            tracing.quiet(),
            recording(recorder),
            recording_hooks(recorder),
            tracing.controlled_random(),
            known_values(inquiry),
            routed_experts(),
            tracing.bags_of_rows(),
            masked_attention(),
            padded_sequences(),
            tracing.refusing_derivatives(),
            tracing.keeping_user_frames(),
            torch.enable_grad(),
        ):
            return torch.export.export(step, fakes, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise capture_error(error, name) from error


def _placeholders(
    program: ExportedProgram, builder: Builder, sources: Sources, roots: dict[str, Alias]
) -> list[Alias]:
    """Return an alias for every placeholder of the exported graph."""
    inputs: list[Alias] = []
    batch = iter(sources.inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs, strict=True):
        target = (spec.target or "").removeprefix(f"{ROOT}.")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            alias = roots[target]
        elif spec.kind is InputKind.USER_INPUT:
            alias = roots[next(batch).value]
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            alias = sources.constant(builder, program.constants[spec.target], target)
        else:
            user = next(iter(node.users), node)
            raise CaptureError(
                f"forward uses an object that a graph cannot contain ({target}), such as a "
                "torch.Generator",
                where=origin_of(user.meta)["source"] or None,
                hint="draw random numbers without generator=: the plan's seed determines them",
            )
        builder.storages.setdefault(node.meta["val"].untyped_storage()._cdata, alias.storage)
        inputs.append(alias)
    return inputs


def _apply_mutations(
    program: ExportedProgram, builder: Builder, roots: dict[str, Alias], results: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Apply the buffer updates among a functionalized program's outputs; return the others."""
    outputs: list[Any] = []
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            target = (spec.target or "").removeprefix(f"{ROOT}.")
            builder.write(roots[target], builder.read(result))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            builder.warnings.append(
                f"forward modifies input {spec.target} in place; the batch stays unchanged"
            )
        elif spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(result)
        else:
            raise CaptureError(f"forward modifies {spec.target} in place ({spec.kind})")
    return tuple(outputs)


def _argument_names(model: nn.Module) -> list[str]:
    """Return the names of the positional arguments of forward."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
