"""ONNX files as trainable modules.

`from_onnx` reads a file into an `OnnxModule`. Its forward pass runs the nodes of the file one after
the other, so `sw.capture` records them like the operators of any other model. A value is a tensor,
or a NumPy array if it is known without running the model: sizes, constants, and everything that is
computed from them. `onnx.reference` computes those, so that shape arithmetic leaves no trace in the
captured graph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.errors import CaptureError, ConfigError, did_you_mean
from shardwise.integrations.onnx import layers, recurrent, resize  # noqa: F401 - register operators
from shardwise.integrations.onnx.operators import OPERATORS, Call, Value
from shardwise.integrations.onnx.weights import weights_of
from shardwise.tensor_tree import add_tensor, tensor_named, tensor_of

try:
    import onnx
    from onnx import inliner, numpy_helper
    from onnx.reference import ReferenceEvaluator
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ConfigError(
        "sw.from_onnx needs the package onnx", hint="pip install 'shardwise[onnx]'"
    ) from error

OLDEST_OPSET = 13
MAX_HOST_ELEMENTS = 4096  # larger constants are buffers
MAX_BYTES_IN_FILE = 1 << 30  # larger models are saved with their weights in a file beside them


def from_onnx(path: str | Path, *, trainable: str | Sequence[str] | None = None) -> OnnxModule:
    """Read an ONNX file (opset 13 or later) as a trainable module.

    The module takes the file's inputs, by position or by name, and returns its output, or a tuple
    if it has several. Floating-point initializers that are weights are parameters, under their
    names in the file: not constants that an exporter added, nor masks, nor what PyTorch's exporter
    recorded as buffers. `trainable` gives globs of their names instead. The other initializers are
    buffers or constants.

    >>> module = sw.from_onnx("model.onnx")  # doctest: +SKIP
    >>> graph = sw.capture(module, {"image": images, "label": labels}, loss_fn)  # doctest: +SKIP
    """
    try:
        onnx.checker.check_model(str(path))
        model = onnx.load(str(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except Exception as error:  # protobuf and the checker have several kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path} is not a valid ONNX file: {reason}") from None
    globs = (trainable,) if isinstance(trainable, str) else trainable
    return OnnxModule(_with_own_state(_inlined(model)), str(path), globs)


def _inlined(model: Any) -> Any:
    """Replace calls of functions by their bodies: the file's own, and ONNX's where we have none."""
    model = inliner.inline_local_functions(model)
    unknown = {n.op_type for n in model.graph.node if n.domain == ""} - OPERATORS.keys()
    if not unknown:
        return model
    chosen = [("", name) for name in sorted(unknown)]
    try:  # some bodies depend on the types of their inputs
        typed = onnx.shape_inference.infer_shapes(model)
        return inliner.inline_selected_functions(typed, chosen, inline_schema_functions=True)
    except RuntimeError:
        return model  # the operator is reported as unsupported


def _with_own_state(model: Any) -> Any:
    """Give statistics of batch norm initializers of their own.

    Exporters write equal arrays once: zeros that are both a bias, which is trained, and a mean.
    """
    arrays = {i.name: i for i in model.graph.initializer}
    uses = Counter(name for node in model.graph.node for name in node.input)
    copies = {n.output[0]: n for n in model.graph.node if n.op_type == "Identity"}
    for node in [n for n in model.graph.node if n.op_type == "BatchNormalization"]:
        for position in (3, 4):
            name = node.input[position]
            copy = copies.get(name)
            source = name if copy is None else copy.input[0]
            if source in arrays and (copy is not None or uses[name] > 1):
                state = model.graph.initializer.add()
                state.CopyFrom(arrays[source])
                state.name = node.input[position] = f"{name}_{len(model.graph.initializer)}"
    return model


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the file, with its attributes read and its subgraphs prepared."""

    call: Call
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    proto: bytes


@dataclass(frozen=True, slots=True)
class _Body:
    """The nodes of a graph or subgraph in order."""

    nodes: tuple[_Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray[Any, Any]]


