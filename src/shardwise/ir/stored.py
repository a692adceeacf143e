"""Convert a `Graph` to JSON and back.

Operators are stored by name and looked up among torch's own when a graph is read; numbers, dtypes,
references and trees have tagged forms. Nothing is imported or evaluated. Everything else (autograd
functions, hooks, operators of other libraries, large constants) raises `NotStorable`.
"""

import base64
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from shardwise.dtypes import dtype_name
from shardwise.errors import ShardwiseError
from shardwise.ir.graph import (
    Buffer,
    Constant,
    Graph,
    Input,
    Node,
    Parameter,
    Ref,
    TensorType,
    tensor_bytes,
    to_text,
)
from shardwise.ir.operators import operator

LARGEST_CONSTANT = 1 << 20  # bytes
_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_SOURCES: dict[str, type] = {"inputs": Input, "parameters": Parameter, "buffers": Buffer}
_PLAIN = ("name", "loss", "training", "warnings", "sends", "input_constants", "outputs")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class NotStorable(ShardwiseError):
    """The graph cannot be stored, or the file is not a stored graph."""


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Return JSON data from which an equal graph can be read, or raise `NotStorable`."""
    if graph.functions or graph.hooks or graph.guards:
        raise NotStorable("autograd functions and hooks live in one process, guards in one batch")
    data = {
        "fingerprint": graph.fingerprint,
        **{name: encode(getattr(graph, name)) for name in _PLAIN},
        "values": [[name, encode(kind)] for name, kind in graph.values.items()],
        **{k: [_fields(source) for source in getattr(graph, k)] for k in _SOURCES},
        "constants": [_encode_constant(constant) for constant in graph.constants],
        "nodes": [_fields(node) for node in graph.nodes],
        "module_classes": list(graph.module_classes.items()),
        "output_spec": _encode_spec(graph.output_spec),
    }
    read = graph_from_json(data)
    same_text = to_text(read) == to_text(graph)
    if read != graph or not same_text or repr(read.output_spec) != repr(graph.output_spec):
        raise NotStorable("the stored form of the graph is not complete")
    return data


def graph_from_json(data: Any) -> Graph:
    """Return the graph after checking it, or raise `NotStorable`."""
    try:
        fields: dict[str, Any] = {name: decode(data[name]) for name in _PLAIN}
        for kind, cls in _SOURCES.items():
            fields[kind] = tuple(_record(cls, source) for source in data[kind])
        graph = Graph(
            nodes=tuple(_record(Node, node) for node in data["nodes"]),
            values={name: decode(kind) for name, kind in data["values"]},
            constants=tuple(_decode_constant(*constant) for constant in data["constants"]),
            module_classes={str(path): str(name) for path, name in data["module_classes"]},
            output_spec=_decode_spec(data["output_spec"]),
            **fields,
        )
        graph.verify()
        _check(graph)
    except NotStorable:
        raise
    except Exception as error:  # a damaged or hostile file may raise anything
        raise NotStorable(f"not a stored graph: {type(error).__name__}") from error
    if graph.fingerprint != data["fingerprint"]:
        raise NotStorable("fingerprint mismatch: the stored graph was changed")
    return graph


def _check(graph: Graph) -> None:
    """Refuse names that are not identifiers, and operators that are not torch's."""
    if not all(_NAME.fullmatch(name) for name in graph.values):
        raise NotStorable("a value's name is not an identifier")
    for node in graph.nodes:
        known = isinstance(operator(node.op), torch._ops.OpOverload)
        ours = node.op == "shardwise.batch_norm.default"
        if not ours and not (known and node.op.startswith("aten.")):
            raise NotStorable(f"{node.op} is not one of torch's operators")


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields of a frozen record that differ from their defaults."""
    return {
        field.name: encode(getattr(record, field.name))
        for field in dataclasses.fields(record)
        if getattr(record, field.name) is not field.default
    }


def _record(cls: type, fields: Mapping[str, Any]) -> Any:
    return cls(**{name: decode(value) for name, value in fields.items()})


def encode(value: Any) -> Any:
    """Return JSON data for an argument of a node or a tensor type, or raise `NotStorable`."""
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if abs(value) < 1 << 53 else {"int": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) is tuple:
        return {"tuple": [encode(item) for item in value]}
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) is Ref:
        return {"ref": value.name}
    if type(value) is TensorType:
        return {"type": [list(value.shape), dtype_name(value.dtype), value.ragged]}
    if isinstance(value, _TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise NotStorable(f"a {type(value).__name__} has no stored form")


def decode(value: Any) -> Any:
    """Return the value that `encode` wrote."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "tuple":
        return tuple(decode(item) for item in content)
    if tag == "torch":
        return _torch(content)
    if tag == "type":
        shape, dtype, ragged = content
        return TensorType(tuple(map(int, shape)), _torch(dtype), ragged)
    decoders = {"int": int, "float": float, "ref": Ref, "device": torch.device}
    return decoders[tag](content)


def _torch(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _TORCH):
        raise NotStorable(f"{name} is not a dtype, layout or memory format")
    return value


def _encode_constant(constant: Constant) -> list[Any]:
    data = constant.data
    plain = type(data) is torch.Tensor and data.layout is torch.strided and data.is_contiguous()
    if not plain or data.device.type != "cpu" or data.nbytes > LARGEST_CONSTANT:
        raise NotStorable(f"constant {constant.value} is large, or not a plain tensor on the CPU")
    content = tensor_bytes(data)
    kind = TensorType(tuple(data.shape), data.dtype)
    return [constant.value, encode(kind), base64.b64encode(content).decode("ascii")]


def _decode_constant(value: str, type_: Any, content: str) -> Constant:
    kind = decode(type_)
    raw = np.frombuffer(base64.b64decode(content, validate=True), dtype=np.uint8)
    if len(raw) != kind.num_bytes:
        raise NotStorable(f"constant {value} has {len(raw)} bytes, not {kind.num_bytes}")
    flat = torch.from_numpy(raw.copy()).view(kind.dtype) if len(raw) else torch.empty(0)
    return Constant(value=value, data=flat.to(kind.dtype).view(kind.shape))


def _encode_spec(spec: Any) -> Any:
    """Encode how an output nests; its classes are found in pytree's registry when it is read."""
    if spec is None or spec.is_leaf():
        return None if spec is None else "leaf"
    context = list(spec.context) if isinstance(spec.context, list) else spec.context
    if not (context is None or (type(context) is list and {type(k) for k in context} <= {str})):
        raise NotStorable("an output's keys are not strings")
    return [qualified_name(spec.type), context, [_encode_spec(child) for child in spec.children()]]


def _decode_spec(data: Any) -> Any:
    if data is None or data == "leaf":
        return None if data is None else pytree.tree_structure(0)
    name, context, children = data
    cls = next((c for c in pytree.SUPPORTED_NODES if qualified_name(c) == name), None)
    if cls is None or cls.__module__.partition(".")[0] not in ("builtins", "transformers"):
        raise NotStorable(f"{name} is not a known output class")
    return pytree.TreeSpec(cls, context, [_decode_spec(child) for child in children])


def qualified_name(cls: type) -> str:
    """Return the name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"
