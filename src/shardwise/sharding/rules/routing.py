"""Rules of tokens routed to experts (see `shardwise.routing`).

The ragged dim of rows is the product `("e", "t", "k")`. Sharding tokens gives every rank the rows
of its own tokens, and partial counts; sharding experts the rows of its own experts. Moves between
the two exchange rows (`to_experts`, `to_tokens`), so that routing itself never shards experts.
"""

from shardwise.routing import COLLECT, DISPATCH, GROUPED_LINEAR, ROUTE
from shardwise.sharding.registry import rule
from shardwise.sharding.rule import Axis, Call, Dim, Local, LocalCall, NodeRule
from shardwise.sharding.rules.building_blocks import axes_of, each, op_name, operand_dims, positions

ROWS: Dim = ("e", "t", "k")


def _axes(experts: int, tokens: int, top_k: int, *, counts: int | None = None) -> dict[str, Axis]:
    """Return the axes of the rows; `counts` is the position of an operand that counts them."""
    return {
        "e": Axis("e", experts, outermost=True, once=True),
        "t": Axis("t", tokens, counts=frozenset() if counts is None else frozenset({counts})),
        "k": Axis("k", top_k, frozen=True),
    }


def _local(call: Call, local: Local) -> LocalCall:
    return LocalCall(f"rt.{op_name(call)}", call.node.args, call.node.kwargs)


@rule(ROUTE)
def route(call: Call) -> NodeRule:
    """Sort the pairs of each rank's tokens."""
    tokens, top_k = call.shape("ids")
    axes = _axes(call.get("num_experts"), tokens, top_k)
    axes["e"] = Axis("e", call.get("num_experts"), frozen=True)
    return NodeRule(axes, (each("tk"),), ((ROWS,), each("e")), localize=_local)


@rule(DISPATCH)
def dispatch(call: Call) -> NodeRule:
    """Read the token of every row."""
    tokens, top_k = call.shape("x")[0], call.get("top_k")
    experts = call.shape("order")[0] // max(tokens * top_k, 1)
    more, features = axes_of(call.shape("x")[1:], "h")
    return NodeRule(
        _axes(experts, tokens, top_k) | more,
        ((("t",), *features), (ROWS,)),
        ((ROWS, *features),),
        linear=(frozenset({0}),),
        localize=_local,
    )


@rule(GROUPED_LINEAR)
def grouped_linear(call: Call) -> NodeRule:
    """Multiply rows by the matrix of their expert; a bias counts once if the sum is sharded."""
    (rows, size), weight = call.shape("rows"), call.shape("weight")
    transposed = bool(call.get("transposed"))
    axes = _axes(weight[0], rows // max(weight[0], 1), 1, counts=call.position("counts"))
    axes |= {"n": Axis("n", size), "m": Axis("m", weight[2 if transposed else 1])}
    row: Dim = ("e", "t")  # tokens and their choices
    operands = operand_dims(
        call,
        rows=(row, ("n",)),
        weight=each("enm" if transposed else "emn"),
        counts=each("e"),
        bias=each("em"),
    )
    additive = frozenset(positions(call, "bias"))
    return NodeRule(
        axes,
        operands,
        ((row, ("m",)),),
        linear=() if additive else (frozenset({0}),),
        additive=additive,
        localize=_local,
    )


@rule(COLLECT)
def collect(call: Call) -> NodeRule:
    """Return rows to their tokens; with experts sharded, each rank has its experts' terms."""
    (tokens, top_k), rows = call.shape("ids"), call.shape("rows")
    more, features = axes_of(rows[1:], "h")
    return NodeRule(
        _axes(rows[0] // max(tokens * top_k, 1), tokens, top_k) | more,
        ((ROWS, *features), (ROWS,), each("tk")),
        ((("t",), ("k",), *features),),
        linear=(frozenset({0}),),
        localize=_local,
    )
