"""Flatten a batch into tensors with paths, and rebuild calls and outputs from other tensors."""

import contextlib
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.errors import CaptureError

Path = tuple[str | int, ...]
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the model: the batch's leaves in order, their paths, and their nesting."""

    kind: str  # "keywords", "positions" or "single"
    leaves: tuple[Any, ...]
    paths: tuple[Path, ...]
    spec: Any  # pytree.TreeSpec of the batch

    @property
    def tensors(self) -> tuple[tuple[Path, torch.Tensor], ...]:
        """The batch's tensors with their paths."""
        pairs = zip(self.paths, self.leaves, strict=True)
        return tuple((path, leaf) for path, leaf in pairs if isinstance(leaf, torch.Tensor))

    @property
    def constants(self) -> tuple[tuple[Path, Any], ...]:
        """The batch's other leaves with their paths."""
        pairs = zip(self.paths, self.leaves, strict=True)
        return tuple((path, leaf) for path, leaf in pairs if not isinstance(leaf, torch.Tensor))

    def batch_with(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the batch with its tensors replaced, in order."""
        new = iter(tensors)
        leaves = [next(new) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def arguments(
        self, batch: Any, model: torch.nn.Module | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args, kwargs` of the call; with a model, only those that its forward takes.

        A loss function reads the full batch, so targets need not be inputs of the model.
        """
        args: tuple[Any, ...] = tuple(batch) if self.kind == "positions" else (batch,)
        if self.kind == "keywords":
            kwargs = dict(batch)
            return (), kwargs if model is None else _named(model, kwargs)
        return (args if model is None else args[: _positions(model)]), {}


def _positions(model: torch.nn.Module) -> int | None:
    """Return how many positional arguments forward takes; None for any number."""
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return sum(kind not in keyword for kind in kinds)


def _named(model: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that forward takes."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def read_batch(batch: Any) -> Call:
    """Flatten a batch: a dict of keyword arguments, a sequence of positional ones, or a tensor."""
    register_dataclasses(batch)
    tree: Any
    if isinstance(batch, Mapping):
        kind, tree = "keywords", dict(batch)
    elif isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        kind, tree = "positions", tuple(batch)
    else:
        kind, tree = "single", batch
    flat, spec = pytree.tree_flatten_with_path(tree)
    paths = tuple(_path(keys) or (0,) for keys, _ in flat)
    leaves = tuple(leaf for _, leaf in flat)
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise CaptureError(
                f"the batch's {path_name(path)} is a {type(leaf).__name__}",
                hint="pass tensors, numbers, strings, or containers and dataclasses of them",
            )
    return Call(kind=kind, leaves=leaves, paths=paths, spec=spec)


def flatten_batch(batch: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the batch's tensors by `Input.name`, and its other leaves by name.

    >>> flatten_batch({"x": torch.zeros(2), "n": 3})
    ({'x': tensor([0., 0.])}, {'n': 3})
    """
    call = read_batch(batch)
    tensors = {path_name(path): leaf for path, leaf in call.tensors}
    return tensors, {path_name(path): leaf for path, leaf in call.constants}


def path_name(path: Path) -> str:
    """Return a path as text: `batch.0` for `("batch", 0)`."""
    return ".".join(map(str, path))


def rebuild_output(spec: Any, leaves: Sequence[Any]) -> Any:
    """Put leaves into the structure of the model's output (ModelOutput, dataclass, tuple, dict)."""
    return pytree.tree_unflatten(list(leaves), spec)


def register_dataclasses(value: Any) -> None:
    """Register dataclasses inside `value` with pytree, so that they flatten by field."""
    if isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            register_dataclasses(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            with contextlib.suppress(ValueError):  # another thread registered it
                torch.export.register_dataclass(type(value))
        for field in dataclasses.fields(value):
            register_dataclasses(getattr(value, field.name))


def _path(keys: tuple[Any, ...]) -> Path:
    parts: list[str | int] = []
    for key in keys:
        if isinstance(key, pytree.SequenceKey):
            parts.append(key.idx)
        elif isinstance(key, pytree.GetAttrKey):
            parts.append(key.name)
        else:
            parts.append(key.key if isinstance(key.key, int) else str(key.key))
    return tuple(parts)
