"""The model that was named: its function is called, its graph captured in the wanted number types.

Enters: `MODULE.py:FUNCTION` or `package.module:FUNCTION`. Leaves: `Loaded`, and its `Graph`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import ConfigError, ShardwiseError, failed

if TYPE_CHECKING:
    from shardwise.ir import Graph
    from shardwise.plans import Plan

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE.py:FUNCTION",
        help="A function returning (model, batch) or (model, batch, loss_fn); "
        "also package.module:FUNCTION.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Perfetto = Annotated[
    Path | None,
    typer.Option("--perfetto", help="Output file: timelines for https://ui.perfetto.dev."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a target's function returned."""

    model: Any
    batch: Any
    loss_fn: Callable[[Any, Any], Any] | None = None


def load_target(target: str) -> Loaded:
    """Call the function that `path/module.py:function` or `package.module:function` names."""
    from shardwise.training.imports import load_object, module_is_missing

    module, separator, name = target.rpartition(":")
    if not separator or not name or not module or (os.sep in module and module[-3:] != ".py"):
        raise typer.BadParameter(
            f"{target!r} is not of the form MODULE.py:FUNCTION or package.module:FUNCTION"
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise typer.BadParameter(f"no file {module}")
    if not module.endswith(".py") and module_is_missing(module):
        raise typer.BadParameter(
            f"no module {module!r} here or installed; a file is named with its ending: "
            f"{module.replace('.', '/')}.py:{name}"
        )
    try:
        function = load_object(target, target)
    except ConfigError as error:
        if error.where != target:  # a fault in the user's own code
            raise
        raise typer.BadParameter(error.message) from error
    if not callable(function):
        raise typer.BadParameter(f"{name!r} in {module} is no function")
    try:
        result = function()
    except Exception as error:
        raise failed(ShardwiseError, target, error) from error
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise typer.BadParameter(
            f"{target} returned {type(result).__name__}, "
            "not (model, batch) or (model, batch, loss_fn)"
        )
    return Loaded(model=result[0], batch=result[1], loss_fn=result[2] if result[2:] else None)


def capture_target(
    target: str, *, precision: str | None = None, plan: Plan | None = None
) -> tuple[Loaded, Graph]:
    """Return the model and its graph, in the dtypes of `plan` or else of `precision`."""
    import shardwise

    shardwise.Precision.of(precision)  # refuse an unknown one before the model is built
    loaded = load_target(target)
    graph = shardwise.capture(
        loaded.model,
        loaded.batch,
        loaded.loss_fn,
        plan=plan,
        precision=None if plan is not None else precision,
    )
    return loaded, graph
