"""The last step: drop what nothing uses, name everything, assemble the `Graph`'s nodes.

Enters: raw nodes over temporary names. Leaves: `Node`s with readable, deterministic names.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.errors import CaptureError
from shardwise.frontend.builder import SYMBOLIC, UNKNOWN_SIZE, RawNode
from shardwise.frontend.cures import DATA_DEPENDENT, EXPERTS, cure_for_operator
from shardwise.ir import Node, Ref, TensorType, iter_refs, map_refs

_OF_ONE_TYPE = re.compile(
    r"aten\.(linear|mm|addmm|bmm|baddbmm|matmul|conv(_transpose)?[123]d|convolution)\."
)


class Namer:
    """Gives each value a Python identifier once: `linear`, `linear_1`, `sum_1`."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.counts: dict[str, int] = {}

    def name(self, wish: str) -> str:
        base = identifier(wish)
        count = self.counts.get(base, 0)
        reserved = keyword.iskeyword(base) or hasattr(builtins, base) or base in ("torch", "self")
        if count == 0 and not reserved and base not in self.taken:
            chosen = base
        else:
            chosen = f"{base}_{max(count, 1)}"
            while chosen in self.taken:
                count = max(count, 1) + 1
                chosen = f"{base}_{count}"
        self.counts[base] = max(count, 1) + (0 if chosen == base else 1)
        self.taken.add(chosen)
        return chosen


def identifier(wish: str) -> str:
    """Return the nearest Python identifier.

    >>> identifier("layers.0.weight"), identifier("0"), identifier("__and__")
    ('layers_0_weight', 'v_0', 'and')
    """
    base = re.sub(r"\W", "_", wish).strip("_") or "v"
    return f"v_{base}" if base[0].isdigit() else base


def live_nodes(nodes: list[RawNode], results: Iterable[str]) -> list[RawNode]:
    """Return the nodes that some result needs, in order."""
    needed = set(results)
    kept: list[RawNode] = []
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs):
            continue
        kept.append(node)
        needed.update(ref.name for ref in iter_refs(node.args))
        needed.update(ref.name for _, value in node.kwargs for ref in iter_refs(value))
    return kept[::-1]


def check_static(nodes: list[RawNode], types: Mapping[str, TensorType]) -> None:
    """Refuse graphs in which a size or a number depends on the data."""
    for node in nodes:
        unknown = any(UNKNOWN_SIZE in types[output].shape for output in node.outputs)
        if node.op == SYMBOLIC or unknown:
            what = node.args[0] if node.op == SYMBOLIC else node.op
            origin = node.region.origin
            cure = cure_for_operator(str(what)) or DATA_DEPENDENT
            experts = "expert" in f"{origin.module} {origin.module_class}".lower()
            raise CaptureError(
                f"{cure.reason} ({what})",
                where=f"{origin.source}: {origin.source_text}" if origin.source else None,
                hint=f"{EXPERTS} in transformers; else {cure.hint}" if experts else cure.hint,
            )


def check_dtypes(nodes: list[RawNode], types: Mapping[str, TensorType]) -> None:
    """Refuse products of different dtypes, which tracing allows and devices do not."""
    for node in nodes:
        autocast, origin = node.region.autocast, node.region.origin
        if not _OF_ONE_TYPE.match(node.op) or (autocast is not None and autocast[2]):
            continue
        used = dict.fromkeys(types[ref.name].dtype for ref in iter_refs(node.args))
        if len(used) > 1:
            raise CaptureError(
                f"{_short(node.op)} gets {' and '.join(map(str, used))}, but computes in one dtype",
                where=f"{origin.source}: {origin.source_text}" if origin.source else origin.module,
                hint="give the batch in the dtype of the model's parameters (tensor.to(dtype)), or "
                "convert it in forward",
            )


def finish_nodes(
    nodes: list[RawNode], types: Mapping[str, TensorType], names: dict[str, str], namer: Namer
) -> tuple[tuple[Node, ...], dict[str, TensorType]]:
    """Named nodes and the types of their outputs; `names` gets every new name."""
    done: list[Node] = []
    values: dict[str, TensorType] = {}
    for raw in nodes:
        name = namer.name(_short(raw.op))
        outputs: tuple[str, ...] = (name,)
        if len(raw.outputs) > 1:
            outputs = tuple(namer.name(f"{name}_out{i}") for i in range(len(raw.outputs)))
        args = map_refs(raw.args, lambda ref: Ref(names[ref.name]))
        kwargs = tuple((k, map_refs(v, lambda ref: Ref(names[ref.name]))) for k, v in raw.kwargs)
        for old, new in zip(raw.outputs, outputs, strict=True):
            names[old] = new
            values[new] = types[old]
        done.append(_node(raw, name, args, kwargs, outputs))
    return tuple(done), values


def _node(
    raw: RawNode, name: str, args: Any, kwargs: tuple[tuple[str, Any], ...], outputs: Any
) -> Node:
    region, origin = raw.region, raw.region.origin
    return Node(
        name=name,
        op=raw.op,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
        module=origin.module,
        module_class=origin.module_class,
        source=origin.source,
        source_text=origin.source_text,
        grad_enabled=region.grad_enabled,
        autocast=region.autocast,
        recompute=region.recompute,
    )


def _short(op: str) -> str:
    """`aten.layer_norm.default` -> `layer_norm`; `autograd_function.m.Swish` -> `Swish`."""
    if op.startswith("autograd_function."):
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", op.rsplit(".", 1)[-1]).lower()
    return op.split(".")[-2]
