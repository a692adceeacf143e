"""`parallelize(model, batch, plan)`: run a model under a plan, on this rank of a running job."""

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardwise import runtime as rt
from shardwise.api.batches import LayoutsBySize, StagePlacement, plan_for_first, plan_for_graph
from shardwise.api.compile import PipelineProgram, Program, capture_for_plan, compile
from shardwise.api.originals import ChangeDetector, claim, refuse_claimed
from shardwise.api.steps import (
    Plans,
    StepSpec,
    check_storage,
    fix_layouts,
    has_fixed_layouts,
    load_program,
    make_step,
    read_steps,
    storage_owners,
    stored_specs,
    trained_parameters,
    used_parameters,
)
from shardwise.api.weights import Init, constant_checksums, load_weights
from shardwise.formatting import size as format_bytes
from shardwise.frontend import skeleton
from shardwise.frontend.objective import Model, StepFn, as_module
from shardwise.frontend.python_state import Reads
from shardwise.frontend.sizes import GraphsBySize
from shardwise.frontend.state_changes import PythonState, plain_attributes
from shardwise.ir import Graph
from shardwise.plans import Plan, model_fingerprint
from shardwise.runtime.collectives import Derive
from shardwise.runtime.compiled import Compile, check_mode
from shardwise.runtime.loader import make_store
from shardwise.runtime.memory import grow_segments
from shardwise.runtime.rendezvous import require_ranks, starting


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
    compile: Compile = False,
    check_batches: bool = True,
    record: bool | Literal["paused"] = False,
    timeout_s: float = 60.0,
) -> rt.ParallelModule:
    """Return this rank's part of `model` under `plan`.

    Every rank calls this with the same model, batch and plan. They agree on the program before the
    first collective; a rank that fails, is missing or has another program is named within
    `timeout_s` seconds. All ranks start with the weights of rank 0.

    A model on meta is initialized with `seed` by its modules (`reset_parameters`, `_init_weights`),
    or by `init`: `init=lambda: Model(config)` builds the model on rank 0, with the weights that it
    has on one device after `torch.manual_seed(seed)`; `init=function` sets the parameters of the
    module that is passed to it.

    With `compile`, the generated module runs under `torch.compile`: all of it, or with "blocks"
    each distinct repeated block once, which takes as long for 100 layers as for one. "cuda-graph"
    also replays the step's kernels, for models so small that launches limit them. With `record`,
    `pm.trace(path)` writes what every rank did when; "paused" starts with `pm.recorder.start()`.

    With `steps`, a mapping from names to functions `(modules, batch) -> loss`, one parallel module
    runs several steps over the same parameters: `pm.train_step(batch, step="d")`. `model` may then
    be a mapping from names to modules, which the functions read as `modules.G` or `modules["G"]`.
    `batch` is one example for all steps, or a mapping with exactly their names; `plan` is one plan
    for all, a mapping with their names, or a function that makes a plan from a step's graph.
    """
    with starting(timeout_s) as agree:
        root = as_module(model)
        refuse_claimed(root)
        if not root.training:
            warnings.warn(
                "the model is in eval mode, and pm.train_step computes in training mode, with "
                "dropout and batch statistics: call model.train() before sw.parallelize. Single "
                "modules that are in eval mode within a model in training mode stay in it",
                stacklevel=2,
            )
        factory = _Factory(root, device, timeout_s, compile)
        check_mode(compile, factory.device)
        factory.steps = read_steps(root, batch, plan, loss_fn, steps, factory.device)
        first_plan = factory.plan
        require_ranks(first_plan.num_ranks)
        programs = {
            name: factory.compile(step, step.batch, True, first=True)
            for name, step in factory.steps.items()
        }
        owners = storage_owners(programs)
        factory.fixed = {
            name: fix_layouts(step.plan, programs, owners) for name, step in factory.steps.items()
        }
        factory.stages = {name: StagePlacement(program) for name, program in programs.items()}
        agree(
            " ".join(program.fingerprint for program in programs.values()),
            {k: v for p in programs.values() for k, v in constant_checksums(p.graph).items()},
        )
    grow_segments(factory.device)
    if factory.device.type == "cpu":
        from shardwise.malloc_tuning import keep_heap

        keep_heap()
    mesh = process_mesh(factory.plan, timeout_s)
    if record:
        rank, enabled = mesh.ranks[mesh.rank], record != "paused"
        factory.recorder = rt.Recorder(rank, enabled=enabled, device=factory.device)
        mesh.note(factory.recorder)
    rng = rt.Rng(first_plan.seed, first_plan.rng, mesh)
    store, first_steps = factory.first_steps(programs, owners, mesh, rng)
    store.scaler = _scaler(first_plan)
    with rt.naming_failures(timeout_s):
        load_weights(root, store, seed, init, timeout_s)
    pm = rt.ParallelModule(
        store,
        mesh,
        rng,
        lambda key, batch: factory.specialize(key, batch, rng, store),
        flags=factory.flags,
        world=factory.world,
        registered=factory.registered,
        programs=first_steps,
        steps=tuple(factory.steps),
        check_batches=check_batches,
        names=list(root.state_dict()),
        attributes=plain_attributes(root),
        recorder=factory.recorder,
        timeout_s=timeout_s,
        about=trace_labels(first_plan),
        title=_title(root, first_plan),
    )
    factory.detect_changes = claim(root, pm)
    return pm


