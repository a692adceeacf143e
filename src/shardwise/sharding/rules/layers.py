"""Convolution, pooling, resampling, transforms and recurrent layers.

Of convolutions, batch and output channels are free and input channels are summed over; with groups
the channel dims are products `groups x channels`. Space is not sharded. Pooling, resampling and
transforms keep their dims full and leave batch and channels free. Of recurrent layers only the
batch is free.
"""

from __future__ import annotations

from shardwise.ir import Ref, iter_refs
from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dims,
    Local,
    LocalCall,
    NodeRule,
    RuleFunction,
    whole_rule,
)
from shardwise.sharding.rules.building_blocks import (
    each,
    guard_empty,
    guarded,
    is_float,
    operand_dims,
    positions,
)


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


keep_whole("its size argument has the batch size", "aten.affine_grid_generator")
keep_whole("pools at random places", "aten.fractional_max_pool2d", "aten.fractional_max_pool3d")
keep_whole("frames of a whole signal", "aten.stft", "aten.istft")


def trailing(count: int, *, linear: bool) -> RuleFunction:
    """A rule that keeps the last `count` dims whole and leaves the others free."""

    def apply(call: Call) -> NodeRule:
        shape = call.operands[0]
        kept = len(shape) - count
        if len(call.operands) > 1 or any(s[:kept] != shape[:kept] for s in call.results):
            return whole_rule(call, "operands of unexpected shapes")
        axes = {f"d{i}": Axis(f"d{i}", n) for i, n in enumerate(shape[:kept])}
        lead = each(axes)
        inside = {f"x{i}": n for i, n in enumerate(shape[kept:])}
        outside = {f"y{i}": n for i, n in enumerate(call.results[0][kept:])}
        axes |= {name: Axis(name, n, frozen=True) for name, n in (inside | outside).items()}
        return NodeRule(
            axes=axes,
            operands=((*lead, *each(inside)),),
            results=tuple((*lead, *each(outside)) for _ in call.results),
            linear=(frozenset({0}),) if linear and is_float(call) else (),
            localize=guarded(),
        )

    return apply


for _n in (1, 2, 3):
    rule(f"aten.avg_pool{_n}d", f"aten.adaptive_avg_pool{_n}d", f"aten._adaptive_avg_pool{_n}d")(
        trailing(_n, linear=True)
    )
    rule(f"aten.max_pool{_n}d", f"aten.adaptive_max_pool{_n}d")(trailing(_n, linear=False))
    rule(f"aten.max_pool{_n}d_with_indices")(trailing(_n, linear=False))
    rule(f"aten.upsample_nearest{_n}d", f"aten._upsample_nearest_exact{_n}d")(
        trailing(_n, linear=True)
    )
    rule(f"aten.reflection_pad{_n}d", f"aten.replication_pad{_n}d")(trailing(_n, linear=True))
rule("aten.upsample_linear1d")(trailing(1, linear=True))
rule("aten.upsample_trilinear3d")(trailing(3, linear=True))
rule(
    "aten.upsample_bilinear2d",
    "aten.upsample_bicubic2d",
    "aten._upsample_bilinear2d_aa",
    "aten._upsample_bicubic2d_aa",
)(trailing(2, linear=True))


@rule("aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d")
def grid_sampler(call: Call) -> NodeRule:
    """Samples a plane at the grid's points: batch, channels and points are free."""
    source, grid = call.shape("input"), call.shape("grid")
    points = [f"p{i}" for i in range(len(grid) - 2)]
    axes = {
        "n": Axis("n", source[0]),
        "c": Axis("c", source[1]),
        **{f"x{i}": Axis(f"x{i}", n, frozen=True) for i, n in enumerate(source[2:])},
        **{p: Axis(p, n) for p, n in zip(points, grid[1:-1], strict=True)},
        "q": Axis("q", grid[-1], frozen=True),
    }
    dims: dict[str, Dims] = {
        "input": (("n",), ("c",), *each(f"x{i}" for i in range(len(source) - 2))),
        "grid": (("n",), *each(points), ("q",)),
    }
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=((("n",), ("c",), *each(points)),),
        linear=(frozenset({call.position("input")}),),
        localize=guarded(),
    )


