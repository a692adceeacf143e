"""Recurrent layers: only the batch is free; time and hidden features stay together."""

from __future__ import annotations

from shardwise.ir import iter_refs
from shardwise.sharding.build import each, operand_dims
from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Dims, NodeRule, whole_rule

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
keep_whole("packed sequences of different lengths", *(f"aten.{name}.data" for name in LAYERS))


@rule(*(f"aten.{name}.input" for name in LAYERS))
def recurrent(call: Call) -> NodeRule:
    """`(input, hx, params, …) -> (output, h, c)`."""
    source = call.shape("input")
    if len(source) != 3:
        return whole_rule(call, "a sequence without a batch")
    if call.get("dropout") and call.get("train"):
        return whole_rule(call, "draws its dropout inside the operator")
    batch_dim = 0 if call.get("batch_first") else 1
    axes = {"b": Axis("b", source[batch_dim])}

    def frozen(prefix: str, shape: tuple[int, ...], cut: int | None) -> Dims:
        names = [f"{prefix}{d}" for d in range(len(shape))]
        if cut is not None:
            names[cut] = "b"
        for name, size in zip(names, shape, strict=True):
            axes.setdefault(name, Axis(name, size, frozen=True))
        return each(names)

    states = [frozen(f"h{i}_", call.shape(r), 1) for i, r in enumerate(iter_refs(call.get("hx")))]
    params = list(iter_refs(call.get("params")))
    weights = [frozen(f"p{i}_", call.shape(ref), None) for i, ref in enumerate(params)]
    dims = {
        "input": frozen("x", source, batch_dim),
        "hx": states if isinstance(call.get("hx"), tuple | list) else states[0],
        "params": weights,
    }
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=tuple(
            frozen(f"y{i}_", shape, 1 if i else batch_dim) for i, shape in enumerate(call.results)
        ),
    )
