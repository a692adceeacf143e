"""The captured graph, which every later stage of the compiler reads."""

from shardwise.ir.graph import (
    Buffer,
    Constant,
    GradientHook,
    Graph,
    Input,
    Node,
    Parameter,
    Ref,
    TensorType,
    format_arg,
    iter_refs,
    map_refs,
    node_keys,
    tensor_bytes,
)
from shardwise.ir.guards import Guard, Guards
