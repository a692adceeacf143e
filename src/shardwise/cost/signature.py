"""A local call as a key: what its cost depends on, and nothing else.

Enters: the parts of a `Step` with local types. Leaves: `Signature`, hashable, and its text, by
which measured times are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.ir import Ref, TensorType, format_arg
from shardwise.sharding.rule import MeshAxis

_IGNORED = frozenset({"key"})  # names the source of random numbers


class Signature:
    """One local call; equal calls of other layers are equal."""

    __slots__ = (
        "_hash",
        "args",
        "autocast",
        "device",
        "firsts",
        "function",
        "grads",
        "key",
        "kwargs",
        "op",
        "parameters",
        "results",
        "strides",
        "types",
    )

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    firsts: tuple[int, ...]  # for every operand, the first one that is the same value
    types: tuple[TensorType, ...]
    grads: frozenset[int]
    parameters: frozenset[int]
    results: tuple[TensorType, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    autocast: tuple[str, torch.dtype, bool] | None
    function: Callable[..., Any] | None
    device: str  # "cuda" or "cpu": some operators are one kernel there, several here
    key: tuple[Any, ...]
    _hash: int

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self.key == other.key

    def __str__(self) -> str:
        """`aten.add.Tensor(float32[4, 8], float32[8]) grads 0,1 parameters 1`."""
        count = iter(range(len(self.firsts)))
        given = [_text(a, self, count) for a in self.args]
        given += [f"{k}={_text(v, self, count)}" for k, v in self.kwargs]
        text = f"{self.op}({', '.join(given)})"
        for name, places in (("grads", self.grads), ("parameters", self.parameters)):
            if places:
                text += f" {name} {','.join(map(str, sorted(places)))}"
        if any(self.strides):
            text += f" strides {format_arg(self.strides)}"
        if self.autocast is not None:
            text += f" autocast {format_arg(self.autocast)}"
        return text


def call_signature(
    op: str,
    args: tuple[Any, ...],
    kwargs: Sequence[tuple[str, Any]] = (),
    types: Sequence[TensorType] = (),
    grads: frozenset[int] = frozenset(),
    parameters: frozenset[int] = frozenset(),
    *,
    results: Sequence[TensorType] = (),
    strides: Sequence[tuple[int, ...] | None] = (),
    autocast: tuple[str, torch.dtype, bool] | None = None,
    function: Callable[..., Any] | None = None,
    device: str = "cuda",
) -> Signature:
    """The signature of a call; operands with the same name are one tensor.

    `types`, `grads` and `parameters` go by the positions of `Ref`s in `args` and `kwargs`, repeats
    kept. `results` are the local types of the results where they are known, which a draw of random
    numbers and a call that cannot be tried need; `strides` those of operands that are not
    contiguous. `function` runs an `op` that is not registered. `device` is the kind of device.
    """
    found = Signature()
    found.op, found.args = op, args
    pairs = kwargs if isinstance(kwargs, tuple) else tuple(kwargs)
    if pairs and op.startswith("rt."):
        pairs = tuple(pair for pair in pairs if pair[0] not in _IGNORED)
    found.kwargs = pairs
    names: dict[str, int] = {}
    firsts: list[int] = []
    frozen = _freeze(args, names, firsts), _freeze(pairs, names, firsts)
    if len(firsts) != len(types):
        raise ValueError(f"{op} has {len(firsts)} tensor operands, {len(types)} types were given")
    found.firsts, found.types = tuple(firsts), tuple(types)
    found.grads, found.parameters = grads, parameters & grads
    found.results = tuple(results)
    found.strides = tuple(strides) if strides else (None,) * len(firsts)
    found.autocast, found.function, found.device = autocast, function, device
    key = (op, frozen, found.firsts, found.types, found.grads, found.parameters, found.results)
    found.key = (*key, found.strides, autocast, function, device)
    found._hash = hash(found.key)
    return found


def _freeze(arg: Any, names: dict[str, int], firsts: list[int]) -> Any:
    """Hashable, without names; 1, 1.0 and True stay apart."""
    if isinstance(arg, Ref):
        firsts.append(names.setdefault(arg.name, len(firsts)))
        return Ref
    if isinstance(arg, tuple | list):
        return tuple([_freeze(item, names, firsts) for item in arg])
    if isinstance(arg, float | bool | complex):
        return (type(arg), repr(arg))
    return arg


def _text(arg: Any, signature: Signature, count: Any) -> str:
    if isinstance(arg, Ref):
        position = next(count)
        first = signature.firsts[position]
        kind = str(signature.types[position])
        return kind if first == position else f"{kind}=%{first}"
    if isinstance(arg, tuple | list):
        return "[" + ", ".join(_text(item, signature, count) for item in arg) + "]"
    if isinstance(arg, MeshAxis):
        return ".".join(arg.names)
    return format_arg(arg)
