"""TensorFlow functions and SavedModels as ONNX files, and trained weights back.

The graph of a function is converted by tf2onnx, with its variables as inputs, so that none is
folded into a constant; in the file they are initializers under their own names. The conversion runs
once, in a process with TensorFlow; `sw.from_onnx` reads the file on every rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import CaptureError, ConfigError
from shardwise.integrations.onnx.weights import RECORDED_KINDS

try:
    import onnx
    import tensorflow as tf
    import tf2onnx
    from onnx import numpy_helper
    from tensorflow.python.framework import convert_to_constants
except ImportError as error:  # pragma: no cover - depends on the environment
    raise ConfigError(
        f"TensorFlow models need tensorflow and tf2onnx: {error}",
        hint="pip install 'shardwise[tensorflow]', best in an environment of its own",
    ) from error

_OPSET = 18  # the newest that tf2onnx writes
_NO_SIGNATURE = "tf.function(f).get_concrete_function(tf.TensorSpec((None, 8), tf.float32))"


def to_onnx(source: Any, path: str | Path, *, signature: str = "serving_default") -> None:
    """Write a TensorFlow function as an ONNX file whose initializers are its variables.

    `source` is the folder of a SavedModel, of which `signature` is written, or a `tf.function`
    with an input signature, or a concrete function. Trainable variables become parameters in
    `sw.from_onnx`, others buffers.

    >>> to_onnx("saved_model", "model.onnx")  # doctest: +SKIP
    >>> module = sw.from_onnx("model.onnx")  # on every rank  # doctest: +SKIP
    """
    function, _loaded = _concrete(source, signature)
    frozen = convert_to_constants.convert_variables_to_constants_v2(
        function, lower_control_flow=False
    )
    definition, variables = frozen.graph.as_graph_def(), _variables(function)
    inputs = [tensor.name for tensor in frozen.inputs]
    shapes = {tensor.name: tensor.shape.as_list() for tensor in frozen.inputs if tensor.shape.rank}
    for node in definition.node:
        if node.name in variables:
            variable = variables[node.name][1]
            node.op = "Placeholder"
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            inputs.append(f"{node.name}:0")
            shapes[f"{node.name}:0"] = variable.shape.as_list()
    outputs = [tensor.name for tensor in frozen.outputs]
    try:
        with tf.Graph().as_default():
            definition = tf2onnx.tf_loader.tf_optimize(inputs, outputs, definition)
        model, _ = tf2onnx.convert._convert_common(
            definition, name=Path(path).stem, opset=_OPSET, input_names=inputs,
            output_names=outputs, shape_override=shapes, custom_op_handlers={"Erfc": (_erfc, [])},
        )  # fmt: skip
        onnx.checker.check_model(model)
    except Exception as error:  # tf2onnx has several kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CaptureError(
            f"tf2onnx cannot convert {function.name}: {reason}",
            hint="simplify the function; a Keras model comes in with from_keras('model.keras')",
        ) from error
    names = {f"{node}:0": name for node, (name, _) in variables.items()}
    _rename(model, names | _argument_names(function, frozen))
    kinds = {}
    for name, variable in variables.values():
        model.graph.initializer.append(numpy_helper.from_array(variable.numpy(), name))
        kinds[name] = "PARAMETER" if variable.trainable else "BUFFER"
    kept = [value for value in model.graph.input if value.name not in kinds]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    entry = model.graph.metadata_props.add()
    entry.key, entry.value = RECORDED_KINDS, json.dumps(kinds)
    onnx.save_model(model, str(path))


def assign(
    path: str | Path,
    source: Any,
    *,
    signature: str = "serving_default",
    save_to: str | Path | None = None,
) -> None:
    """Assign the weights of an ONNX file to the variables of the function that it came from.

    The file is one of `module.save_onnx`. With `save_to`, a SavedModel with the new weights is
    written there.
    """
    function, loaded = _concrete(source, signature)
    arrays = {i.name: numpy_helper.to_array(i) for i in onnx.load(str(path)).graph.initializer}
    variables = dict(_variables(function).values())
    missing = [name for name in variables if name not in arrays]
    wrong = [n for n, v in variables.items() if n not in missing and arrays[n].shape != v.shape]
    if missing or wrong:
        name = (missing + wrong)[0]
        problem = "is not in" if missing else "has another shape in"
        raise ConfigError(f"variable {name} {problem} {path}", hint="the file of this function")
    for name, variable in variables.items():
        variable.assign(arrays[name])
    if save_to is not None:
        if loaded is None:
            raise ConfigError("save_to needs the folder of a SavedModel as source")
        tf.saved_model.save(loaded, str(save_to), signatures=dict(loaded.signatures))


def _concrete(source: Any, signature: str) -> tuple[Any, Any]:
    """Return a concrete function, and the SavedModel that it is part of, if any."""
    if isinstance(source, str | Path):
        try:
            loaded = tf.saved_model.load(str(source))
        except OSError as error:
            raise ConfigError(f"{source} is not a SavedModel: {error}") from None
        if signature not in loaded.signatures:
            raise ConfigError(
                f"{source} has no signature {signature!r}",
                hint=f"one of {', '.join(loaded.signatures) or 'none'}: to_onnx(…, signature=)",
            )
        return loaded.signatures[signature], loaded  # the variables live as long as it does
    if not hasattr(source, "structured_outputs"):
        try:
            source = source.get_concrete_function()
        except Exception as error:
            raise ConfigError(
                f"the types of the function's inputs are unknown: {str(error).splitlines()[0]}",
                hint=f"an input_signature, or {_NO_SIGNATURE}",
            ) from error
    return source, None


def _variables(function: Any) -> dict[str, tuple[str, Any]]:
    """Map the node of every captured variable to its unique name and the variable."""
    handles = {id(variable.handle): variable for variable in function.graph.variables}
    pairs = zip(function.graph.internal_captures, function.graph.external_captures, strict=True)
    nodes = {id(outer): inner.op.name for inner, outer in pairs if id(outer) in handles}
    named: dict[str, tuple[str, Any]] = {}
    counts: dict[str, int] = {}
    for handle, variable in handles.items():
        stem = variable.name.removesuffix(":0")
        counts[stem] = counts.get(stem, 0) + 1
        name = stem if counts[stem] == 1 else f"{stem}_{counts[stem]}"
        if handle in nodes:
            named[nodes[handle]] = (name, variable)
    return named


def _argument_names(function: Any, frozen: Any) -> dict[str, str]:
    """Map the tensors of inputs and outputs to the names that users know."""
    names = {tensor.name: tensor.name.removesuffix(":0") for tensor in frozen.inputs}
    outputs = function.structured_outputs
    if isinstance(outputs, dict):
        keys = sorted(outputs)  # as TensorFlow flattens them
        names |= {t.name: key for t, key in zip(frozen.outputs, keys, strict=True)}
    return names


def _erfc(ctx: Any, node: Any, name: str, args: Any) -> None:
    """Convert an operator that tf2onnx does not know: 1 - erf(x), in exact gelu."""
    dtype = tf2onnx.utils.map_onnx_to_numpy_type(ctx.get_dtype(node.input[0]))
    erf = ctx.make_node("Erf", node.input[:])
    one = ctx.make_const(f"{name}/one", np.ones((), dtype))
    node.type = "Sub"
    ctx.replace_inputs(node, [one.output[0], erf.output[0]])


def _rename(model: Any, names: dict[str, str]) -> None:
    """Rename values of an ONNX graph, also inside the bodies of loops and branches."""

    def rename(graph: Any) -> None:
        for value in (*graph.input, *graph.output, *graph.value_info):
            value.name = names.get(value.name, value.name)
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(model.graph)