def _title(model: nn.Module, plan: Plan) -> str:
    numel = sum(parameter.numel() for parameter in model.parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())
    return (
        f"{plan.model}, {numel:,} elements of parameters ({format_bytes(size)}), "
        f"plan {plan.name} on {plan.mesh} of {plan.num_ranks} ranks"
    )


def trace_labels(plan: Plan) -> dict[str, str]:
    """Return the labels of a trace: the model and the plan that it was recorded with."""
    return {"model": plan.model, "fingerprint": plan.fingerprint, "plan": plan.with_(seed=0).digest}


def derive_for(plan: Plan) -> Derive | None:
    """Return the function that derives messages from the plan's trees, after checking these."""
    if not plan.collectives:
        return None
    from shardwise.collectives.solver.derive import derive, verify

    for choice in plan.collectives:
        verify(choice)
    return derive


def process_mesh(plan: Plan, timeout_s: float) -> rt.ProcessMesh:
    """Return this rank's mesh, with a process group for every combination of its axes."""
    stages = {stage.ranks: dict(stage.mesh.axes) for stage in plan.all_stages}
    return rt.process_meshes(
        list(stages.items()),
        timeout_s=timeout_s,
        num_microbatches=plan.num_microbatches,
        timed=plan.splits_time,
        choices=plan.collectives,
        derive=derive_for(plan),
    )


def _scaler(plan: Plan) -> rt.LossScaler | None:
    scale = plan.precision.loss_scale
    if not scale:
        return None
    if scale != "dynamic":
        return rt.LossScaler.static(float(scale))
    # The gradient of a loss in float16 is the scale itself, which must fit.
    return rt.LossScaler(2.0**16 if plan.precision.autocast else 2.0**15)


