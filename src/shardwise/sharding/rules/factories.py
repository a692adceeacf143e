"""Tensors created from sizes: constants, ranges, and random numbers.

A shard has its own sizes, or its own offset. Random numbers are a function of seed, node, step and
position in the full tensor: every draw becomes a call of the runtime with the full result's
`shape`, the `splits` that give this rank's part, and the node's name as `key`. The emitter adds the
source of numbers.
"""

from dataclasses import replace
from typing import Any

from shardwise.ir import Ref
from shardwise.sharding.registry import keep_replicated, rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule, replicated_rule
from shardwise.sharding.rules.building_blocks import (
    axes_of,
    frozen_axes,
    linear_rule,
    op_name,
    passes,
    single_shard,
)
from shardwise.sharding.rules.elementwise import elementwise_rule


@rule("aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.scalar_tensor")
def constant(call: Call) -> NodeRule:
    """Pass the local size."""
    axes, dims = axes_of(call.results[0])
    operands: tuple[Dims, ...] = tuple(() for _ in call.operands)  # a fill value
    size = "size" if "size" in call.arguments else None
    return NodeRule(axes, operands, (dims,), size_arg=size)


@rule("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
def constant_like(call: Call) -> NodeRule:
    """Shard the result like the operand."""
    axes, dims = axes_of(call.results[0])
    zeros = call.node.op.startswith("aten.zeros_like")
    return NodeRule(
        axes,
        (dims, *(() for _ in call.operands[1:])),
        (dims,),
        linear=passes(call, 0) if zeros else (),
    )


@rule("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
@rule("aten.new_empty_strided", "aten.empty_strided", "aten.empty_permuted")
def constant_new(call: Call) -> NodeRule:
    """Use only dtype and device of the operand.

    Dims with the size of the result's dim at the same place are sharded together with it, so that
    an operand that is sharded already is not gathered for nothing.
    """
    target = call.results[0]
    axes, dims = axes_of(target)
    operands = []
    for shape in call.operands:
        shared = [d < len(target) and size == target[d] for d, size in enumerate(shape)]
        own = {f"o{d}": size for d, size in enumerate(shape) if not shared[d]}
        axes |= {name: Axis(name, size, reduce="same") for name, size in own.items()}
        operands.append(tuple(dims[d] if s else (f"o{d}",) for d, s in enumerate(shared)))
    strided = "strided" in call.node.op or "permuted" in call.node.op
    if strided:
        axes = frozen_axes({name: axis.size for name, axis in axes.items()})
    return NodeRule(axes, tuple(operands), (dims,), size_arg=None if strided else "size")


def placed(call: Call) -> tuple[tuple[str, Any], ...]:
    """Return the dtype and device arguments of a call that makes a tensor."""
    return (("dtype", call.types[call.node.outputs[0]].dtype), ("device", call.get("device")))


def vector_rule(call: Call, fn: str, *args: Any) -> NodeRule:
    """Return the rule of a vector; if a mesh axis shards it, `fn` computes each rank's part."""
    axes, dims = axes_of(call.results[0])
    axes["d0"] = replace(axes["d0"], once=True)

    def localize(call: Call, local: Local) -> LocalCall:
        shard = single_shard(local, local.result_layouts[0], "d0", 0)
        return call.replace() if shard is None else LocalCall(fn, (*args, *shard), placed(call))

    operands: tuple[Dims, ...] = tuple(() for _ in call.operands)
    return NodeRule(axes, operands, (dims,), localize=localize)


@rule("aten.arange")
def arange(call: Call) -> NodeRule:
    """Compute `start + step * i` for the positions i of the shard."""
    return vector_rule(call, "rt.arange", call.get("start", 0), call.get("step", 1))


@rule("aten.linspace")
def linspace(call: Call) -> NodeRule:
    """Compute evenly spaced numbers; the ends may be tensors."""
    return vector_rule(call, "rt.linspace", *(call.get(n) for n in ("start", "end", "steps")))


def matrix_shards(local: Local, rank: int) -> tuple[tuple[str, Any], ...]:
    """Return `row_of, row_axis, column_of, column_axis` of the last dims that are sharded."""
    shards: list[tuple[str, Any]] = []
    for label, dim in (("row", rank - 2), ("column", rank - 1)):
        shard = single_shard(local, local.result_layouts[0], f"d{dim}", dim)
        if shard is not None:
            shards += [(f"{label}_of", shard[0]), (f"{label}_axis", shard[1])]
    return tuple(shards)


def matrix_axes(shape: tuple[int, ...]) -> tuple[dict[str, Axis], Dims]:
    """Return free dims, of which one mesh axis at most shards each of the last two."""
    axes, dims = axes_of(shape)
    for d in (len(shape) - 2, len(shape) - 1):
        axes[f"d{d}"] = Axis(f"d{d}", shape[d], once=True)
    return axes, dims


@rule("aten.eye")
def eye(call: Call) -> NodeRule:
    """Put ones where the row and column in the full matrix are equal."""
    axes, dims = matrix_axes(call.results[0])

    def localize(call: Call, local: Local) -> LocalCall:
        shards = matrix_shards(local, 2)
        if not shards:
            return call.replace()
        return LocalCall("rt.eye", call.results[0], (*shards, *placed(call)))

    return NodeRule(axes, (), (dims,), localize=localize)


@rule("aten.tril", "aten.triu")
def triangle(call: Call) -> NodeRule:
    """Take a triangle of the last two dims, given the offset of the shard."""
    shape = call.operands[0]
    axes, dims = matrix_axes(shape)

    def localize(call: Call, local: Local) -> LocalCall:
        shards = matrix_shards(local, len(shape))
        if not shards:
            return call.replace()
        args = (call.get("self"), call.get("diagonal", 0))
        return LocalCall(f"rt.{op_name(call)}", args, shards)

    return linear_rule(call, axes, dims, dims, localize=localize)


keep_replicated(
    "a small table of positions that every rank makes for itself",
    *("aten.tril_indices", "aten.triu_indices", "aten.logspace", "aten.range", "aten.vander"),
    *("aten.hann_window", "aten.hamming_window", "aten.cartesian_prod", "aten.combinations"),
)

# ---------------------------------------------------------------- random numbers
Splits = tuple[tuple[str, int, tuple[tuple[int, int, int], ...]], ...]


def draw_options(call: Call, local: Local, result: int = 0) -> tuple[tuple[str, Any], ...]:
    """Return `shape`, `splits` and `key` of a draw."""
    shards = local.result_layouts[result].shards
    splits: Splits = tuple((name, shard.dim, shard.of) for name, shard in shards)
    return (("shape", call.results[result]), ("splits", splits), ("key", call.node.name))


def random_rule(
    call: Call, fn: str, *args: Any, options: tuple[Any, ...] | None = None
) -> NodeRule:
    """Return the rule of an operator that draws one number for each element: all axes are free."""

    def localize(call: Call, local: Local) -> LocalCall:
        factory_options = () if options is None else (("options", options), *placed(call))
        return LocalCall(fn, args, (*draw_options(call, local), *factory_options))

    return replace(elementwise_rule(call), localize=localize)


@rule("aten.dropout", "aten.native_dropout", "aten.alpha_dropout")
def dropout(call: Call) -> NodeRule:
    """Draw a number for each element; without training or with p = 0 it is the identity."""
    x, p = call.get("input"), call.get("p")
    if call.get("train") is False or p == 0:
        return elementwise_rule(call, passes(call, 0) if len(call.results) == 1 else ())
    return random_rule(call, f"rt.{op_name(call)}", x, p)


@rule("aten.feature_dropout", "aten.feature_alpha_dropout")
def feature_dropout(call: Call) -> NodeRule:
    """Draw a number for each feature: the draw has the first two dims only."""
    x, p = call.get("input"), call.get("p")
    if not call.get("train") or p == 0:
        return elementwise_rule(call, passes(call, 0))
    fn = f"rt.{op_name(call).removeprefix('feature_')}"

    def localize(call: Call, local: Local) -> LocalCall:
        options = dict(draw_options(call, local))
        options["shape"] = call.results[0][:2]
        options["splits"] = tuple(split for split in options["splits"] if split[1] < 2)
        return LocalCall(fn, (x, p), tuple(options.items()))

    return replace(elementwise_rule(call), localize=localize)


def draw(call: Call, kind: str, *options: Any) -> NodeRule:
    """Return the rule of `rt.draw(kind, …)`, or of `rt.draw_like(x, kind, …)` given a tensor."""
    template = [arg for arg in call.node.args[:1] if isinstance(arg, Ref)]
    if len(call.operands) > len(template):
        return replicated_rule(call, "parameters of a distribution that are tensors")
    if template:
        return random_rule(call, "rt.draw_like", *template, kind, options=options)
    return random_rule(call, "rt.draw", kind, options=options)


# Operator -> kind of distribution, and its parameters: argument names with defaults.
DISTRIBUTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rand": ("uniform", {"from": 0.0, "to": 1.0}),
    "randn": ("normal", {"mean": 0.0, "std": 1.0}),
    "randint": ("randint", {"low": 0, "high": None}),
    "uniform": ("uniform", {"from": 0.0, "to": 1.0}),
    "normal_functional": ("normal", {"mean": 0.0, "std": 1.0}),
    "exponential": ("exponential", {"lambd": 1.0}),
}


@rule(*(f"aten.{name}" for name in DISTRIBUTIONS))
@rule("aten.rand_like", "aten.randn_like", "aten.randint_like")
def distribution(call: Call) -> NodeRule:
    """Draw from a distribution with constant parameters."""
    kind, parameters = DISTRIBUTIONS[op_name(call).removesuffix("_like")]
    return draw(call, kind, *(call.get(name, default) for name, default in parameters.items()))


@rule("aten.bernoulli")
def bernoulli(call: Call) -> NodeRule:
    """Draw one with probability p, or with each element's own probability."""
    if call.get("p") is not None:
        return draw(call, "bernoulli", call.get("p"))
    return random_rule(call, "rt.bernoulli", call.get("self"))


@rule("aten.multinomial")
def multinomial(call: Call) -> NodeRule:
    """Draw in full, the same on every rank."""

    def localize(call: Call, local: Local) -> LocalCall:
        args = (call.get("self"), call.get("num_samples"), call.get("replacement", False))
        return LocalCall("rt.multinomial", args, (("key", call.node.name),))

    return replace(replicated_rule(call, "samples of full distributions"), localize=localize)


@rule("aten.randperm")
def randperm(call: Call) -> NodeRule:
    """Draw a permutation in full."""
    axes, dims = axes_of(call.results[0], frozen=(0,))

    def localize(call: Call, local: Local) -> LocalCall:
        return LocalCall("rt.draw", ("randperm",), (*draw_options(call, local), *placed(call)))

    return NodeRule(axes, (), (dims,), localize=localize)
