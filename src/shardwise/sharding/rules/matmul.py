"""Matrix products: cut rows, columns, batch, or the contracted axis (a partial sum)."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ir import Ref
from shardwise.sharding.registry import keep_whole, notation, rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import aligned, cut_of, each, is_float

notation("~b... k+, ~n k+, +n -> b... n", "aten.linear")
notation("~b m k+, ~b k+ n -> b m n", "aten.bmm")
notation("~m k+, ~k+ n -> m n", "aten.mm")
notation("~m k+, ~k+ -> m", "aten.mv")
notation("~m, ~n -> m n", "aten.outer", "aten.ger")
notation("~k+, ~k+ -> ", "aten.dot", "aten.vdot")
notation("~b... i^, ~b... j^, ~o i^ j^, +o -> b... o", "aten.bilinear")
keep_whole(
    "a decomposition of whole matrices",
    *(f"aten.linalg_{n}" for n in ("svd", "qr", "eigh", "cholesky", "inv_ex", "solve_ex", "det")),
    *("aten.trace", "aten.linalg_matrix_exp", "aten.logdet", "aten.slogdet", "aten.inverse"),
)


def contraction(
    call: Call,
    terms: Sequence[Sequence[str]],
    result: Sequence[str],
    added: Sequence[int] = (),
) -> NodeRule:
    """A sum of products: axes named by operand dim; those that the result lacks are summed over.

    `added` operands are added to the result and aligned with it at the right.
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
        axes={name: Axis(name, size) for name, size in sizes.items()},
        operands=tuple(dims[i] for i in range(len(call.operands))),
        results=(each(result),),
        linear=passing,
        additive=frozenset(added),
    )


@rule("aten.matmul")
def matmul(call: Call) -> NodeRule:
    """`torch.matmul`: vectors, matrices and broadcast batches."""
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
    """A product with something added once."""
    terms, result = {
        "addmm": (("mk", "kn"), "mn"),
        "baddbmm": (("bmk", "bkn"), "bmn"),
        "addbmm": (("bmk", "bkn"), "mn"),
        "addmv": (("mk", "k"), "m"),
        "addr": (("m", "n"), "mn"),
    }[call.node.op.split(".")[1]]
    return contraction(call, terms, result, added=(0,))


@rule("aten.einsum")
def einsum(call: Call) -> NodeRule:
    """Any einsum whose operands repeat no label of their own."""
    parsed = parse_equation(str(call.get("equation")), [len(s) for s in call.operands])
    if parsed is None:
        return whole_rule(call, "takes a diagonal, or its equation is not understood")
    return contraction(call, *parsed)


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]] | None:
    """The labels of all operands and the result; an ellipsis is `0`, `1`, … from the right.

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
    """A product of several matrices; the ends may be vectors."""
    names = [f"k{i}" for i in range(len(call.operands) + 1)]
    terms = [names[i : i + 2] for i in range(len(call.operands))]
    if len(call.operands[0]) == 1:
        terms[0] = names[1:2]
    if len(call.operands[-1]) == 1:
        terms[-1] = names[-2:-1]
    ends = ([names[0]] if len(call.operands[0]) == 2 else []) + (
        [names[-1]] if len(call.operands[-1]) == 2 else []
    )
    return contraction(call, terms, ends)


@rule("aten.tensordot")
def tensordot(call: Call) -> NodeRule:
    """Contraction of listed dims."""
    left, right = call.operands
    pairs = list(
        zip(
            (d % len(left) for d in call.get("dims_self")),
            (d % len(right) for d in call.get("dims_other")),
            strict=True,
        )
    )
    first = [f"a{i}" for i in range(len(left))]
    second = [f"b{i}" for i in range(len(right))]
    for i, j in pairs:
        second[j] = first[i]
    summed = {first[i] for i, _ in pairs}
    return contraction(call, (first, second), [n for n in (*first, *second) if n not in summed])


@rule("aten.inner")
def inner(call: Call) -> NodeRule:
    """The sum over both last dims; a scalar operand multiplies."""
    left, right = call.operands
    if not left or not right:
        names = [f"d{i}" for i in range(len(left) + len(right))]
        return contraction(call, (names[: len(left)], names[len(left) :]), names)
    first = [f"a{i}" for i in range(len(left) - 1)]
    second = [f"b{i}" for i in range(len(right) - 1)]
    return contraction(call, ([*first, "k"], [*second, "k"]), [*first, *second])


@rule("aten.kron")
def kron(call: Call) -> NodeRule:
    """Each dim of the result is the product of both operands' dims."""
    left, right = call.operands
    if len(left) != len(right):
        return whole_rule(call, "a Kronecker product of tensors of different rank")
    axes = {
        f"{side}{i}": Axis(f"{side}{i}", n)
        for side, s in (("a", left), ("b", right))
        for i, n in enumerate(s)
    }
    return NodeRule(
        axes=axes,
        operands=(each(f"a{i}" for i in range(len(left))), each(f"b{i}" for i in range(len(left)))),
        results=(tuple((f"a{i}", f"b{i}") for i in range(len(left))),),
        linear=(frozenset({0}), frozenset({1})),
    )


@rule("aten.cdist")
def cdist(call: Call) -> NodeRule:
    """Distances of all pairs of rows; the features of a row stay together."""
    left, right = call.operands
    batch = [f"b{i}" for i in range(len(call.results[0]) - 2)]
    names = {
        "x": [*batch[len(batch) + 2 - len(left) :], "m", "k"],
        "y": [*batch[len(batch) + 2 - len(right) :], "n", "k"],
    }
    found = contraction(call, (names["x"], names["y"]), [*batch, "m", "n"])
    axes = {**found.axes, "k": Axis("k", left[-1], frozen=True)}
    # Which algorithm computes it depends on the number of rows: the whole's, not the shard's.
    mode = 1 if max(left[-2], right[-2]) > 25 else 2

    def localize(call: Call, local: Local) -> LocalCall:
        return call.replace(compute_mode=call.get("compute_mode") or mode)

    return NodeRule(axes=axes, operands=found.operands, results=found.results, localize=localize)


@rule("transformers.grouped_mm_fallback")
def grouped_mm(call: Call) -> NodeRule:
    """Rows sorted by expert, times each expert's matrix.

    Rows are cut as ranges (the offsets follow), experts as ranges (other ranks' rows are zero).
    """
    rows, experts = call.operands[0][0], call.operands[1][0]
    axes = {
        "s": Axis("s", rows, outermost=True, once=True),
        "e": Axis("e", experts, outermost=True, once=True),
        "k": Axis("k", call.operands[0][1]),
        "n": Axis("n", call.operands[1][2]),
        "o": Axis("o", experts, frozen=True),
    }

    def localize(call: Call, local: Local) -> LocalCall:
        row_axis, expert_axis = local.axis("s"), local.axis("e")
        options = []
        if row_axis is not None:
            options += [("row_axis", row_axis), ("rows", cut_of(local, "s", 0))]
        if expert_axis is not None:
            options += [("expert_axis", expert_axis), ("experts", cut_of(local, "e", 1))]
        values = tuple(Ref(name) for name in call.node.inputs)
        return LocalCall("rt.grouped_mm", values, tuple(options))

    return NodeRule(
        axes=axes,
        operands=(each("sk"), each("ekn"), each("o")),
        results=(each("sn"),),
        linear=(frozenset({0}), frozenset({1})),
        localize=localize,
    )
