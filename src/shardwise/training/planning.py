"""Load the objects that a config names, and make the cluster and the plan that it asks for."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.api.compile import capture
from shardwise.cluster import Cluster
from shardwise.cluster.presets import SUFFIXES, parse_cluster, preset_names
from shardwise.errors import ConfigError, RankError, did_you_mean, explaining, failed
from shardwise.ir import Graph
from shardwise.planner.options import option_names
from shardwise.planner.plan import plan as search
from shardwise.planner.strategies import find_strategy, strategy_names
from shardwise.plans import Plan, Precision, used_devices
from shardwise.training.config import Named, PlanConfig, TrainConfig

# ------------------------------------------------------------ names in a config
# A name is `package.module:function`, `file.py:function`, or the name of a class in torch. A file
# is searched beside the config, then in the current folder; it is the user's own program and is
# executed. A name without a colon is only looked up, never imported.

DEBUG = "shardwise --debug …"


def build(part: Any, key: str, base: Path | None = None) -> Any:
    """Return the object of a config's field; a named function or class is called."""
    if not isinstance(part, Named):
        return part
    target = load_object(part.name, key, base)
    if not callable(target) and not part.args:
        return target
    return make(target, resolved(part.args, key, base), key, part.name)


def load_function(part: Any, key: str, base: Path | None = None) -> Any:
    """Return a named function itself; if it has arguments, the result of calling it with them."""
    if not isinstance(part, Named):
        return part
    return build(part, key, base) if part.args else load_object(part.name, key, base)


def make(function: Callable[..., Any], args: Mapping[str, Any], key: str, name: str = "") -> Any:
    """Call a function after checking the arguments against its signature."""
    name = name or getattr(function, "__name__", str(function))
    if not callable(function):
        raise ConfigError(
            f"{name} is a {type(function).__name__}, which cannot be called", where=key
        )
    check_arguments(function, args, key, name)
    with explaining(lambda error: failed(ConfigError, f"{key}: {name}", error, DEBUG)):
        return function(**args)


def check_arguments(
    function: Callable[..., Any],
    args: Mapping[str, Any],
    key: str,
    name: str,
    num_positional: int = 0,
) -> None:
    """Raise an error for unknown or missing arguments, after some that are passed by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    parameters = list(signature.parameters.values())[num_positional:]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for argument in args:
            if argument not in named:
                raise ConfigError(
                    f"{name} has no argument {argument!r}{did_you_mean(argument, named)}",
                    where=f"{key}.args",
                    hint=", ".join(named) or "no arguments",
                )
    for parameter in parameters:
        is_required = parameter.name in named and parameter.default is parameter.empty
        if is_required and parameter.name not in args:
            raise ConfigError(
                f"{name} needs {parameter.name!r}",
                where=f"{key}.args",
                hint=f"{key}: {{name: {name}, args: {{{parameter.name}: …}}}}",
            )


def resolved(args: Mapping[str, Any], key: str, base: Path | None = None) -> dict[str, Any]:
    """Return the arguments with `{import: file.py:function}` replaced by the object it names."""
    return {
        name: load_object(value["import"], f"{key}.args.{name}", base)
        if isinstance(value, Mapping) and list(value) == ["import"]
        else value
        for name, value in args.items()
    }


def find_class(name: Any, module: ModuleType, key: str, base: Path | None = None) -> Any:
    """Return a class, given by its name in a module of torch, by its import path, or itself."""
    if not isinstance(name, str):
        return name
    if ":" in name:
        return load_object(name, key, base)
    classes = [n for n in dir(module) if inspect.isclass(getattr(module, n)) and n[0].isupper()]
    if name not in classes:
        same = [candidate for candidate in classes if candidate.lower() == name.lower()]
        raise ConfigError(
            f"no {name!r} in {module.__name__}{did_you_mean((same or [name])[0], classes)}",
            where=key,
            hint="your own classes are file.py:Class or package.module:Class",
        )
    return getattr(module, name)


def find_file(path: str, base: Path | None = None) -> Path:
    """Return the path beside the config if it exists there, or in the current folder."""
    beside = base / path if base is not None else Path(path)
    return beside if os.path.exists(beside) else Path(path)


def load_object(name: Any, key: str, base: Path | None = None) -> Any:
    """Return the object that `package.module:function` or `file.py:function` names."""
    module_name, colon, attribute = str(name).rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"{name!r} is not an import path",
            where=key,
            hint="file.py:function or package.module:function",
        )
    module = _load_module(module_name, key, base)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = did_you_mean(part, [n for n in dir(target) if not n.startswith("_")])
            raise ConfigError(f"{module_name} has no {part!r}{near}", where=key)
        target = getattr(target, part)
    return target


def module_is_missing(name: str) -> bool:
    """Return whether no module of this name is installed or in the current folder."""
    _extend_path(None)
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:
        return error.name is None or name.startswith(error.name)
    except (ImportError, ValueError, AttributeError):
        return False  # importing it raises an error that explains the problem


def _extend_path(base: Path | None) -> None:
    """Make the config's folder and the current one importable, as `python -m` does."""
    for folder in (Path.cwd(), base):
        if folder is not None and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def _load_module(name: str, key: str, base: Path | None) -> ModuleType:
    is_file = name.endswith(".py")
    path = find_file(name, base)
    if is_file and not os.path.isfile(path):
        folders = f"{base} and {Path.cwd()}" if base is not None else str(Path.cwd())
        raise ConfigError(f"no file {name} in {folders}", where=key)
    if not is_file and name.startswith("."):
        raise ConfigError(
            f"{name!r} is a relative import without a package",
            where=key,
            hint="package.module:function, with the package's name",
        )
    _extend_path(base)
    try:
        return _load_file(path.resolve()) if is_file else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if is_file or error.name is None or not name.startswith(error.name):
            raise failed(ConfigError, f"{key}: importing {name}", error, DEBUG) from error
        raise ConfigError(
            f"no module {error.name!r}",
            where=key,
            hint="pip install it, set PYTHONPATH, or name a file: file.py:function",
        ) from None
    except Exception as error:
        raise failed(ConfigError, f"{key}: importing {name}", error, DEBUG) from error