class _Factory:
    """Capture, compile and load the programs of one model for batches as they come."""

    steps: dict[str, StepSpec]
    flags: rt.TrainedFlags | None = None  # set once parameters are stored
    detect_changes: ChangeDetector | None = None  # set once there is a parallel module
    recorder: rt.Recorder | None = None

    def __init__(self, model: nn.Module, device: Any, timeout_s: float, compiled: Compile) -> None:
        self.skeleton = skeleton(model)
        self.registered = rt.RegisteredHooks()
        self.state, self.reads = PythonState(model, self.registered), Reads()
        self._captured = 0  # number of the Python state in which the skeleton was copied
        self.originals = {name: weakref.ref(p) for name, p in model.named_parameters()}
        self.timeout_s = timeout_s
        self.device = torch.device(device) if device is not None else _device_of(model)
        self.compiled = compiled
        self.buffers: Mapping[str, torch.Tensor] = dict(model.named_buffers())
        self.graphs: defaultdict[Hashable, GraphsBySize] = defaultdict(GraphsBySize)
        self.layouts: defaultdict[str, LayoutsBySize] = defaultdict(LayoutsBySize)
        self.stages: dict[str, StagePlacement] = {}
        self.fixed: dict[str, Plan] = {}  # the plan of each step with every parameter's layout

    @property
    def plan(self) -> Plan:
        """The first step's plan, whose mesh, dtypes and random numbers all steps share."""
        return next(iter(self.steps.values())).plan

    def world(self) -> Hashable:
        """Return everything outside the batch that captured programs depend on, to compare."""
        if self.detect_changes is not None:
            self.detect_changes()
        frozen = self.flags.frozen() if self.flags is not None else ()
        return (frozen, self.state.number())

    def compile(
        self, step: StepSpec, batch: Any, training: bool, *, first: bool = False
    ) -> Program | PipelineProgram:
        """Capture and compile a step for a batch; `first` if no parameters are stored yet."""
        plan, layouts = step.plan, self.layouts[step.name]
        # An integration's model may change its state by the sizes of the batch.
        separate = getattr(self.skeleton, "captured_for_every_size", False)
        graph = capture_for_plan(
            self.skeleton,
            batch,
            plan,
            step.objective,
            training=training,
            device=self.device,
            reads=self.reads,
            buffers=self.buffers,
            graphs=None if separate else self.graphs[step.name, self.world()],
        )
        self.state.add(self.reads)
        if first and len(self.steps) == 1:
            return compile(graph, plan_for_first(graph, plan, self.skeleton))
        if first:
            return layouts.compile(graph, plan_for_graph(graph, plan))
        # Other parameters may be frozen than when the plan was made.
        fingerprint = model_fingerprint(graph)
        fixed = self.fixed[step.name].with_(fingerprint=fingerprint)
        # First try the plan as it is, so that a program does not depend on which batch came first.
        # Only if parameters would not come out as they are stored, fix their layouts.
        staged = self.stages[step.name].apply(graph, plan.with_(fingerprint=fingerprint))
        program = layouts.compile(graph, plan_for_graph(graph, staged))
        if not has_fixed_layouts(program, fixed):
            staged = fixed.with_(stages=staged.stages)
            program = layouts.compile(graph, plan_for_graph(graph, staged))
        return program

    def first_steps(
        self,
        programs: Mapping[str, Program | PipelineProgram],
        owners: Mapping[str, str],
        mesh: rt.ProcessMesh,
        rng: rt.Rng,
    ) -> tuple[rt.ParameterStore, dict[rt.ProgramKey, rt.StepProgram]]:
        """Allocate this rank's parameters, and return them with the steps that use them."""
        loaded = {n: load_program(p, mesh, rng, self.device) for n, p in programs.items()}
        order = {name: index for index, name in enumerate(owners)}
        specs = [
            spec
            for step, program in loaded.items()
            for spec in program.parameters
            if owners[spec.name] == step
        ]
        specs.sort(key=lambda spec: order[spec.name])
        specs = stored_specs(specs, self.plan, mesh.axes)
        store = make_store(list(loaded.values()), specs, mesh, self.device)
        self.flags, self.buffers = rt.TrainedFlags(store, self.originals), store.buffers
        world = self.world()
        steps = {}
        for name, program in loaded.items():
            spec, graph = self.steps[name], programs[name].graph
            key = rt.ProgramKey(name, True, rt.signature(spec.batch), world)
            store.reducer.declare(key, program.parameters)
            steps[key] = self._step(program, graph, spec.plan, store)
        return store, steps

    def specialize(
        self, key: rt.ProgramKey, batch: Any, rng: rt.Rng, store: rt.ParameterStore
    ) -> rt.StepProgram:
        """Return a step for another batch, mode or world over the same parameters."""
        step = self.steps[key.step]
        reason = "for another kind of batch, mode or frozen parameters"
        if key.variant:
            reason = "Python looks at a value of the batch that has changed"
        if self.state.number() != self._captured:
            reason = f"{self.state.last_change} changed"
        with starting(self.timeout_s, reason) as agree:
            self._copy_state()
            program = self.compile(step, batch, key.training)
            loaded = load_program(program, store.mesh, rng, self.device)
            check_storage(store, loaded.parameters, used_parameters(program.graph))
            agree(program.fingerprint, constant_checksums(program.graph))
        if key.training:
            trained = trained_parameters(program.graph)
            for spec in loaded.parameters:
                if spec.name in trained and not store.entry(spec.name).spec.requires_grad:
                    store.unfreeze(spec)
        loaded.attach(store)
        store.reducer.declare(key, loaded.parameters)
        return self._step(loaded, program.graph, step.plan, store)

    def _copy_state(self) -> None:
        """Copy the model as it is now for the next captures, with the same parameters frozen."""
        number = self.state.number()
        # Also if no program depends on what has changed so far: the next one may.
        self.skeleton = self.state.skeleton(self.skeleton, is_changed=number != self._captured)
        self._captured = number
        frozen = self.flags.frozen() if self.flags is not None else ()
        for name, parameter in self.skeleton.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def _step(
        self, loaded: Any, graph: Graph, plan: Plan, store: rt.ParameterStore
    ) -> rt.StepProgram:
        return make_step(loaded, graph, plan, store, compiled=self.compiled, recorder=self.recorder)


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of the model, if the default process group can communicate from it."""
    backends = dist.get_backend_config() if dist.is_initialized() else "cpu:none"
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and (tensor.device.type != "cpu" or "cpu:" in backends):
            return tensor.device
    is_host = not dist.is_initialized() or str(dist.get_backend()) == "gloo"
    accelerator = None if is_host else torch.accelerator.current_accelerator(check_available=True)
    return accelerator or torch.device("cpu")
