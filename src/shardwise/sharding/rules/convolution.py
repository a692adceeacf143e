"""Convolutions: batch and output channels are free, input channels are summed over.

With groups the channel dims are products `groups x channels`. Space is not cut.
"""

from __future__ import annotations

from shardwise.ir import Ref
from shardwise.sharding.build import each, guard_empty, operand_dims, positions
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dims, Local, LocalCall, NodeRule, whole_rule


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def convolution(call: Call) -> NodeRule:
    """All convolutions; a transposed one has the weight's channel dims the other way round."""
    source, weight, result = call.shape("input"), call.shape("weight"), call.results[0]
    rank = len(weight)
    if len(source) not in (rank, rank - 1):
        return whole_rule(call, "an input of unexpected rank")
    groups = int(call.get("groups", 1))
    transposed = _is_transposed(call)
    space = rank - 2
    batched = len(source) == rank
    incoming = (weight[0] // groups) if transposed else weight[1]
    outgoing = weight[1] if transposed else weight[0] // groups
    axes = {
        "g": Axis("g", groups),
        "i": Axis("i", incoming),
        "o": Axis("o", outgoing),
        **{f"x{d}": Axis(f"x{d}", n, frozen=True) for d, n in enumerate(source[-space:])},
        **{f"k{d}": Axis(f"k{d}", n, frozen=True) for d, n in enumerate(weight[2:])},
        **{f"y{d}": Axis(f"y{d}", n, frozen=True) for d, n in enumerate(result[-space:])},
    }
    if batched:
        axes["n"] = Axis("n", source[0])
    lead: Dims = (("n",),) if batched else ()
    inner, outer = _channels(groups, "i"), _channels(groups, "o")
    channels: Dims = (inner, ("o",)) if transposed else (outer, ("i",))
    dims: dict[str, Dims] = {
        "input": (*lead, inner, *each(f"x{d}" for d in range(space))),
        "weight": (*channels, *each(f"k{d}" for d in range(space))),
        "bias": (outer,),
    }
    added = positions(call, "bias")
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=((*lead, outer, *each(f"y{d}" for d in range(space))),),
        linear=tuple(frozenset({call.position(n)}) | added for n in ("input", "weight")),
        additive=added,
        localize=_localize,
    )


def _is_transposed(call: Call) -> bool:
    return "transpose" in call.node.op or bool(call.get("transposed", False))


def _channels(groups: int, name: str) -> tuple[str, ...]:
    return ("g", name) if groups > 1 else (name,)


def _localize(call: Call, local: Local) -> LocalCall:
    """Fewer groups where they are cut; a rank without channels adds nothing."""
    empty = guard_empty(call, local)
    if empty is not None:
        return empty
    weight = local.operands[call.position("weight")]
    result = local.results[0]
    channel_dim = len(result) - len(weight) + 1
    if 0 in weight:  # no input channels: what other ranks give, and the bias's own term
        args = (result, call.types[call.node.outputs[0]].dtype, call.get("input"))
        options = (("bias", call.get("bias")),) if isinstance(call.get("bias"), Ref) else ()
        return LocalCall("rt.no_channels", (*args, call.get("weight")), options)
    groups = int(call.get("groups", 1))
    if "g" not in local.cuts:
        return call.replace()
    if _is_transposed(call):
        own = result[channel_dim] // weight[1]
    else:
        own = local.operands[call.position("input")][channel_dim] // weight[1]
    return call.replace(groups=own) if own != groups else call.replace()
