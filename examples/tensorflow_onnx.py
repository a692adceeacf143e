"""TensorFlow functions as ONNX files, and trained weights back into their variables.

    python examples/tensorflow_onnx.py SAVED_MODEL model.onnx
    python examples/tensorflow_onnx.py SAVED_MODEL trained.onnx --save-to TRAINED

tf2onnx converts a function with its variables as inputs, so that none is folded into a constant; in
the file they are initializers under their own names, which `sw.from_onnx` reads on every rank. This
file needs tensorflow and tf2onnx, but neither torch nor shardwise: copy it to where TensorFlow is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
from onnx import numpy_helper
from tensorflow.python.framework import convert_to_constants

RECORDED_KINDS = "shardwise.weights"  # where `sw.from_onnx` looks for the names of parameters
_OPSET = 18  # the newest that tf2onnx writes


def to_onnx(function: Any, path: str | Path) -> None:
    """Write a TensorFlow function as an ONNX file whose initializers are its variables.

    The function is a signature of a SavedModel, or a `tf.function` with an input signature.
    Trainable variables are the parameters of the module that `sw.from_onnx` returns.

    >>> to_onnx(tf.saved_model.load(folder).signatures["serving_default"], path)  # doctest: +SKIP
    """
    function = _concrete(function)
    frozen = convert_to_constants.convert_variables_to_constants_v2(
        function, lower_control_flow=False
    )
    definition, variables = frozen.graph.as_graph_def(), _variables(function)
    inputs, outputs = ([t.name for t in tensors] for tensors in (frozen.inputs, frozen.outputs))
    names = {name: name.removesuffix(":0") for name in inputs}
    if isinstance(function.structured_outputs, dict):  # which TensorFlow flattens in this order
        names |= dict(zip(outputs, sorted(function.structured_outputs), strict=True))
    shapes = {t.name: t.shape.as_list() for t in frozen.inputs if t.shape.rank}
    for node in definition.node:
        if node.name in variables:
            own, variable = variables[node.name]
            node.op = "Placeholder"
            node.attr.clear()
            node.attr["dtype"].type = variable.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(variable.shape.as_proto())
            names[f"{node.name}:0"] = own
            shapes[f"{node.name}:0"] = variable.shape.as_list()
            inputs.append(f"{node.name}:0")
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
        raise ValueError(
            f"tf2onnx cannot convert {function.name}: {reason}; a Keras model also comes in with "
            "from_keras('model.keras') of shardwise.integrations.keras"
        ) from error
    _rename(model.graph, names)
    kinds = {n: "PARAMETER" if v.trainable else "BUFFER" for n, v in variables.values()}
    for name, variable in variables.values():
        model.graph.initializer.append(numpy_helper.from_array(variable.numpy(), name))
        model.graph.input.remove(next(i for i in model.graph.input if i.name == name))
    entry = model.graph.metadata_props.add()
    entry.key, entry.value = RECORDED_KINDS, json.dumps(kinds)
    onnx.save_model(model, str(path))


def assign(path: str | Path, function: Any) -> None:
    """Set the variables of a function to the weights of its ONNX file, from `save_onnx`."""
    arrays = {i.name: numpy_helper.to_array(i) for i in onnx.load(str(path)).graph.initializer}
    variables = dict(_variables(_concrete(function)).values())
    for name, variable in variables.items():
        if name not in arrays or arrays[name].shape != tuple(variable.shape):
            raise ValueError(
                f"{path} has no weights {name} of the shape {tuple(variable.shape)}; pass the file "
                "of this function, as to_onnx and save_onnx write it"
            )
    for name, variable in variables.items():
        variable.assign(arrays[name])


def _concrete(function: Any) -> Any:
    return function if hasattr(function, "graph") else function.get_concrete_function()


def _variables(function: Any) -> dict[str, tuple[str, Any]]:
    """Map the node of every captured variable to its unique name and the variable."""
    captures = zip(function.graph.external_captures, function.graph.internal_captures, strict=True)
    handles = {id(variable.handle): variable for variable in function.graph.variables}
    named: dict[str, tuple[str, Any]] = {}
    stems: list[str] = []
    for outer, inner in captures:  # whose order is the same in every process
        if (variable := handles.get(id(outer))) is not None:
            stems.append(stem := variable.name.removesuffix(":0"))
            count = stems.count(stem)
            named[inner.op.name] = (stem if count == 1 else f"{stem}_{count}", variable)
    return named


def _erfc(ctx: Any, node: Any, name: str, args: Any) -> None:
    """Convert an operator of exact gelu that tf2onnx does not know: 1 - erf(x)."""
    dtype = tf2onnx.utils.map_onnx_to_numpy_type(ctx.get_dtype(node.input[0]))
    erf, one = (
        ctx.make_node("Erf", node.input[:]),
        ctx.make_const(f"{name}/one", np.ones((), dtype)),
    )
    node.type = "Sub"
    ctx.replace_inputs(node, [one.output[0], erf.output[0]])


def _rename(graph: Any, names: dict[str, str]) -> None:
    """Rename values of an ONNX graph, also inside the bodies of loops and branches."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename(attribute.g, names)


def main() -> None:
    """Convert the signature of a SavedModel, or write trained weights into a new one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("saved_model", help="folder of a SavedModel")
    parser.add_argument("file", help="ONNX file to write, or with --save-to to read")
    parser.add_argument("--signature", default="serving_default")
    parser.add_argument(
        "--save-to", help="folder of a SavedModel to write with the weights of FILE"
    )
    options = parser.parse_args()
    loaded = tf.saved_model.load(options.saved_model)
    if options.signature not in loaded.signatures:
        parser.error(f"--signature: one of {', '.join(loaded.signatures) or 'none'}")
    function = loaded.signatures[options.signature]
    if options.save_to is None:
        to_onnx(function, options.file)
    else:
        assign(options.file, function)
        tf.saved_model.save(loaded, options.save_to, signatures=dict(loaded.signatures))


if __name__ == "__main__":
    main()
