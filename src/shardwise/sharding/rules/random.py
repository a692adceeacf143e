"""Random operators: numbers are a function of seed, node, step and place in the whole tensor.

Every draw becomes a call of the runtime with the whole result's `shape`, the `splits` that give
this rank's part, and the node's name as `key`. The emitter adds the source of numbers.
"""

from __future__ import annotations

from typing import Any

from shardwise.ir import Ref
from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule
from shardwise.sharding.rules.axes import axes_of
from shardwise.sharding.rules.elementwise import elementwise_rule
from shardwise.sharding.rules.factories import placed

Splits = tuple[tuple[str, int, tuple[tuple[int, int, int], ...]], ...]


def drawn(call: Call, local: Local, result: int = 0) -> tuple[tuple[str, Any], ...]:
    """`shape`, `splits` and `key` of a draw."""
    shards = local.result_layouts[result].shards
    splits: Splits = tuple((name, shard.dim, shard.of) for name, shard in shards)
    return (("shape", call.results[result]), ("splits", splits), ("key", call.node.name))


def random_rule(call: Call, fn: str, *args: Any) -> NodeRule:
    """Any axis of an operator that draws one number for each element may be cut."""

    def localize(call: Call, local: Local) -> LocalCall:
        made = () if fn.endswith("dropout") else placed(call)
        return LocalCall(fn, args, (*drawn(call, local), *made))

    found = elementwise_rule(call)
    return NodeRule(
        axes=found.axes,
        operands=found.operands,
        results=found.results,
        whole=found.whole,
        localize=localize,
    )


@rule("aten.dropout")
def dropout(call: Call) -> NodeRule:
    """Without training or with p = 0 it is the identity."""
    if not call.get("train") or call.get("p") == 0:
        return elementwise_rule(call, (frozenset({0}),))
    return random_rule(call, "rt.dropout", call.get("input"), call.get("p"))


@rule("aten.native_dropout")
def native_dropout(call: Call) -> NodeRule:
    """The scaled values and the mask."""
    if call.get("train") is False:
        return elementwise_rule(call)
    return random_rule(call, "rt.native_dropout", call.get("input"), call.get("p"))


def draw(call: Call, kind: str, *parameters: Any) -> NodeRule:
    """`rt.draw(kind, …)`, or `rt.draw_like(x, kind, …)` for an operator with a tensor operand."""
    like = [arg for arg in call.node.args[:1] if isinstance(arg, Ref)]
    if like:
        return random_rule(call, "rt.draw_like", *like, kind, *parameters)
    return random_rule(call, "rt.draw", kind, *parameters)


@rule("aten.rand", "aten.rand_like")
def rand(call: Call) -> NodeRule:
    """Uniform in [0, 1)."""
    return draw(call, "uniform", 0.0, 1.0)


@rule("aten.randn", "aten.randn_like")
def randn(call: Call) -> NodeRule:
    """Standard normal."""
    return draw(call, "normal", 0.0, 1.0)


@rule("aten.randint", "aten.randint_like")
def randint(call: Call) -> NodeRule:
    """Integers in [low, high)."""
    return draw(call, "integer", call.get("low", 0), call.get("high"))


@rule("aten.uniform")
def uniform(call: Call) -> NodeRule:
    """Uniform in [from, to)."""
    return draw(call, "uniform", call.get("from", 0.0), call.get("to", 1.0))


@rule("aten.normal_functional")
def normal(call: Call) -> NodeRule:
    """Normal with mean and standard deviation."""
    return draw(call, "normal", call.get("mean", 0.0), call.get("std", 1.0))


@rule("aten.exponential")
def exponential(call: Call) -> NodeRule:
    """Exponential with a rate."""
    return draw(call, "exponential", call.get("lambd", 1.0))


@rule("aten.bernoulli")
def bernoulli(call: Call) -> NodeRule:
    """One with probability p, or with each element's own probability."""
    if call.get("p") is not None:
        return draw(call, "bernoulli", call.get("p"))
    return random_rule(call, "rt.bernoulli", call.get("self"))


@rule("aten.multinomial")
def multinomial(call: Call) -> NodeRule:
    """Samples of every row; the categories stay whole."""
    source = call.operands[0]
    axes, dims = axes_of(source, frozen=(len(source) - 1,))
    axes["samples"] = Axis("samples", call.results[0][-1], frozen=True)
    result: Dims = (*dims[:-1], ("samples",))

    def localize(call: Call, local: Local) -> LocalCall:
        args = (call.get("self"), call.get("num_samples"), call.get("replacement", False))
        splits = dict(drawn(call, local))["splits"]
        given = (("shape", source), ("splits", splits), ("key", call.node.name))
        return LocalCall("rt.multinomial", args, given)

    return NodeRule(axes=axes, operands=(dims,), results=(result,), localize=localize)


@rule("aten.randperm")
def randperm(call: Call) -> NodeRule:
    """A permutation is drawn whole."""
    axes, dims = axes_of(call.results[0], frozen=(0,))

    def localize(call: Call, local: Local) -> LocalCall:
        return LocalCall("rt.draw", ("permutation",), (*drawn(call, local), *placed(call)))

    return NodeRule(axes=axes, operands=(), results=(dims,), localize=localize)


keep_whole(
    "it draws one number for each feature, not for each element",
    "aten.feature_dropout",
    "aten.alpha_dropout",
    "aten.feature_alpha_dropout",
)
