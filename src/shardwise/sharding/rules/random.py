"""Random operators: numbers are a function of seed, node, step and place in the whole tensor.

Every draw becomes a call of the runtime with the whole result's `shape`, the `splits` that give
this rank's part, and the node's name as `key`. The emitter adds the source of numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.ir import Ref
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Call, Local, LocalCall, NodeRule, whole_rule
from shardwise.sharding.rules.building_blocks import axes_of, passes
from shardwise.sharding.rules.elementwise import elementwise_rule
from shardwise.sharding.rules.factories import placed

Splits = tuple[tuple[str, int, tuple[tuple[int, int, int], ...]], ...]


def drawn(call: Call, local: Local, result: int = 0) -> tuple[tuple[str, Any], ...]:
    """`shape`, `splits` and `key` of a draw."""
    shards = local.result_layouts[result].shards
    splits: Splits = tuple((name, shard.dim, shard.of) for name, shard in shards)
    return (("shape", call.results[result]), ("splits", splits), ("key", call.node.name))


def random_rule(
    call: Call, fn: str, *args: Any, options: tuple[Any, ...] | None = None
) -> NodeRule:
    """Any axis of an operator that draws one number for each element may be cut."""

    def localize(call: Call, local: Local) -> LocalCall:
        made = () if options is None else (("options", options), *placed(call))
        return LocalCall(fn, args, (*drawn(call, local), *made))

    return replace(elementwise_rule(call), localize=localize)


@rule("aten.dropout", "aten.native_dropout", "aten.alpha_dropout")
def dropout(call: Call) -> NodeRule:
    """Without training or with p = 0 it is the identity."""
    x, p = call.get("input"), call.get("p")
    if call.get("train") is False or p == 0:
        return elementwise_rule(call, passes(call, 0) if len(call.results) == 1 else ())
    return random_rule(call, f"rt.{call.node.op.split('.')[1]}", x, p)


@rule("aten.feature_dropout", "aten.feature_alpha_dropout")
def feature_dropout(call: Call) -> NodeRule:
    """One number for each feature: the draw has the first two dims only."""
    x, p = call.get("input"), call.get("p")
    if not call.get("train") or p == 0:
        return elementwise_rule(call, passes(call, 0))
    fn = f"rt.{call.node.op.split('.')[1].removeprefix('feature_')}"

    def localize(call: Call, local: Local) -> LocalCall:
        given = dict(drawn(call, local))
        given["shape"] = call.results[0][:2]
        given["splits"] = tuple(split for split in given["splits"] if split[1] < 2)
        return LocalCall(fn, (x, p), tuple(given.items()))

    return replace(elementwise_rule(call), localize=localize)


def draw(call: Call, kind: str, *options: Any) -> NodeRule:
    """`rt.draw(kind, …)`, or `rt.draw_like(x, kind, …)` for an operator with a tensor operand."""
    like = [arg for arg in call.node.args[:1] if isinstance(arg, Ref)]
    if len(call.operands) > len(like):
        return whole_rule(call, "parameters of a distribution that are tensors")
    if like:
        return random_rule(call, "rt.draw_like", *like, kind, options=options)
    return random_rule(call, "rt.draw", kind, options=options)


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
    return draw(call, "randint", call.get("low", 0), call.get("high"))


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
    """Drawn whole, the same on every rank."""

    def localize(call: Call, local: Local) -> LocalCall:
        args = (call.get("self"), call.get("num_samples"), call.get("replacement", False))
        return LocalCall("rt.multinomial", args, (("key", call.node.name),))

    return replace(whole_rule(call, "samples of whole distributions"), localize=localize)


@rule("aten.randperm")
def randperm(call: Call) -> NodeRule:
    """A permutation is drawn whole."""
    axes, dims = axes_of(call.results[0], frozen=(0,))

    def localize(call: Call, local: Local) -> LocalCall:
        return LocalCall("rt.draw", ("randperm",), (*drawn(call, local), *placed(call)))

    return NodeRule(axes=axes, operands=(), results=(dims,), localize=localize)
