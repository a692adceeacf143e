"""Matrix products: cut rows, columns, batch, or the contracted axis (a partial sum)."""

from __future__ import annotations

from shardwise.sharding.registry import notation, rule
from shardwise.sharding.rule import Axis, Call, Dims, NodeRule

notation("~b... k+, ~n k+, +n -> b... n", "aten.linear")
notation("~b m k+, ~b k+ n -> b m n", "aten.bmm")
notation("~m k+, ~k+ n -> m n", "aten.mm")
notation("~m k+, ~k+ -> m", "aten.mv")
notation("~m, ~n -> m n", "aten.outer", "aten.ger")
notation("~k+, ~k+ -> ", "aten.dot")


@rule("aten.matmul")
def matmul(call: Call) -> NodeRule:
    """`torch.matmul`: vectors, matrices and broadcast batches."""
    left, right = call.operands
    result = call.results[0]
    rows = ("m",) if len(left) > 1 else ()
    columns = ("n",) if len(right) > 1 else ()
    batch = len(result) - len(rows) - len(columns)
    axes = {f"b{i}": Axis(f"b{i}", result[i]) for i in range(batch)}
    axes["k"] = Axis("k", left[-1])
    if rows:
        axes["m"] = Axis("m", left[-2])
    if columns:
        axes["n"] = Axis("n", right[-1])

    def batch_dims(shape: tuple[int, ...]) -> Dims:
        own = shape[:-2] if len(shape) > 1 else ()
        offset = batch - len(own)
        return tuple(
            (f"b{i + offset}",) if size != 1 or result[i + offset] == 1 else ()
            for i, size in enumerate(own)
        )

    left_dims: Dims = (*batch_dims(left), *((d,) for d in rows), ("k",))
    right_dims: Dims = (*batch_dims(right), ("k",), *((d,) for d in columns))
    result_dims: Dims = (*((f"b{i}",) for i in range(batch)), *((d,) for d in (*rows, *columns)))
    return NodeRule(
        axes=axes,
        operands=(left_dims, right_dims),
        results=(result_dims,),
        linear=(frozenset({0}), frozenset({1})),
    )