def _load_file(path: Path) -> ModuleType:
    """Return the module of a file, executed once; its folder becomes importable, as in a script."""
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # A file may have the name of another module, such as `random.py`, which must stay importable.
    if loaded is None:
        sys.modules[path.stem] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        if loaded is None:
            sys.modules.pop(path.stem, None)
        raise
    return module


# ------------------------------------------------------------ cluster and plan
@dataclass(frozen=True, kw_only=True)
class Planned:
    """A captured graph, its plan, and the cluster that the plan is for."""

    graph: Graph
    plan: Plan
    cluster: Cluster
    known_machines: bool  # the rates of the cluster are measured or from a preset, not assumed


def find_cluster(
    config: TrainConfig, ranks: int | None, device: str, base: Path | None, plan: Plan | None = None
) -> tuple[Cluster, bool]:
    """Return the cluster, and whether its rates are known rather than assumed.

    `ranks` is the number of started ranks, or None in a dry run; a `plan` may use fewer devices.
    """
    if config.cluster is None:
        return _local_cluster(ranks or 1, device)
    cluster = config.cluster
    if isinstance(cluster, str):
        is_file = Path(cluster).suffix in SUFFIXES
        cluster = parse_cluster(str(find_file(cluster, base)) if is_file else cluster)
    if not isinstance(cluster, Cluster):
        raise ConfigError(f"a {type(cluster).__name__} is not a cluster", where="cluster")
    if plan is not None:
        cluster = used_devices(plan, cluster)
    if ranks is not None and cluster.num_ranks != ranks:
        raise RankError(
            f"cluster {cluster.name} has {cluster.num_ranks} ranks, but {ranks} were started",
            hint=f"shardwise train … --ranks {cluster.num_ranks}, torchrun with as many processes, "
            "or no cluster for this machine; --dry-run evaluates clusters that are not available",
        )
    return cluster, True


def _local_cluster(ranks: int, device: str) -> tuple[Cluster, bool]:
    if device != "cuda" or not torch.cuda.is_available():
        return Cluster.local(ranks), False
    name = torch.cuda.get_device_name().lower()
    total = torch.cuda.get_device_properties(0).total_memory
    kinds = [kind for kind in preset_names() if kind.partition("-")[0] in name]
    if not kinds:
        return Cluster.local(ranks), False
    # Presets of one GPU differ in memory, such as the A100 with 40 and 80 GB.
    kind = min(kinds, key=lambda kind: abs(Cluster.preset(kind).device(0).memory_bytes - total))
    count = min(torch.cuda.device_count(), ranks)
    nodes, remainder = divmod(ranks, count)
    if remainder:
        nodes, count = 1, ranks
    return Cluster.preset(kind, nodes=nodes, devices_per_node=count), True


