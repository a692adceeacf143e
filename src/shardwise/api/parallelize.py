"""A model on this rank of a running job: `parallelize(model, batch, plan)`."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardwise import runtime as rt
from shardwise.api.batches import (
    LayoutsBySize,
    StagePlacement,
    is_stored_as,
    plan_for_first,
    plan_for_graph,
    plan_for_others,
    same_storage,
    stored_specs,
)
from shardwise.api.compile import PipelineProgram, Program, capture_for_plan, compile
from shardwise.api.originals import Notice, claim, refuse_shared
from shardwise.api.steps import (
    Plans,
    StepSpec,
    read_steps,
    step_options,
    storage_homes,
    trained_parameters,
    used_parameters,
)
from shardwise.api.weights import Init, constants_of, load_weights
from shardwise.api.world import PythonState, attributes_of
from shardwise.formatting import size as format_bytes
from shardwise.frontend import skeleton
from shardwise.frontend.objective import Model, StepFn, as_module
from shardwise.frontend.python_state import Reads
from shardwise.frontend.sizes import GraphsBySize
from shardwise.ir import Graph
from shardwise.plans import Plan, model_fingerprint
from shardwise.runtime.collectives import Derive
from shardwise.runtime.loader import LoadedModule, LoadedPipeline, make_store
from shardwise.runtime.memory import grow_segments
from shardwise.runtime.rendezvous import require_ranks, starting
from shardwise.runtime.step import ModuleStep, PipelineStep


def parallelize(
    model: Model,
    batch: Any,
    plan: Plans,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    *,
    steps: Mapping[str, StepFn] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    init: Init | None = None,
    compile: bool = False,
    check_batches: bool = True,
    record: bool | Literal["paused"] = False,
    timeout_s: float = 60.0,
) -> rt.ParallelModule:
    """This rank's part of `model` under `plan`.

    Every rank calls this with the same model, batch and plan; they agree on the program before the
    first collective, and a rank that fails, is missing or differs is named within `timeout_s`
    seconds. All ranks begin with the weights of rank 0, whatever others have.

    A model on meta is initialized with `seed` as its modules do it (`reset_parameters`,
    `_init_weights`), or as `init` does it: `init=lambda: Model(config)` builds the model on rank 0,
    with the weights it has on one device after `torch.manual_seed(seed)`; `init=function` sets the
    parameters of the module that it is given.

    With `compile` the generated module runs under `torch.compile`; with `record`,
    `pm.trace(path)` gives what every rank did when: "paused" begins with `pm.recorder.start()`.

    With `steps`, a mapping from names to functions `(modules, batch) -> loss`, one parallel module
    runs several steps over the same parameters: `pm.train_step(batch, step="d")`. `model` may then
    be a mapping from names to modules, which the functions read as `modules.G` or `modules["G"]`.
    `batch` is one example for all steps, or a mapping with exactly their names; `plan` is one plan
    for all, a mapping with their names, or a function that makes a plan of each step's graph.
    """
    with starting(timeout_s) as agree:
        root = as_module(model)
        refuse_shared(root)
        if not root.training:
            warnings.warn(
                "the model is in eval mode, and pm.train_step computes in training mode, with "
                "dropout and batch statistics: call model.train() before sw.parallelize. Single "
                "modules that are in eval mode within a model in training mode stay in it",
                stacklevel=2,
            )
        factory = _Factory(root, device, timeout_s, compile)
        factory.steps = read_steps(root, batch, plan, loss_fn, steps, factory.device)
        first_plan = factory.plan
        require_ranks(first_plan.num_ranks)
        compiled = {
            name: factory.compile(step, step.batch, True, first=True)
            for name, step in factory.steps.items()
        }
        homes = storage_homes({name: program for name, (_, program) in compiled.items()})
        factory.fix_layouts({name: program for name, (_, program) in compiled.items()}, homes)
        agree(
            " ".join(program.fingerprint for _, program in compiled.values()),
            {k: v for graph, _ in compiled.values() for k, v in constants_of(graph).items()},
        )
    grow_segments(factory.device)
    if factory.device.type == "cpu":
        from shardwise.malloc_tuning import keep_heap

        keep_heap()
    mesh = factory.mesh()
    factory.recorder = _recorder(record, mesh, factory.device)
    if factory.recorder is not None:
        mesh.note(factory.recorder)
    rng = rt.Rng(first_plan.seed, first_plan.rng, mesh)
    store, programs = factory.first_steps(compiled, homes, mesh, rng)
    store.scaler = _scaler(first_plan)
    with rt.naming_failures(timeout_s):
        load_weights(root, store, seed, init, timeout_s)

    def specialize(key: rt.ProgramKey, batch: Any) -> rt.StepProgram:
        return factory.specialize(key, batch, mesh, rng, store)

    world = factory.world()
    pm = rt.ParallelModule(
        store,
        mesh,
        rng,
        specialize,
        flags=factory.flags,
        world=factory.world,
        registered=factory.registered,
        programs={
            rt.ProgramKey(step.name, True, rt.signature(step.batch), world): programs[step.name]
            for step in factory.steps.values()
        },
        steps=tuple(factory.steps),
        check_batches=check_batches,
        names=list(root.state_dict()),
        attributes=attributes_of(root),
        recorder=factory.recorder,
        timeout_s=timeout_s,
        about=trace_labels(first_plan),
        title=_title(root, first_plan),
    )
    factory.notice = claim(root, pm)
    return pm


def _recorder(
    record: bool | Literal["paused"], mesh: rt.ProcessMesh, device: torch.device
) -> rt.Recorder | None:
    if not record:
        return None
    return rt.Recorder(mesh.ranks[mesh.rank], enabled=record != "paused", device=device)


def _title(model: nn.Module, plan: Plan) -> str:
    numel = sum(parameter.numel() for parameter in model.parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())
    return (
        f"{plan.model}, {numel:,} elements of parameters ({format_bytes(size)}), "
        f"plan {plan.name} on {plan.mesh} of {plan.num_ranks} ranks"
    )


def trace_labels(plan: Plan) -> dict[str, str]:
    """What a trace says of the plan that it was recorded with."""
    return {
        "model": plan.model,
        "fingerprint": plan.fingerprint,
        "plan": plan.with_(seed=0).digest,
    }


def derive_for(plan: Plan) -> Derive | None:
    """How programs of messages follow from the plan's trees, which are checked first."""
    if not plan.collectives:
        return None
    from shardwise.collectives.solver.derive import derive, verify

    for choice in plan.collectives:
        verify(choice)
    return derive


