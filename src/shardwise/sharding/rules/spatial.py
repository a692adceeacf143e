"""Pooling, resampling and transforms: their dims stay whole, batch and channels are free."""

from __future__ import annotations

from shardwise.sharding.build import each, guarded, is_float, operand_dims
from shardwise.sharding.registry import keep_whole, rule
from shardwise.sharding.rule import (
    Axis,
    Call,
    Dims,
    NodeRule,
    RuleFunction,
    whole_rule,
)

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
