"""Keyword options that several functions share, with signatures that people and editors can read.

A function declares its shared options as `**options: Unpack[SomeTypedDict]`, which type checkers
and editors understand. `known_options` makes `inspect.signature` and `help` show each of them with
its type and default, and turns a misspelt option into a `PlanError` that names the nearest one.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, get_type_hints

from shardwise.errors import PlanError, did_you_mean
from shardwise.plans import ParameterEntry, Precision, Sync
from shardwise.schedules import Schedule
from shardwise.schema import Reader

P = ParamSpec("P")
R = TypeVar("R")
# Maps globs of parameters to a placement over tensor-parallel ranks ("0", "replicate"), to
# placements by mesh axis, to a synchronization, or to a plan's entry of all these and a ZeRO level.
Constraints = Mapping[str, str | Mapping[str, str] | Sync | ParameterEntry]


def constrained_entries(constraints: Constraints | None) -> dict[str, ParameterEntry]:
    """Return constraints as the entries of a plan.

    >>> constrained_entries({"head.*": "0"})
    {'head.*': ParameterEntry(layout={'tp': '0'}, zero=None, sync=None)}
    """
    if not isinstance(constraints or {}, Mapping):
        raise PlanError(
            f"constraints={constraints!r} does not map globs of parameters to shards",
            hint='constraints={"lm_head.*": "0"}',
        )
    return {str(glob): _entry(value) for glob, value in (constraints or {}).items()}


def _entry(value: Any) -> ParameterEntry:
    if isinstance(value, ParameterEntry):
        return value
    if isinstance(value, Sync):
        return ParameterEntry(sync=value)
    entry = value if isinstance(value, Mapping) else {"tp": value}
    if not entry.keys() & {"layout", "zero", "sync"}:  # in the form of plan files
        entry = {"layout": entry}
    layout = {str(axis): str(shard) for axis, shard in entry.get("layout", {}).items()}
    sync = Reader(PlanError, "constraints").read(Sync | None, entry.get("sync"), ("sync",))
    return ParameterEntry(layout=layout, zero=entry.get("zero"), sync=sync)


class CommonOptions(TypedDict, total=False):
    """Options of every named strategy; `sw.strategies.make_plan` explains them."""

    recompute: str | Sequence[str]
    precision: str | Precision | None
    offload: str | Sequence[str]
    per_microbatch: bool
    shares: Mapping[str, Sequence[int]] | None
    constraints: Constraints | None
    batch_dim: int | None
    sequence_dim: int | Mapping[str, int] | None
    sequence_parallel: bool
    attention: str
    rng: str
    seed: int


class PlanOptions(CommonOptions, total=False):
    """Options of a strategy that need not have stages."""

    num_microbatches: int
    schedule: str | Path | Schedule | None


class StageOptions(PlanOptions, total=False):
    """Options of a strategy that may have pipeline stages."""

    virtual_stages: int | None
    cuts: Sequence[str] | None


class FixedOptions(TypedDict, total=False):
    """Parts of a plan that the user decides; None leaves one to the search."""

    dp: int | None
    ep: int | None
    cp: int | None
    tp: int | None
    pp: int | None
    virtual_stages: int | None
    schedule: str | None
    num_microbatches: int | None
    zero: int | None
    recompute: str | None
    offload: str | Sequence[str] | None


class SearchOptions(FixedOptions, total=False):
    """Options of a search, for functions that search several times."""

    constraints: Constraints | None
    memory_gib: float | None
    precision: str | Precision | None


def known_options(
    place: str, defaults_of: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a public function; its options have the defaults of the function `defaults_of`."""
    defaults = {} if defaults_of is None else inspect.signature(defaults_of).parameters

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _full_signature(function, {n: p.default for n, p in defaults.items()})

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in signature.parameters:
                    options = option_names(checked)
                    raise PlanError(
                        f"{place.rpartition('.')[2]} has no option {name!r}"
                        f"{did_you_mean(name, options)}",
                        where=place,
                        hint=", ".join(options),
                    )
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def option_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of all keyword options of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _full_signature(function: Callable[..., Any], defaults: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature with each option of its TypedDict as a keyword parameter."""
    signature, types = inspect.signature(function), get_type_hints(function)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter.replace(annotation=types[parameter.name]))
            continue
        (options,) = types[parameter.name].__args__  # of Unpack[…]
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind
            )
            for name, kind in get_type_hints(options).items()
        ]
    return signature.replace(parameters=parameters, return_annotation=types["return"])