def make_planned(
    config: TrainConfig,
    model: nn.Module,
    batch: Any,
    loss_fn: Any,
    *,
    ranks: int | None,
    device: str,
    base: Path | None,
) -> Planned:
    """Capture the model and make the plan, the same one on every rank."""
    fixed = _fixed_plan(config.plan, base)
    if fixed is not None and ranks is None and config.cluster is None:
        ranks = fixed.num_ranks
    cluster, has_known_rates = find_cluster(config, ranks, device, base, fixed)
    if fixed is None:
        automatic = isinstance(config.plan, PlanConfig) and config.plan.name == "auto"
        if automatic and device != "cpu" and not has_known_rates:
            gpu = torch.cuda.get_device_name() if device == "cuda" else device
            raise ConfigError(
                f"plan: auto needs the rates of {gpu}, which has no preset",
                where="cluster",
                hint="shardwise profile --out cluster.yaml, then cluster: cluster.yaml; "
                "or plan: fsdp",
            )
        graph = capture(model, batch, loss_fn, precision=config.precision)
        plan = _new_plan(config, graph, cluster, base, started=ranks is not None)
        cluster = used_devices(plan, cluster)
    else:
        _require_same_settings(config, fixed)
        graph = capture(model, batch, loss_fn, plan=fixed)
        fixed.check(graph)
        plan = fixed
    if plan.num_ranks != cluster.num_ranks:
        raise RankError(
            f"the plan {plan.name!r} is for {plan.num_ranks} ranks, there are {cluster.num_ranks}",
            hint=f"shardwise train … --ranks {plan.num_ranks}, or plan: auto",
        )
    return Planned(graph=graph, plan=plan, cluster=cluster, known_machines=has_known_rates)


def check_plan_name(config: TrainConfig, base: Path | None) -> None:
    """Raise an error if there is no such plan, before a model is built for it."""
    plan, names = config.plan, ("auto", *strategy_names())
    if isinstance(plan, PlanConfig) and plan.name not in names and ":" not in plan.name:
        if plan.name.endswith(".json"):
            _fixed_plan(plan, base)
            return
        raise ConfigError(
            f"no strategy {plan.name!r}{did_you_mean(plan.name, names)}",
            where="plan",
            hint=f"{', '.join(names)}, plan.json, or file.py:function",
        )


def _fixed_plan(plan: Any, base: Path | None) -> Plan | None:
    """Return a plan that the config contains or whose file it names."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, PlanConfig) or not plan.name.endswith(".json"):
        return None
    if plan.args:
        raise ConfigError("a plan file takes no arguments", where="plan.args")
    path = find_file(plan.name, base)
    if not os.path.isfile(path):
        raise ConfigError(
            f"no plan {plan.name}", where="plan", hint="shardwise plan … -o plan.json"
        )
    return Plan.load(path)


def _require_same_settings(config: TrainConfig, plan: Plan) -> None:
    """Refuse settings of the config that contradict the plan."""
    checks: list[tuple[str, Any, bool]] = []
    if config.precision is not None:
        same = plan.precision == Precision.of(config.precision)
        checks.append(("precision", config.precision, same))
    if config.num_microbatches > 1:
        same = plan.num_microbatches == config.num_microbatches
        checks.append(("num_microbatches", config.num_microbatches, same))
    for field, value, same in checks:
        if not same:
            raise ConfigError(
                f"{field}: {value!r} differs from the plan's",
                where=field,
                hint=f"leave {field} out, or make the plan with it",
            )


def _new_plan(
    config: TrainConfig, graph: Graph, cluster: Cluster, base: Path | None, *, started: bool
) -> Plan:
    """Return the plan of the search, of a named strategy, or of the user's function.

    The search must use all processes that were already started.
    """
    requested: Any = config.plan
    if not isinstance(requested, PlanConfig):
        name = getattr(requested, "__name__", "plan")
        return _user_plan(requested, name, graph, cluster, {})
    if ":" in requested.name:
        function = load_object(requested.name, "plan", base)
        return _user_plan(function, requested.name, graph, cluster, dict(requested.args))
    args: dict[str, Any] = {"precision": config.precision}
    if config.num_microbatches > 1:
        args["num_microbatches"] = config.num_microbatches
    if requested.name == "auto":
        function = search
        args |= {"progress": False, **({"all_devices": True} if started else {})}
    else:
        function = find_strategy(requested.name)
        args["seed"] = config.seed
    args |= requested.args
    options = option_names(function)
    for name in args:
        if name not in options:
            raise ConfigError(
                f"{function.__name__} has no option {name!r}{did_you_mean(name, options)}",
                where="plan.args",
                hint=", ".join(options),
            )
    plan: Plan = function(graph, cluster, **args)
    return plan


def _user_plan(
    function: Any, name: str, graph: Graph, cluster: Cluster, args: dict[str, Any]
) -> Plan:
    plan = make(lambda **options: function(graph, cluster, **options), args, "plan", name)
    if not isinstance(plan, Plan):
        raise ConfigError(
            f"{name} returned a {type(plan).__name__}, not a Plan",
            where="plan",
            hint="def strategy(graph, cluster, **options) -> sw.Plan",
        )
    return plan