def _scaler(plan: Plan) -> rt.LossScaler | None:
    scale = plan.precision.loss_scale
    if not scale:
        return None
    if scale != "dynamic":
        return rt.LossScaler.static(float(scale))
    # The gradient of a loss in float16 is the scale itself, which must fit.
    return rt.LossScaler(2.0**16 if plan.precision.autocast else 2.0**15)


class _Factory:
    """Captures, compiles and builds programs of one model for batches as they come."""

    steps: dict[str, StepSpec]
    flags: rt.TrainedFlags | None = None  # once there are parameters to train
    notice: Notice | None = None  # once there is a parallel module

    def __init__(self, model: nn.Module, device: Any, timeout_s: float, compiled: bool) -> None:
        self.skeleton = skeleton(model)
        self.registered = rt.RegisteredHooks()
        self.state, self.reads = PythonState(model, self.registered), Reads()
        self._captured = 0  # the state of Python that the skeleton has
        self.originals = {name: weakref.ref(p) for name, p in model.named_parameters()}
        self.training = model.training
        self.timeout_s = timeout_s
        self.device = torch.device(device) if device is not None else _device_of(model)
        self.compiled = compiled
        self.recorder: rt.Recorder | None = None
        self.graphs: dict[Hashable, GraphsBySize] = {}
        self.layouts: defaultdict[str, LayoutsBySize] = defaultdict(LayoutsBySize)
        self.fixed: dict[str, Plan] = {}  # the plan of each step with every parameter's layout
        self.stages: dict[str, StagePlacement] = {}

    @property
    def plan(self) -> Plan:
        """What holds for all steps: mesh, types, random numbers."""
        return next(iter(self.steps.values())).plan

    def world(self) -> Hashable:
        """Everything outside the batch that captured programs depend on, in a form to compare."""
        if self.notice is not None:
            self.notice()
        frozen = self.flags.frozen() if self.flags is not None else ()
        return (frozen, self.state.number())

    def compile(
        self, step: StepSpec, batch: Any, training: bool, *, first: bool = False
    ) -> tuple[Graph, Program | PipelineProgram]:
        plan = step.plan
        graph = capture_for_plan(
            self.skeleton,
            batch,
            plan,
            step.objective,
            training=training,
            device=self.device,
            reads=self.reads,
            graphs=self._graphs_of(step.name),
        )
        self.state.add(self.reads)
        layouts = self.layouts[step.name]
        if first and len(self.steps) == 1:
            return graph, compile(graph, plan_for_first(graph, plan, self.skeleton))
        if first:
            return graph, layouts.compile(graph, plan_for_graph(graph, plan))
        # Other parameters may be frozen than when the plan was made.
        named = {"fingerprint": model_fingerprint(graph)}
        fixed = self.fixed[step.name].with_(**named)
        # What the plan leaves open is searched for this batch alone where parameters come out as
        # they are stored, so that a program does not depend on which batch was the first.
        staged = self.stages[step.name].apply(graph, plan.with_(**named))
        program = layouts.compile(graph, plan_for_graph(graph, staged))
        if not is_stored_as(program, fixed):
            staged = fixed.with_(stages=staged.stages)
            program = layouts.compile(graph, plan_for_graph(graph, staged))
        return graph, program

    def _graphs_of(self, step: str) -> GraphsBySize | None:
        """The traces of a step in the present world, unless its effects depend on sizes."""
        if getattr(self.skeleton, "captured_for_every_size", False):
            return None
        return self.graphs.setdefault((step, self.world()), GraphsBySize())

    def fix_layouts(
        self, programs: Mapping[str, Program | PipelineProgram], homes: Mapping[str, str]
    ) -> None:
        """Let programs for other batches take parameters as the first programs store them."""
        for name, step in self.steps.items():
            self.fixed[name] = plan_for_others(step.plan, programs, homes)
            self.stages[name] = StagePlacement(programs[name])

    def mesh(self) -> rt.ProcessMesh:
        """This rank's mesh, with a process group for every combination of axes that may talk."""
        stages = {stage.ranks: dict(stage.mesh.axes) for stage in self.plan.all_stages}
        return rt.process_meshes(
            list(stages.items()),
            timeout_s=self.timeout_s,
            num_microbatches=self.plan.num_microbatches,
            timed=self.plan.splits_time,
            choices=self.plan.collectives,
            derive=derive_for(self.plan),
        )

    def first_steps(
        self,
        compiled: Mapping[str, tuple[Graph, Program | PipelineProgram]],
        homes: Mapping[str, str],
        mesh: rt.ProcessMesh,
        rng: rt.Rng,
    ) -> tuple[rt.ParameterStore, dict[str, rt.StepProgram]]:
        """Memory for this rank's parameters, and the programs that use it."""
        loaded = {
            name: self._load(graph, program, mesh, rng)
            for name, (graph, program) in compiled.items()
        }
        order = {name: place for place, name in enumerate(homes)}
        held = [
            spec
            for step, each in loaded.items()
            for spec in each.parameters
            if homes[spec.name] == step
        ]
        held.sort(key=lambda spec: order[spec.name])
        held = stored_specs(held, self.plan, mesh.axes)
        store = make_store(list(loaded.values()), held, mesh, self.device)
        self.flags = rt.TrainedFlags(store, self.originals)
        world = self.world()
        for name, each in loaded.items():
            key = rt.ProgramKey(name, True, rt.signature(self.steps[name].batch), world)
            store.reducer.declare(key, each.parameters)
        return store, {
            name: self._step(self.steps[name], compiled[name][0], each, mesh, store)
            for name, each in loaded.items()
        }

    def specialize(
        self,
        key: rt.ProgramKey,
        batch: Any,
        mesh: rt.ProcessMesh,
        rng: rt.Rng,
        store: rt.ParameterStore,
    ) -> rt.StepProgram:
        """A program for another batch, mode or world over the same parameters."""
        step = self.steps[key.step]
        with starting(self.timeout_s, self._reason()) as agree:
            self._take_state()
            graph, program = self.compile(step, batch, key.training)
            agree(program.fingerprint, constants_of(graph))
        loaded = self._load(graph, program, mesh, rng)
        same_storage(store, loaded.parameters, used_parameters(graph))
        if key.training:
            _unfreeze(store, loaded.parameters, trained_parameters(graph))
        loaded.attach(store)
        store.reducer.declare(key, loaded.parameters)
        return self._step(step, graph, loaded, mesh, store)

    def _reason(self) -> str:
        """Say why a new program is needed."""
        if self.state.number() != self._captured:
            return f"{self.state.last_change} changed"
        return "for another kind of batch, mode or frozen parameters"

    def _take_state(self) -> None:
        """Let the next captures be of the model as it is now, with the same parameters frozen."""
        number = self.state.number()
        # Also if no program depends on what has changed so far: the next one may.
        self.skeleton = self.state.skeleton(self.skeleton, is_changed=number != self._captured)
        self._captured = number
        frozen = self.flags.frozen() if self.flags is not None else ()
        for name, parameter in self.skeleton.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def _load(
        self, graph: Graph, program: Program | PipelineProgram, mesh: rt.ProcessMesh, rng: rt.Rng
    ) -> LoadedModule | LoadedPipeline:
        if isinstance(program, PipelineProgram):
            return LoadedPipeline(program.text, graph, mesh, rng, self.device)
        return LoadedModule(program.source(mesh.rank), graph, mesh, rng, self.device)

    def _step(
        self,
        step: StepSpec,
        graph: Graph,
        loaded: LoadedModule | LoadedPipeline,
        mesh: rt.ProcessMesh,
        store: rt.ParameterStore,
    ) -> rt.StepProgram:
        options = step_options(graph, step.plan)
        if isinstance(loaded, LoadedPipeline):
            return PipelineStep(loaded, store, options, self.recorder)
        run = torch.compile(loaded.module) if self.compiled else loaded.module
        return ModuleStep(loaded, run, mesh, self.device, options, self.recorder)


def _unfreeze(
    store: rt.ParameterStore, specs: Iterable[rt.ParameterSpec], trained: Collection[str]
) -> None:
    """Make what was frozen until now, and is trained in a new program, ready for it."""
    for spec in specs:
        if spec.name in trained and not store.entry(spec.name).spec.requires_grad:
            store.unfreeze(spec)


def _device_of(model: nn.Module) -> torch.device:
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    backend = dist.get_backend() if dist.is_initialized() else ""
    return torch.device("cuda" if "nccl" in backend else "cpu")
