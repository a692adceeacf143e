"""Plain attributes that a captured step changes: lists that grow, and what is refused.

`self.outputs.append(loss)` is done again after every run. Any other change of Python state would
happen once, when the step is captured, and never again; so it is an error.

Enters: a module before and after its step. Leaves: the growth of its lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import CaptureError

__all__ = ["growth", "snapshot"]

_OWN = ("_parameters", "_buffers", "_modules", "forward", "training")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
Path = tuple[Any, ...]


def snapshot(module: nn.Module) -> dict[Path, Any]:
    """What can be seen to change: containers and plain values, by their path."""
    found: dict[Path, Any] = {}
    for name, value in vars(module).items():
        if name not in _OWN and not isinstance(value, torch.Tensor | nn.Module):
            found.update(_walk((name,), value))
    return found


def growth(before: Mapping[Path, Any], module: nn.Module) -> Iterator[tuple[Path, list[Any]]]:
    """Paths of lists and the items that were appended to them."""
    after = snapshot(module)
    for path, new in after.items():
        old = before.get(path)
        if isinstance(new, _List) and isinstance(old, _List):
            same = all(a is b for a, b in zip(old.items, new.items, strict=False))
            if not same or len(new.items) < len(old.items):
                raise _changed(path)
            if len(new.items) > len(old.items):
                yield path, list(new.items[len(old.items) :])
        elif path not in before or not _same(old, new):
            raise _changed(path)
    for path in before:
        if path not in after:
            raise _changed(path)


class _List:
    def __init__(self, items: list[Any]) -> None:
        self.items = tuple(items)


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, list):
        yield path, _List(value)
    elif isinstance(value, dict):
        yield path, tuple(value)
        for key, item in value.items():
            yield from _walk((*path, key), item)
    else:
        yield path, value


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, _PLAIN) and isinstance(new, _PLAIN):
        return type(old) is type(new) and (old == new or old != old)
    if isinstance(old, tuple) and isinstance(new, tuple):
        return len(old) == len(new) and all(a is b or a == b for a, b in zip(old, new, strict=True))
    return old is new


def _changed(path: Path) -> CaptureError:
    place = f"self.{path[0]}" + "".join(f"[{key!r}]" for key in path[1:])
    return CaptureError(
        f"the step changes {place}; it is captured once, and would not change it again",
        hint="change it in on_train_batch_end, append to a list, or use register_buffer",
    )
