"""The machines and the plan that a config asks for."""

from __future__ import annotations

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
from shardwise.cluster.presets import SUFFIXES, parse_cluster, preset, preset_names
from shardwise.errors import ConfigError, RankError, ShardwiseError, did_you_mean, failed
from shardwise.ir import Graph
from shardwise.planner.options import option_names
from shardwise.planner.plan import plan as search
from shardwise.planner.strategies import find_strategy, strategy_names
from shardwise.plans import Plan, Precision, used_devices
from shardwise.training.config import Named, PlanConfig, TrainConfig

__all__ = [
    "Planned",
    "build",
    "check_plan_name",
    "find_class",
    "find_cluster",
    "find_file",
    "load_function",
    "load_object",
    "make",
    "make_planned",
    "module_is_missing",
]


# What a config names: `package.module:function`, `file.py:function`, or a name of torch's own.
#
# A file is looked for beside the config, then in the current folder; its code is the user's own
# program, and runs. A name without a colon is looked up, never imported from anywhere.


DEBUG = "shardwise --debug …"


def build(part: Any, key: str, base: Path | None = None) -> Any:
    """The object that a config's field stands for: called, if it is named."""
    if not isinstance(part, Named):
        return part
    found = load_object(part.name, key, base)
    if not callable(found) and not part.args:
        return found
    return make(found, resolved(part.args, key, base), key, part.name)


def load_function(part: Any, key: str, base: Path | None = None) -> Any:
    """A function that is used, not called, when it is named; with arguments it is called first."""
    if not isinstance(part, Named):
        return part
    return build(part, key, base) if part.args else load_object(part.name, key, base)


def make(function: Callable[..., Any], args: Mapping[str, Any], key: str, name: str = "") -> Any:
    """Call with arguments that were checked against its signature first."""
    name = name or getattr(function, "__name__", str(function))
    if not callable(function):
        raise ConfigError(f"{name} is a {type(function).__name__}, nothing to call", where=key)
    check_arguments(function, args, key, name)
    try:
        return function(**args)
    except ShardwiseError:
        raise
    except Exception as error:
        raise failed(ConfigError, f"{key}: {name}", error, DEBUG) from error


