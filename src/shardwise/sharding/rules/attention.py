"""Scaled dot-product attention: batch, heads, query rows and value features are free."""

from __future__ import annotations

from typing import Any

from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import aligned, cut_of, each, guarded, operand_dims


@rule("aten.scaled_dot_product_attention")
def attention(call: Call) -> NodeRule:
    """`softmax(q k') v`; with `enable_gqa` the query heads are `key heads x groups`.

    A causal mask needs the position of the first query row, so that rows are cut as one range.
    """
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    result = call.results[0]
    ranks = {len(query), len(key), len(value), len(result)}
    if len(ranks) > 1 or len(query) < 3:
        return whole_rule(call, "operands of different rank")
    shared = bool(call.get("enable_gqa"))
    if shared and (value[-3] != key[-3] or not key[-3] or query[-3] % key[-3]):
        return whole_rule(call, "different numbers of key and value heads")
    num_heads = key[-3] if shared else result[-3]
    causal = bool(call.get("is_causal"))
    batch = each(f"b{i}" for i in range(len(result) - 3))
    axes = {
        **{f"b{i}": Axis(f"b{i}", n) for i, n in enumerate(result[:-3])},
        "h": Axis("h", num_heads),
        "g": Axis("g", result[-3] // num_heads if num_heads else 1),
        "l": Axis("l", result[-2], outermost=causal, once=causal),
        "s": Axis("s", key[-2], frozen=True),
        "e": Axis("e", query[-1], frozen=True),
        "v": Axis("v", value[-1]),
    }
    heads = ("h", "g") if axes["g"].size > 1 else ("h",)
    rows: Dims = (*batch, heads, ("l",))
    columns: Dims = (*batch, ("h",), ("s",))
    lead = (*result[:-3], num_heads)
    dims = {
        "query": aligned(query, (*result[:-1], query[-1]), (*rows, ("e",))),
        "key": aligned(key, (*lead, *key[-2:]), (*columns, ("e",))),
        "value": aligned(value, (*lead, *value[-2:]), (*columns, ("v",))),
    }
    if call.has("attn_mask"):
        mask = call.shape("attn_mask")
        if len(mask) > len(result):
            return whole_rule(call, "a mask of more dims than the attention weights")
        dims["attn_mask"] = aligned(mask, (*result[:-1], key[-2]), (*rows, ("s",)))
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=((*rows, ("v",)),),
        linear=(frozenset({call.position("value")}),),
        localize=guarded(_localize),
    )


def _localize(call: Call, local: Local) -> LocalCall:
    """The runtime's attention where rows of a causal mask are cut, or weights are dropped."""
    dropped = float(call.get("dropout_p") or 0.0)
    causal = bool(call.get("is_causal"))
    rows = local.axis("l") if causal else None
    if not dropped and rows is None:
        return call.replace()
    args = [call.get(name) for name in ("query", "key", "value")]
    if call.has("attn_mask"):
        args.append(call.get("attn_mask"))
    options: dict[str, Any] = {}
    if causal:
        options["is_causal"] = True
    if call.get("scale") is not None:
        options["scale"] = call.get("scale")
    if call.get("enable_gqa"):
        options["enable_gqa"] = True
    if rows is not None:
        options |= {"row_axis": rows, "rows": cut_of(local, "l", call.position("query"))}
    if dropped:
        shape = (*call.results[0][:-1], call.shape("key")[-2])
        layout = local.result_layouts[0]
        splits = tuple((n, s.dim, s.of) for n, s in layout.shards if s.dim < len(shape) - 1)
        options |= {"dropout_p": dropped, "key": call.node.name, "shape": shape, "splits": splits}
    return LocalCall("rt.attention", tuple(args), tuple(options.items()))
