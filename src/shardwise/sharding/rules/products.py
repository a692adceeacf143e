"""Matrix products and attention.

Rows, columns, batch dims and heads are free; sharding a contracted axis gives a partial sum.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.sharding.registry import keep_replicated, notation, rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule, replicated_rule
from shardwise.sharding.rules.building_blocks import (
    aligned,
    axes_of,
    each,
    guarded,
    is_float,
    op_name,
    operand_dims,
    shard_argument,
)

notation("~b... k+, ~n k+, +n -> b... n", "aten.linear")
notation("~b m k+, ~b k+ n -> b m n", "aten.bmm")
notation("~m k+, ~k+ n -> m n", "aten.mm")
notation("~m k+, ~k+ -> m", "aten.mv")
notation("~m, ~n -> m n", "aten.outer", "aten.ger")
notation("~k+, ~k+ -> ", "aten.dot", "aten.vdot")
notation("~b... i^, ~b... j^, ~o i^ j^, +o -> b... o", "aten.bilinear")
keep_replicated(
    "a decomposition of full matrices",
    *(f"aten.linalg_{n}" for n in ("svd", "qr", "eigh", "cholesky", "inv_ex", "solve_ex", "det")),
    *("aten.linalg_matrix_exp", "aten.logdet", "aten.slogdet", "aten.inverse"),
)


def contraction(
    call: Call, terms: Sequence[Sequence[str]], result: Sequence[str], added: Sequence[int] = ()
) -> NodeRule:
    """Return the rule of a sum of products, with an axis name for each dim of each factor.

    Axes that the result lacks are summed over. `added` operands are added to the result and aligned
    with it at the right.
    """
    sizes: dict[str, int] = dict(zip(result, call.results[0], strict=True))
    factors = [i for i in range(len(call.operands)) if i not in added]
    for position, names in zip(factors, terms, strict=True):
        for name, size in zip(names, call.operands[position], strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    dims: dict[int, Dims] = {
        position: tuple(
            (name,) if size == sizes[name] else ()
            for name, size in zip(names, call.operands[position], strict=True)
        )
        for position, names in zip(factors, terms, strict=True)
    }
    for position in added:
        dims[position] = aligned(call.operands[position], call.results[0], each(result))
    passing = tuple(frozenset({i, *added}) for i in factors) if is_float(call) else ()
    return NodeRule(
        {name: Axis(name, size) for name, size in sizes.items()},
        tuple(dims[i] for i in range(len(call.operands))),
        (each(result),),
        linear=passing,
        additive=frozenset(added),
    )


@rule("aten.matmul")
def matmul(call: Call) -> NodeRule:
    """Multiply vectors, matrices and broadcast batches of them."""
    left, right = call.operands
    rows = ["m"] if len(left) > 1 else []
    columns = ["n"] if len(right) > 1 else []
    batch = [f"b{i}" for i in range(len(call.results[0]) - len(rows) - len(columns))]

    def own(shape: tuple[int, ...]) -> list[str]:
        return batch[len(batch) - max(len(shape) - 2, 0) :]

    terms = ([*own(left), *rows, "k"], [*own(right), "k", *columns])
    return contraction(call, terms, [*batch, *rows, *columns])


@rule("aten.addmm", "aten.baddbmm", "aten.addbmm", "aten.addmv", "aten.addr")
def add_product(call: Call) -> NodeRule:
    """Multiply, and add the first operand once."""
    terms, result = {
        "addmm": (("mk", "kn"), "mn"),
        "baddbmm": (("bmk", "bkn"), "bmn"),
        "addbmm": (("bmk", "bkn"), "mn"),
        "addmv": (("mk", "k"), "m"),
        "addr": (("m", "n"), "mn"),
    }[op_name(call)]
    return contraction(call, terms, result, added=(0,))


@rule("aten.einsum")
def einsum(call: Call) -> NodeRule:
    """Contract by an equation whose operands repeat no label of their own."""
    parsed = parse_equation(str(call.get("equation")), [len(s) for s in call.operands])
    if parsed is None:
        return replicated_rule(call, "takes a diagonal, or its equation is not understood")
    return contraction(call, *parsed)


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]] | None:
    """Return the labels of all operands and the result; an ellipsis is `0`, `1`, … from the right.

    >>> parse_equation("...ij,jk", [3, 2])
    ([['0', 'i', 'j'], ['j', 'k']], ['0', 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms: list[list[str]] = []
    widest = 0
    for text, rank in zip(left.split(","), ranks, strict=False):
        hidden = rank - len(text.replace("...", ""))
        if hidden < 0 or (hidden and "..." not in text):
            return None
        widest = max(widest, hidden)
        terms.append(_expand(text, hidden))
    labels = [label for term in terms for label in term]
    if not arrow:
        once = sorted(x for x in set(labels) if labels.count(x) == 1 and x.isalpha())
        right = "..." * bool(widest) + "".join(once)
    result = _expand(right, widest)
    unusual = [t for t in (*terms, result) if len(set(t)) != len(t)]
    if len(terms) != len(ranks) or unusual or not set(result) <= set(labels):
        return None
    return terms, result


def _expand(text: str, hidden: int) -> list[str]:
    before, dots, after = text.partition("...")
    inner = [str(hidden - 1 - i) for i in range(hidden)] if dots else []
    return [*before, *inner, *after]


@rule("aten.chain_matmul", "aten.linalg_multi_dot")
def chain(call: Call) -> NodeRule:
    """Multiply several matrices; the ends may be vectors."""
    names = [f"k{i}" for i in range(len(call.operands) + 1)]
    terms = [names[i : i + 2] for i in range(len(call.operands))]
    ends = [names[0], names[-1]]
    if len(call.operands[-1]) == 1:
        terms[-1], ends = names[-2:-1], ends[:-1]
    if len(call.operands[0]) == 1:
        terms[0], ends = names[1:2], ends[1:]
    return contraction(call, terms, ends)


@rule("aten.tensordot")
def tensordot(call: Call) -> NodeRule:
    """Contract the listed dims."""
    left, right = call.operands
    first = [f"a{i}" for i in range(len(left))]
    second = [f"b{i}" for i in range(len(right))]
    for i, j in zip(call.get("dims_self"), call.get("dims_other"), strict=True):
        second[j] = first[i]
    summed = set(first) & set(second)
    return contraction(call, (first, second), [n for n in (*first, *second) if n not in summed])


@rule("aten.inner")
def inner(call: Call) -> NodeRule:
    """Sum over both last dims; a scalar operand multiplies."""
    left, right = call.operands
    if not left or not right:
        names = [f"d{i}" for i in range(len(left) + len(right))]
        return contraction(call, (names[: len(left)], names[len(left) :]), names)
    first = [f"a{i}" for i in range(len(left) - 1)]
    second = [f"b{i}" for i in range(len(right) - 1)]
    return contraction(call, ([*first, "k"], [*second, "k"]), [*first, *second])


@rule("aten.kron")
def kron(call: Call) -> NodeRule:
    """Make each dim of the result the product of both operands' dims."""
    left, right = call.operands
    if len(left) != len(right):
        return replicated_rule(call, "a Kronecker product of tensors of different rank")
    axes, first = axes_of(left, prefix="a")
    more, second = axes_of(right, prefix="b")
    return NodeRule(
        axes | more,
        (first, second),
        (tuple((f"a{i}", f"b{i}") for i in range(len(left))),),
        linear=(frozenset({0}), frozenset({1})),
    )


@rule("aten.cdist")
def cdist(call: Call) -> NodeRule:
    """Freeze the features of the rows, all pairs of which are compared."""
    left, right = call.operands
    batch = [f"b{i}" for i in range(len(call.results[0]) - 2)]
    terms = (
        [*batch[len(batch) + 2 - len(left) :], "m", "k"],
        [*batch[len(batch) + 2 - len(right) :], "n", "k"],
    )
    product = contraction(call, terms, [*batch, "m", "n"])
    axes = {**product.axes, "k": Axis("k", left[-1], frozen=True)}
    # The number of rows selects the algorithm: that of the full tensor, not of the shard.
    mode = 1 if max(left[-2], right[-2]) > 25 else 2

    def localize(call: Call, local: Local) -> LocalCall:
        return call.replace(compute_mode=call.get("compute_mode") or mode)

    return replace(product, axes=axes, linear=(), localize=localize)


@rule("aten.scaled_dot_product_attention")
def attention(call: Call) -> NodeRule:
    """Compute `softmax(q k') v`; batch, heads, query rows and value features are free.

    With `enable_gqa` the query heads are `key heads x groups`. A causal mask needs the position of
    the first query row, so that rows are sharded as one range. The axis `ring` shards queries, keys
    and values along the sequence.
    """
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    result = call.results[0]
    ranks = {len(query), len(key), len(value), len(result)}
    if len(ranks) > 1 or len(query) < 3:
        return replicated_rule(call, "operands of different rank")
    shared = bool(call.get("enable_gqa"))
    if shared and (value[-3] != key[-3] or not key[-3] or query[-3] % key[-3]):
        return replicated_rule(call, "different numbers of key and value heads")
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
    if _may_ring(call):
        axes["ring"] = Axis("ring", result[-2], frozen=True, once=True, joins=("l", "s"))
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
            return replicated_rule(call, "a mask of more dims than the attention weights")
        dims["attn_mask"] = aligned(mask, (*result[:-1], key[-2]), (*rows, ("s",)))
    return NodeRule(
        axes,
        operand_dims(call, **dims),
        ((*rows, ("v",)),),
        linear=(frozenset({call.position("value")}),),
        localize=_localize_attention,
    )


def _may_ring(call: Call) -> bool:
    """Return whether keys may travel: no dropout, no broadcast heads, a mask with query rows."""
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    heads = -3 if call.get("enable_gqa") else -2
    mask = call.shape("attn_mask") if call.has("attn_mask") else None
    return (
        not call.get("dropout_p")
        and query[:heads] == key[:heads]
        and key[:-1] == value[:-1]
        and (mask is None or (len(mask) > 1 and mask[-2:] == (query[-2], key[-2])))
    )


def _localize_attention(call: Call, local: Local) -> LocalCall:
    ring = local.axis("ring")
    if ring is None:
        return guarded(_local_attention)(call, local)
    (query, key, value, *mask), options = _attention_arguments(call)
    sizes = (("rows", call.shape("query")[-2]), ("columns", call.shape("key")[-2]))
    args = (query, key, value, ring, *mask)
    return LocalCall("rt.ring_attention", args, (*sizes, *options.items()))


def _attention_arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the tensors of an attention, and its options without those that are not set."""
    tensors = (call.get(n) for n in ("query", "key", "value", "attn_mask") if call.has(n))
    options = {name: call.get(name) for name in ("is_causal", "scale", "enable_gqa")}
    return tuple(tensors), {k: v for k, v in options.items() if v is not None and v is not False}


def _local_attention(call: Call, local: Local) -> LocalCall:
    """Call the runtime's attention if rows of a causal mask are sharded or weights dropped."""
    dropped = float(call.get("dropout_p") or 0.0)
    rows = local.axis("l") if call.get("is_causal") else None
    if not dropped and rows is None:
        return call.replace()
    args, options = _attention_arguments(call)
    if rows is not None:
        options |= {"row_axis": rows, "rows": shard_argument(local, "l", call.position("query"))}
    if dropped:
        shape = (*call.results[0][:-1], call.shape("key")[-2])
        layout = local.result_layouts[0]
        splits = tuple((n, s.dim, s.of) for n, s in layout.shards if s.dim < len(shape) - 1)
        options |= {"dropout_p": dropped, "key": call.node.name, "shape": shape, "splits": splits}
    return LocalCall("rt.attention", args, tuple(options.items()))