class OnnxModule(nn.Module):
    """The graph of an ONNX file as a module; see `from_onnx`."""

    is_graph_storable = False  # on disk: its digest would not cover the file

    def __init__(self, model: Any, source: str, trainable: Sequence[str] | None = None) -> None:
        super().__init__()
        self.source = source
        self._model = model
        self._opset = _opset(model, source)
        given = {i.name for i in model.graph.initializer}
        self._inputs = tuple(i.name for i in model.graph.input if i.name not in given)
        self._paths: dict[str, str] = {}  # initializer -> name of its parameter or buffer
        self._register(trainable)
        self._body = self._prepare(model.graph, skipped=frozenset(self._paths))
        unsupported = sorted({n.call.op for n in _all_nodes(self._body) if n.call.run is None})
        if unsupported:
            first = next(n for n in _all_nodes(self._body) if n.call.run is None)
            raise CaptureError(
                f"{source} uses operators that are not supported: {', '.join(unsupported)}",
                where=f"node {first.call.name}",
                hint="simplify the model before its export, or ask for the operator",
            )

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs of the file."""
        return self._inputs

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs of the file."""
        return self._body.outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the file, or a tuple of several."""
        values: dict[str, Value] = dict(zip(self._inputs, args, strict=False))
        if len(args) > len(self._inputs):
            raise TypeError(f"{self.source} has {len(self._inputs)} inputs, {len(args)} were given")
        for name, value in kwargs.items():
            if name not in self._inputs or name in values:
                problem = "is given twice" if name in values else "does not exist"
                raise TypeError(f"input {name!r} {problem}{did_you_mean(name, self._inputs)}")
            values[name] = value
        if missing := [name for name in self._inputs if name not in values]:
            raise TypeError(f"input {missing[0]!r} of {self.source} is missing")
        values |= {name: tensor_named(self, path) for name, path in self._paths.items()}
        outputs = self._run(self._body, values)
        tensors = tuple(
            torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for v in outputs
        )
        return tensors[0] if len(tensors) == 1 else tensors

    def save_onnx(self, path: str | Path) -> None:
        """Write the file with the present values of its parameters and buffers.

        After training on several ranks, `pm.copy_to(module)` brings the weights back first.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        for initializer in model.graph.initializer:
            if parameter := self._paths.get(initializer.name):
                tensor = tensor_named(self, parameter).detach().cpu()
                dtype = onnx.helper.tensor_dtype_to_np_dtype(initializer.data_type)
                array = tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
                name = initializer.name
                initializer.CopyFrom(numpy_helper.from_array(array.astype(dtype), name))
        large = model.ByteSize() > MAX_BYTES_IN_FILE
        location = f"{Path(path).name}.data" if large else None
        onnx.save_model(model, str(path), save_as_external_data=large, location=location)

    def extra_repr(self) -> str:
        return f"{self.source!r}, inputs={self._inputs}, outputs={self._body.outputs}"

    def _register(self, trainable: Sequence[str] | None) -> None:
        """Register initializers as parameters or buffers; small constants stay NumPy arrays."""
        names = [i.name for i in self._model.graph.initializer]
        for glob in trainable or ():
            if not any(fnmatchcase(name, glob) for name in names):
                raise ConfigError(
                    f"trainable {glob!r} matches none of the {len(names)} initializers of "
                    f"{self.source}",
                    hint=", ".join(names[:8]),
                )
        weights = weights_of(self._model) if trainable is None else frozenset()
        state = {
            node.input[position]
            for node in self._model.graph.node
            if node.op_type == "BatchNormalization"
            for position in (3, 4)
        }
        for initializer in self._model.graph.initializer:
            array, name = numpy_helper.to_array(initializer), initializer.name
            if trainable is None:
                trained = name in weights
            else:
                trained = any(fnmatchcase(name, glob) for glob in trainable)
            if trained or name in state or array.size > MAX_HOST_ELEMENTS:
                path = [re.sub(r"\W", "_", part) for part in name.split(".")]
                path = path if all(path) else ["_".join(path) or "initializer"]
                tensor = tensor_of(array)
                self._paths[name] = add_tensor(self, path, tensor, is_parameter=trained)

    def _prepare(self, graph: Any, skipped: frozenset[str] = frozenset()) -> _Body:
        """Read the attributes of all nodes of a graph and prepare its subgraphs."""
        nodes = []
        for number, proto in enumerate(graph.node):
            attributes = {a.name: self._attribute_value(a) for a in proto.attribute}
            standard = proto.domain in ("", "ai.onnx")
            call = Call(
                op=proto.op_type if standard else f"{proto.domain}::{proto.op_type}",
                name=f"{proto.name or number} ({proto.op_type}) of {self.source}",
                opset=self._opset,
                attributes=attributes,
                num_outputs=len(proto.output),
                run=OPERATORS.get(proto.op_type) if standard else None,
                module=self,
            )
            names = tuple(proto.input), tuple(proto.output)
            nodes.append(_Node(call, *names, proto.SerializeToString()))
        return _Body(
            nodes=tuple(nodes),
            inputs=tuple(i.name for i in graph.input),
            outputs=tuple(o.name for o in graph.output),
            constants={
                i.name: numpy_helper.to_array(i) for i in graph.initializer if i.name not in skipped
            },
        )

    def _attribute_value(self, attribute: Any) -> Any:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, onnx.TensorProto):
            return numpy_helper.to_array(value)
        if isinstance(value, onnx.GraphProto):
            return self._prepare(value)
        if isinstance(value, Sequence) and value and isinstance(value[0], bytes):
            return [v.decode() for v in value]
        return value

    def run_body(self, body: _Body, arguments: Iterable[Value], outer: Any) -> list[Value]:
        """Run a subgraph, which may also use the values around it."""
        return self._run(body, {**outer, **dict(zip(body.inputs, arguments, strict=True))})

    def _run(self, body: _Body, values: dict[str, Any]) -> list[Any]:
        values.update(body.constants)
        for node in body.nodes:
            inputs = [values[name] if name else None for name in node.inputs]
            call = node.call
            assert call.run is not None
            if call.op in ("If", "Loop", "Scan"):
                result: Any = call.run(call, *inputs, outer=values)
            elif _is_known(call, inputs):
                feeds = {name: v for name, v in zip(node.inputs, inputs, strict=True) if name}
                result = tuple(_evaluator(node.proto, self._opset).run(None, feeds))
            else:
                try:
                    result = call.run(call, *inputs)
                except (TypeError, ValueError, IndexError, RuntimeError) as error:
                    if type(error).__module__.startswith("torch.fx"):
                        raise  # control flow on values: capture explains it
                    raise CaptureError(f"{error}", where=f"node {call.name}") from error
            results = result if isinstance(result, tuple) else (result,)
            values |= {n: v for n, v in zip(node.outputs, results, strict=False) if n}
        return [values[name] for name in body.outputs]


@lru_cache(maxsize=4096)
def _evaluator(node: bytes, opset: int) -> Any:
    """Return what computes a node on NumPy arrays."""
    return ReferenceEvaluator(onnx.NodeProto.FromString(node), opsets={"": opset})


def _is_known(call: Call, inputs: Sequence[Any]) -> bool:
    """Return whether a node can be computed without running the model."""
    if call.op.startswith("Random") or call.op in ("Bernoulli", "Dropout"):
        return False
    return all(v is None or isinstance(v, np.ndarray) for v in inputs)


def _opset(model: Any, source: str) -> int:
    opset = max((i.version for i in model.opset_import if i.domain in ("", "ai.onnx")), default=0)
    if opset < OLDEST_OPSET:
        raise ConfigError(
            f"{source} has opset {opset}, at least {OLDEST_OPSET} is needed",
            hint=f"onnx.version_converter.convert_version(model, {OLDEST_OPSET})",
        )
    return opset


def _all_nodes(body: _Body) -> Iterator[_Node]:
    for node in body.nodes:
        yield node
        for value in node.call.attributes.values():
            if isinstance(value, _Body):
                yield from _all_nodes(value)
