"""Which initializers of an ONNX file are weights.

A file does not mark them. PyTorch's exporter records the names of parameters and buffers; elsewhere
names and uses decide. Exporters also add constants, such as the scale of a normalization without
weights, and fold masks; these are not trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import numpy_helper

Positions = Mapping[str, tuple[int, ...]]  # of inputs, by operator

# Inputs that are state or settings.
_SETTINGS: Positions = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Pad": (2,),
    "Resize": (1, 2),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "Dropout": (1,),
    "OneHot": (2,),
    "Range": (0, 1, 2),
}
# Weights that exporters transpose or merge, and then give a name of their own.
_LAYERS: Positions = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Einsum": (0, 1), "GRU": (1, 2, 3), "Gather": (0,),
    "Gemm": (0, 1, 2), "LSTM": (1, 2, 3), "MatMul": (0, 1), "PRelu": (1,), "RNN": (1, 2, 3),
}  # fmt: skip
_NORMS: Positions = {
    "BatchNormalization": (1, 2), "GroupNormalization": (1, 2), "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2), "RMSNormalization": (1,),
}  # fmt: skip
_MADE_UP = re.compile(
    r"\d+|val_\d+|_?(c_)?lifted_tensor_\d+|onnx::\w+|/.*|.*[Cc]onst(ant)?(_fold_opt_)?(_+\d+)?(:0)?"
)
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
RECORDED_KINDS = "shardwise.weights"  # written by integrations.tensorflow, as JSON
_RECORD = re.compile(r": (PARAMETER|BUFFER) target='(.+?)'")


def weights_of(model: Any) -> frozenset[str]:
    """Return the floating-point initializers of a file that are weights."""
    properties = {p.key: p.value for p in model.graph.metadata_props}
    recorded = {name: kind for kind, name in _RECORD.findall(properties.get(_SIGNATURE, ""))}
    recorded |= json.loads(properties.get(RECORDED_KINDS, "{}"))
    settings, layers, norms = (_operands(model, table) for table in (_SETTINGS, _LAYERS, _NORMS))

    def is_weight(initializer: Any) -> bool:
        name = initializer.name
        if name in recorded:
            return recorded[name] == "PARAMETER" and _is_float(numpy_helper.to_array(initializer))
        if not _is_trainable(initializer) or name in settings:
            return False
        values = np.unique(numpy_helper.to_array(initializer).astype(np.float64))
        if _MADE_UP.fullmatch(name) is None:
            return not _is_mask(initializer, len(values))
        if name in norms:  # ones and zeros: the norm has no weights
            return len(values) > 1 or values[0] not in (0, 1)
        return name in layers and not _is_mask(initializer, len(values))

    return frozenset(i.name for i in model.graph.initializer if is_weight(i))


def _is_trainable(initializer: Any) -> bool:
    array = numpy_helper.to_array(initializer)
    if not _is_float(array) or array.ndim == 0 or array.size < 2:
        return False
    return bool(np.isfinite(array.astype(np.float64)).all())


def _is_float(array: np.ndarray[Any, Any]) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _is_mask(initializer: Any, num_values: int) -> bool:
    return len(initializer.dims) > 1 and num_values == 2 < np.prod(initializer.dims)


def _operands(model: Any, positions: Positions) -> set[str]:
    """Return the values that operators use at some positions."""
    return {
        node.input[position]
        for node in model.graph.node
        for position in positions.get(node.op_type, ())
        if position < len(node.input)
    }
