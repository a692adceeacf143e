"""Convolution, pooling, resampling and recurrent layers.

Batch and output channels of a convolution are free, and input channels are summed over; with groups
the channel dims are products `groups x channels`. Spatial dims are never sharded. Pooling and
resampling leave batch and channels free, recurrent layers only the batch.
"""

from functools import partial

from shardwise.ir import Ref, iter_refs
from shardwise.packed import PACKED_LAYER
from shardwise.sharding.registry import keep_replicated, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dims,
    Local,
    LocalCall,
    NodeRule,
    RuleFunction,
    replicated_rule,
)
from shardwise.sharding.rules.building_blocks import (
    axes_of,
    each,
    frozen_axes,
    guard_empty,
    guarded,
    is_float,
    linear_rule,
    operand_dims,
    positions,
)


@rule("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
@rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def convolution(call: Call) -> NodeRule:
    """Apply to all convolutions; a transposed one has the weight's channel dims in reverse."""
    source, weight, result = call.shape("input"), call.shape("weight"), call.results[0]
    rank = len(weight)
    if len(source) not in (rank, rank - 1):
        return replicated_rule(call, "an input of unexpected rank")
    groups = int(call.get("groups", 1))
    transposed = _is_transposed(call)
    space = rank - 2
    batched = len(source) == rank
    incoming = (weight[0] // groups) if transposed else weight[1]
    outgoing = weight[1] if transposed else weight[0] // groups
    axes = {"g": Axis("g", groups), "i": Axis("i", incoming), "o": Axis("o", outgoing)}
    spaces: list[Dims] = []
    for prefix, sizes in (("x", source[-space:]), ("k", weight[2:]), ("y", result[-space:])):
        more, names = axes_of(sizes, prefix, frozen=range(space))
        axes |= more
        spaces.append(names)
    if batched:
        axes["n"] = Axis("n", source[0])
    lead: Dims = (("n",),) if batched else ()
    inner, outer = (("g", name) if groups > 1 else (name,) for name in "io")
    channels: Dims = (inner, ("o",)) if transposed else (outer, ("i",))
    source_dims: Dims = (*lead, inner, *spaces[0])
    added = frozenset(positions(call, "bias"))
    return NodeRule(
        axes,
        operand_dims(call, input=source_dims, weight=(*channels, *spaces[1]), bias=(outer,)),
        ((*lead, outer, *spaces[2]),),
        linear=tuple(frozenset({call.position(n)}) | added for n in ("input", "weight")),
        additive=added,
        localize=_local_convolution,
    )


def _is_transposed(call: Call) -> bool:
    return "transpose" in call.node.op or bool(call.get("transposed", False))


def _local_convolution(call: Call, local: Local) -> LocalCall:
    """Pass the local number of groups; a rank without channels adds nothing."""
    empty = guard_empty(call, local)
    if empty is not None:
        return empty
    weight = local.operands[call.position("weight")]
    result = local.results[0]
    channel_dim = len(result) - len(weight) + 1
    if 0 in weight:  # without input channels a rank adds at most its term of the bias
        args = (result, call.types[call.node.outputs[0]].dtype, call.get("input"))
        options = (("bias", call.get("bias")),) if isinstance(call.get("bias"), Ref) else ()
        return LocalCall("rt.no_channels", (*args, call.get("weight")), options)
    groups = int(call.get("groups", 1))
    if "g" not in local.sharded:
        return call.replace()
    if _is_transposed(call):
        own = result[channel_dim] // weight[1]
    else:
        own = local.operands[call.position("input")][channel_dim] // weight[1]
    return call.replace(groups=own) if own != groups else call.replace()


keep_replicated("its size argument has the batch size", "aten.affine_grid_generator")
keep_replicated(
    "pools at random places", "aten.fractional_max_pool2d", "aten.fractional_max_pool3d"
)
keep_replicated("frames of a full signal", "aten.stft", "aten.istft")


def trailing(count: int, *, linear: bool) -> RuleFunction:
    """Return a rule that freezes the last `count` dims and leaves the others free."""

    def apply(call: Call) -> NodeRule:
        shape = call.operands[0]
        free = len(shape) - count
        if len(call.operands) > 1 or any(s[:free] != shape[:free] for s in call.results):
            return replicated_rule(call, "operands of unexpected shapes")
        axes, lead = axes_of(shape[:free])
        source, before = axes_of(shape[free:], "x", frozen=range(count))
        target, after = axes_of(call.results[0][free:], "y", frozen=range(count))
        return NodeRule(
            axes | source | target,
            ((*lead, *before),),
            tuple((*lead, *after) for _ in call.results),
            linear=(frozenset({0}),) if linear and is_float(call) else (),
            localize=guarded(),
        )

    return apply


LINEAR = """
    avg_pool{0}d adaptive_avg_pool{0}d _adaptive_avg_pool{0}d upsample_nearest{0}d
    _upsample_nearest_exact{0}d reflection_pad{0}d replication_pad{0}d
"""
MAXIMA = "max_pool{0}d adaptive_max_pool{0}d max_pool{0}d_with_indices"
INTERPOLATIONS = {
    1: "upsample_linear1d",
    2: "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    3: "upsample_trilinear3d",
}
for _n, _names in INTERPOLATIONS.items():
    _linear = (*LINEAR.format(_n).split(), *_names.split())
    rule(*(f"aten.{name}" for name in _linear))(trailing(_n, linear=True))
    rule(*(f"aten.{name}" for name in MAXIMA.format(_n).split()))(trailing(_n, linear=False))


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(call: Call) -> NodeRule:
    """Sample a plane at the grid's points: batch, channels and points are free."""
    source, grid = call.shape("input"), call.shape("grid")
    space, plane = axes_of(source[2:], "x", frozen=range(len(source)))
    samples, points = axes_of(grid[1:-1], "p")
    axes = {"n": Axis("n", source[0]), "c": Axis("c", source[1]), **space, **samples}
    axes["q"] = Axis("q", grid[-1], frozen=True)
    return NodeRule(
        axes,
        operand_dims(call, input=(("n",), ("c",), *plane), grid=(("n",), *points, ("q",))),
        ((("n",), ("c",), *points),),
        linear=(frozenset({call.position("input")}),),
        localize=guarded(),
    )


@rule("aten.pixel_shuffle", "aten.pixel_unshuffle")
def pixel_shuffle(call: Call) -> NodeRule:
    """Rearrange `(c r q) h w -> c (h r) (w q)`, or back."""
    small = call.operands[0] if "unshuffle" not in call.node.op else call.results[0]
    factor = call.get("upscale_factor") or call.get("downscale_factor")
    *lead, channels, height, width = small
    axes, batch = axes_of(lead, "b")
    sizes = {"c": channels // factor**2, "h": height, "w": width}
    axes |= {name: Axis(name, size) for name, size in sizes.items()}
    axes |= frozen_axes({"r": factor, "q": factor})
    deep: Dims = (*batch, ("c", "r", "q"), ("h",), ("w",))
    wide: Dims = (*batch, ("c",), ("h", "r"), ("w", "q"))
    source, result = (deep, wide) if small is call.operands[0] else (wide, deep)
    return linear_rule(call, axes, source, result, localize=guarded())


@rule("aten.channel_shuffle")
def channel_shuffle(call: Call) -> NodeRule:
    """Rearrange `n (g c) … -> n (c g) …`: the channels of a group are free."""
    shape, groups = call.operands[0], call.get("groups")
    axes = {f"d{i}": Axis(f"d{i}", n) for i, n in enumerate(shape) if i != 1}
    axes |= {"g": Axis("g", groups, frozen=True), "c": Axis("c", shape[1] // groups)}
    space = each(f"d{i}" for i in range(2, len(shape)))
    return linear_rule(
        call, axes, (("d0",), ("g", "c"), *space), (("d0",), ("c", "g"), *space), localize=guarded()
    )


@rule("aten.im2col", "aten.col2im")
def columns(call: Call) -> NodeRule:
    """Leave batch and channels free of patches as columns: `c h w -> (c k) y`, or back."""
    plane, table = call.operands[0], call.results[0]
    back = "col2im" in call.node.op
    if back:
        plane, table = table, plane
    axes, batch = axes_of(plane[:-3], "b")
    axes |= frozen_axes(
        {"k": table[-2] // max(plane[-3], 1), "y": table[-1], "h": plane[-2], "w": plane[-1]}
    )
    axes["c"] = Axis("c", plane[-3])
    flat: Dims = (*batch, ("c", "k"), ("y",))
    full: Dims = (*batch, ("c",), ("h",), ("w",))
    return linear_rule(
        call, axes, flat if back else full, full if back else flat, localize=guarded()
    )


LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
keep_replicated("packed sequences of different lengths", *(f"aten.{name}.data" for name in LAYERS))


def _frozen_but_batch(
    axes: dict[str, Axis], prefix: str, shape: tuple[int, ...], batch_dim: int | None
) -> Dims:
    """Return frozen dims, except the batch; add their axes."""
    names = [f"{prefix}{d}" for d in range(len(shape))]
    if batch_dim is not None:
        names[batch_dim] = "b"
    for name, size in zip(names, shape, strict=True):
        axes.setdefault(name, Axis(name, size, frozen=True))
    return each(names)


@rule(*(f"aten.{name}.input" for name in LAYERS))
def recurrent(call: Call) -> NodeRule:
    """Freeze all but the batch of `(input, hx, params, …) -> (output, h, c)`."""
    source = call.shape("input")
    if len(source) != 3:
        return replicated_rule(call, "a sequence without a batch")
    if call.get("dropout") and call.get("train"):
        return replicated_rule(call, "draws its dropout inside the operator")
    batch_dim = 0 if call.get("batch_first") else 1
    axes = {"b": Axis("b", source[batch_dim])}

    frozen = partial(_frozen_but_batch, axes)
    states = [frozen(f"h{i}_", call.shape(r), 1) for i, r in enumerate(iter_refs(call.get("hx")))]
    params = list(iter_refs(call.get("params")))
    weights = [frozen(f"p{i}_", call.shape(ref), None) for i, ref in enumerate(params)]
    hidden = states if isinstance(call.get("hx"), tuple | list) else states[0]
    return NodeRule(
        axes,
        operand_dims(call, input=frozen("x", source, batch_dim), hx=hidden, params=weights),
        tuple(
            frozen(f"y{i}_", shape, 1 if i else batch_dim) for i, shape in enumerate(call.results)
        ),
    )


@rule(PACKED_LAYER)
def packed_recurrent(call: Call) -> NodeRule:
    """Shard the batch of `(x, lengths, states, weights) -> (output, states)`."""
    rows = call.operands[0][0]
    axes = {"b": Axis("b", rows)}
    num_states = len(call.results) - 1

    dims = partial(_frozen_but_batch, axes)
    batch_dims = [0, 0, *[1] * num_states, *[None] * (len(call.operands) - 2 - num_states)]
    operands = zip(call.operands, batch_dims, strict=True)
    return NodeRule(
        axes=axes,
        operands=tuple(dims(f"o{i}_", shape, dim) for i, (shape, dim) in enumerate(operands)),
        results=tuple(dims(f"y{i}_", shape, 1 if i else 0) for i, shape in enumerate(call.results)),
    )