@rule("aten.pixel_shuffle", "aten.pixel_unshuffle")
def pixel_shuffle(call: Call) -> NodeRule:
    """`(c r q) h w -> c (h r) (w q)`, or back."""
    small = call.operands[0] if "unshuffle" not in call.node.op else call.results[0]
    factor = call.get("upscale_factor") or call.get("downscale_factor")
    *lead, channels, height, width = small
    axes = {f"b{i}": Axis(f"b{i}", n) for i, n in enumerate(lead)}
    batch = each(axes)
    axes |= {
        "c": Axis("c", channels // factor**2),
        "h": Axis("h", height),
        "w": Axis("w", width),
        "r": Axis("r", factor, frozen=True),
        "q": Axis("q", factor, frozen=True),
    }
    deep: Dims = (*batch, ("c", "r", "q"), ("h",), ("w",))
    wide: Dims = (*batch, ("c",), ("h", "r"), ("w", "q"))
    source, result = (deep, wide) if small is call.operands[0] else (wide, deep)
    return NodeRule(
        axes=axes,
        operands=(source,),
        results=(result,),
        linear=(frozenset({0}),),
        localize=guarded(),
    )


@rule("aten.channel_shuffle")
def channel_shuffle(call: Call) -> NodeRule:
    """`n (g c) … -> n (c g) …`: the channels of a group are free."""
    shape, groups = call.operands[0], call.get("groups")
    axes = {f"d{i}": Axis(f"d{i}", n) for i, n in enumerate(shape) if i != 1}
    axes |= {"g": Axis("g", groups, frozen=True), "c": Axis("c", shape[1] // groups)}
    rest = each(f"d{i}" for i in range(2, len(shape)))
    return NodeRule(
        axes=axes,
        operands=((("d0",), ("g", "c"), *rest),),
        results=((("d0",), ("c", "g"), *rest),),
        linear=(frozenset({0}),),
        localize=guarded(),
    )


@rule("aten.im2col", "aten.col2im")
def columns(call: Call) -> NodeRule:
    """Patches of a plane as columns `(c k)`, or back: batch and channels are free."""
    plane, table = call.operands[0], call.results[0]
    if "col2im" in call.node.op:
        plane, table = table, plane
    lead = plane[:-3]
    axes = {f"b{i}": Axis(f"b{i}", n) for i, n in enumerate(lead)}
    batch = each(axes)
    frozen = {"k": table[-2] // max(plane[-3], 1), "y": table[-1], "h": plane[-2], "w": plane[-1]}
    axes |= {name: Axis(name, n, frozen=True) for name, n in frozen.items()}
    axes["c"] = Axis("c", plane[-3])
    flat: Dims = (*batch, ("c", "k"), ("y",))
    full: Dims = (*batch, ("c",), ("h",), ("w",))
    back = "col2im" in call.node.op
    return NodeRule(
        axes=axes,
        operands=(flat if back else full,),
        results=(full if back else flat,),
        linear=(frozenset({0}),),
        localize=guarded(),
    )


FOURIER = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
MANY_DIMS = ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")


@rule(*(f"aten.fft_{name}" for name in (*FOURIER, *MANY_DIMS, "fftshift", "ifftshift")))
def fourier(call: Call) -> NodeRule:
    """Transformed dims stay whole; the transform is linear."""
    shape = call.operands[0]
    rank = len(shape)
    given = call.get("dim")
    if given is None:
        sizes = call.get("s")
        given = range(rank - len(sizes), rank) if sizes else range(rank)
    dims = {d % rank for d in (given if not isinstance(given, int) else (given,))}
    names = [f"d{i}" for i in range(rank)]
    outputs = [f"y{i}" if i in dims else f"d{i}" for i in range(rank)]
    axes = {n: Axis(n, shape[i], frozen=i in dims) for i, n in enumerate(names)}
    axes |= {outputs[i]: Axis(outputs[i], call.results[0][i], frozen=True) for i in dims}
    return NodeRule(
        axes=axes,
        operands=(each(names),),
        results=(each(outputs),),
        linear=(frozenset({0}),),
        localize=guarded(),
    )


LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
keep_whole("packed sequences of different lengths", *(f"aten.{name}.data" for name in LAYERS))


@rule(*(f"aten.{name}.input" for name in LAYERS))
def recurrent(call: Call) -> NodeRule:
    """`(input, hx, params, …) -> (output, h, c)`."""
    source = call.shape("input")
    if len(source) != 3:
        return whole_rule(call, "a sequence without a batch")
    if call.get("dropout") and call.get("train"):
        return whole_rule(call, "draws its dropout inside the operator")
    batch_dim = 0 if call.get("batch_first") else 1
    axes = {"b": Axis("b", source[batch_dim])}

    def frozen(prefix: str, shape: tuple[int, ...], cut: int | None) -> Dims:
        names = [f"{prefix}{d}" for d in range(len(shape))]
        if cut is not None:
            names[cut] = "b"
        for name, size in zip(names, shape, strict=True):
            axes.setdefault(name, Axis(name, size, frozen=True))
        return each(names)

    states = [frozen(f"h{i}_", call.shape(r), 1) for i, r in enumerate(iter_refs(call.get("hx")))]
    params = list(iter_refs(call.get("params")))
    weights = [frozen(f"p{i}_", call.shape(ref), None) for i, ref in enumerate(params)]
    dims = {
        "input": frozen("x", source, batch_dim),
        "hx": states if isinstance(call.get("hx"), tuple | list) else states[0],
        "params": weights,
    }
    return NodeRule(
        axes=axes,
        operands=operand_dims(call, dims),
        results=tuple(
            frozen(f"y{i}_", shape, 1 if i else batch_dim) for i, shape in enumerate(call.results)
        ),
    )