def check_arguments(
    function: Callable[..., Any], args: Mapping[str, Any], key: str, name: str, given: int = 0
) -> None:
    """Say which argument is unknown or missing; the first `given` are passed by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    parameters = list(signature.parameters.values())[given:]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for argument in args:
            if argument not in named:
                near = did_you_mean(argument, named)
                raise ConfigError(
                    f"{name} has no argument {argument!r}{near}",
                    where=f"{key}.args",
                    hint=", ".join(named) or "no arguments",
                )
    for parameter in parameters:
        needed = parameter.name in named and parameter.default is parameter.empty
        if needed and parameter.name not in args:
            raise ConfigError(
                f"{name} needs {parameter.name!r}",
                where=f"{key}.args",
                hint=f"{key}: {{name: {name}, args: {{{parameter.name}: …}}}}",
            )


def resolved(args: Mapping[str, Any], key: str, base: Path | None = None) -> dict[str, Any]:
    """Arguments, with `{import: file.py:function}` as what it names."""
    return {
        name: load_object(value["import"], f"{key}.args.{name}", base)
        if isinstance(value, Mapping) and list(value) == ["import"]
        else value
        for name, value in args.items()
    }


def find_class(name: Any, module: ModuleType, key: str, base: Path | None = None) -> Any:
    """A class by its name in a module of torch, by import path, or itself."""
    if not isinstance(name, str):
        return name
    if ":" in name:
        return load_object(name, key, base)
    known = [n for n in dir(module) if inspect.isclass(getattr(module, n)) and n[0].isupper()]
    if name not in known:
        alike = [each for each in known if each.lower() == name.lower()]
        raise ConfigError(
            f"no {name!r} in {module.__name__}{did_you_mean((alike or [name])[0], known)}",
            where=key,
            hint="a class of your own is file.py:Class or package.module:Class",
        )
    return getattr(module, name)


def find_file(path: str, base: Path | None = None) -> Path:
    """A file beside the config, or in the current folder."""
    beside = base / path if base is not None else Path(path)
    return beside if os.path.exists(beside) else Path(path)


def load_object(name: Any, key: str, base: Path | None = None) -> Any:
    """What `package.module:function` or `file.py:function` names."""
    module_name, colon, attribute = str(name).rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"{name!r} names nothing", where=key, hint="file.py:function or package.module:function"
        )
    module = _load_module(module_name, key, base)
    found: Any = module
    for each in attribute.split("."):
        if not hasattr(found, each):
            near = did_you_mean(each, [n for n in dir(found) if not n.startswith("_")])
            raise ConfigError(f"{module_name} has no {each!r}{near}", where=key)
        found = getattr(found, each)
    return found


def module_is_missing(name: str) -> bool:
    """Return whether no module of this name can be found, here or installed."""
    _see_folders(None)
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError as error:
        return error.name is None or name.startswith(error.name)
    except (ImportError, ValueError, AttributeError):
        return False  # importing it says what is wrong


def _see_folders(base: Path | None) -> None:
    """Import from the config's folder and the current one first, as `python -m` does."""
    for folder in (Path.cwd(), base):
        if folder is not None and str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def _load_module(name: str, key: str, base: Path | None) -> ModuleType:
    is_file = name.endswith(".py")
    path = find_file(name, base)
    if is_file and not os.path.isfile(path):
        places = f"{base} and {Path.cwd()}" if base is not None else str(Path.cwd())
        raise ConfigError(f"no file {name} in {places}", where=key)
    if not is_file and name.startswith("."):
        raise ConfigError(
            f"{name!r} is a relative import without a package",
            where=key,
            hint="package.module:function, with the package's name",
        )
    _see_folders(base)
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
    """The module of a file, once; its folder can be imported from, as when it is run."""
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    # A file may be called as a module that is in use, such as `random.py`: that one stays.
    if known is None:
        sys.modules[path.stem] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        if known is None:
            sys.modules.pop(path.stem, None)
        raise
    return module


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What will run: the graph, its plan, and the machines it was made for."""

    graph: Graph
    plan: Plan
    cluster: Cluster
    known_machines: bool  # whether the cluster's rates are these machines'


def find_cluster(
    config: TrainConfig,
    ranks: int | None,
    device: str,
    base: Path | None,
    plan: Plan | None = None,
) -> tuple[Cluster, bool]:
    """The machines, and whether their rates are known rather than assumed.

    `ranks` are those that were started, None where nothing runs; a `plan` may use some of them.
    """
    if config.cluster is None:
        return _this_machine(ranks or 1, device)
    found = config.cluster
    if isinstance(found, str):
        is_file = Path(found).suffix in SUFFIXES
        found = parse_cluster(str(find_file(found, base)) if is_file else found)
    if not isinstance(found, Cluster):
        raise ConfigError(f"a {type(found).__name__} is no cluster", where="cluster")
    if plan is not None:
        found = used_devices(plan, found)
    if ranks is not None and found.num_ranks != ranks:
        raise RankError(
            f"cluster {found.name} has {found.num_ranks} ranks, {ranks} are started",
            hint=f"shardwise train … --ranks {found.num_ranks}, torchrun with as many processes, "
            "or no cluster for this machine; --dry-run judges machines that are not here",
        )
    return found, True


def _this_machine(ranks: int, device: str) -> tuple[Cluster, bool]:
    if device != "cuda" or not torch.cuda.is_available():
        return Cluster.local(ranks), False
    name = torch.cuda.get_device_name().lower()
    total = torch.cuda.get_device_properties(0).total_memory
    kinds = [kind for kind in preset_names() if kind.partition("-")[0] in name]
    sized = {kind: abs(preset(kind).device(0).memory_bytes - total) for kind in kinds}
    if not sized:
        return Cluster.local(ranks), False
    here = min(torch.cuda.device_count(), ranks)
    nodes, rest = divmod(ranks, here)
    shape = {"nodes": nodes, "devices_per_node": here} if not rest else {"devices_per_node": ranks}
    return preset(min(sized, key=lambda kind: sized[kind]), **shape), True


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
    """Capture the model and make the plan; every rank comes to the same one."""
    wanted = config.plan
    given = _given_plan(wanted, base)
    if given is not None and ranks is None and config.cluster is None:
        ranks = given.num_ranks
    cluster, known = find_cluster(config, ranks, device, base, given)
    if given is not None and config.precision is not None:
        _require(given.precision == Precision.of(config.precision), "precision", config.precision)
    if given is not None and config.num_microbatches > 1:
        _require(
            given.num_microbatches == config.num_microbatches,
            "num_microbatches",
            config.num_microbatches,
        )
    precision = config.precision if given is None else None
    graph = capture(model, batch, loss_fn, plan=given, precision=precision)
    if given is None:
        _require_known(config, known, device)
        plan = _made(config, graph, cluster, base, started=ranks is not None)
        cluster = used_devices(plan, cluster)
    else:
        given.check(graph)
        plan = given
    if plan.num_ranks != cluster.num_ranks:
        raise RankError(
            f"the plan {plan.name!r} is for {plan.num_ranks} ranks, there are {cluster.num_ranks}",
            hint=f"shardwise train … --ranks {plan.num_ranks}, or plan: auto",
        )
    return Planned(graph=graph, plan=plan, cluster=cluster, known_machines=known)


def check_plan_name(config: TrainConfig, base: Path | None) -> None:
    """Say that there is no such plan, before a model is built for it."""
    wanted, known = config.plan, ("auto", *strategy_names())
    if isinstance(wanted, PlanConfig) and wanted.name not in known and ":" not in wanted.name:
        if wanted.name.endswith(".json"):
            _given_plan(wanted, base)
            return
        raise ConfigError(
            f"no strategy {wanted.name!r}{did_you_mean(wanted.name, known)}",
            where="plan",
            hint=f"{', '.join(known)}, plan.json, or file.py:function",
        )


def _given_plan(wanted: Any, base: Path | None) -> Plan | None:
    if isinstance(wanted, Plan):
        return wanted
    if isinstance(wanted, PlanConfig) and wanted.name.endswith(".json"):
        if wanted.args:
            raise ConfigError("a plan's file takes no arguments", where="plan.args")
        path = find_file(wanted.name, base)
        if not os.path.isfile(path):
            raise ConfigError(
                f"no plan {wanted.name}", where="plan", hint="shardwise plan … -o plan.json"
            )
        return Plan.load(path)
    return None


def _require(same: bool, field: str, value: Any) -> None:
    if not same:
        raise ConfigError(
            f"{field}: {value!r} is not what the plan's file says",
            where=field,
            hint=f"leave {field} out, or make the plan with it",
        )


def _require_known(config: TrainConfig, known: bool, device: str) -> None:
    automatic = isinstance(config.plan, PlanConfig) and config.plan.name == "auto"
    if automatic and device == "cuda" and not known:
        raise ConfigError(
            f"plan: auto needs the rates of {torch.cuda.get_device_name()}, which has no preset",
            where="cluster",
            hint="shardwise profile --out cluster.yaml, then cluster: cluster.yaml; or plan: fsdp",
        )


def _made(
    config: TrainConfig, graph: Graph, cluster: Cluster, base: Path | None, *, started: bool
) -> Plan:
    """The plan of a search, of a named strategy, or of the user's own function.

    Processes that were started already are all used.
    """
    wanted: Any = config.plan
    if not isinstance(wanted, PlanConfig):
        return _own(wanted, getattr(wanted, "__name__", "plan"), graph, cluster, {})
    args = dict(wanted.args)
    if ":" in wanted.name:
        own = load_object(wanted.name, "plan", base)
        return _own(own, wanted.name, graph, cluster, args)
    if wanted.name == "auto":
        if config.num_microbatches > 1:
            args.setdefault("num_microbatches", config.num_microbatches)
        if started:
            args.setdefault("all_devices", True)
        return _called(
            search, {"progress": False, "precision": config.precision, **args}, graph, cluster
        )
    args = {"seed": config.seed, "precision": config.precision, **args}
    if config.num_microbatches > 1:
        args.setdefault("num_microbatches", config.num_microbatches)
    return _called(find_strategy(wanted.name), args, graph, cluster)


def _called(function: Any, args: Mapping[str, Any], graph: Graph, cluster: Cluster) -> Plan:
    known = option_names(function)
    for name in args:
        if name not in known:
            raise ConfigError(
                f"{function.__name__} has no option {name!r}{did_you_mean(name, known)}",
                where="plan.args",
                hint=", ".join(known),
            )
    found: Plan = function(graph, cluster, **args)
    return found


def _own(function: Any, name: str, graph: Graph, cluster: Cluster, args: dict[str, Any]) -> Plan:
    found = make(lambda **given: function(graph, cluster, **given), args, "plan", name)
    if not isinstance(found, Plan):
        raise ConfigError(
            f"{name} returned a {type(found).__name__}, not a Plan",
            where="plan",
            hint="def strategy(graph, cluster, **options) -> sw.Plan",
        )
    return found
