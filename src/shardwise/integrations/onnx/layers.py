"""ONNX operators of neural networks: products, convolutions, pooling, norms, losses, attention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.integrations.onnx.operators import OPERATORS, Call, Value, operator, tensor, tensors

OPERATORS |= {  # those of one expression
    "Einsum": lambda call, *x: torch.einsum(call.get("equation").replace(" ", ""), *tensors(*x)),
    "GlobalAveragePool": lambda call, x: x.mean(list(range(2, x.dim())), keepdim=True),
    "GlobalMaxPool": lambda call, x: x.amax(list(range(2, x.dim())), keepdim=True),
}


# ------------------------------------------------------------ products and convolutions
@operator("Gemm")
def gemm(call: Call, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Value:
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    a = a.T if call.get("transA", 0) else a
    transposed = bool(call.get("transB", 0))
    if transposed and alpha == beta == 1.0 and (bias is None or bias.dim() == 1):
        return F.linear(a, b, bias)
    product = a @ (b.T if transposed else b)
    product = product if alpha == 1.0 else alpha * product
    if bias is None:
        return product
    return product + (bias if beta == 1.0 else beta * bias)


@operator("MatMulInteger")
def matmul_integer(
    call: Call, a: Tensor, b: Tensor, a_zero: Tensor | None = None, b_zero: Tensor | None = None
) -> Value:
    a, b = a.int(), b.int()
    a = a if a_zero is None else a - a_zero.int()
    b = b if b_zero is None else b - b_zero.int()
    return a @ b


Pads = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a convolution or pooling, and the padding before and after each dim."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: Pads

    @staticmethod
    def of(call: Call, x: Tensor, kernel: Sequence[int]) -> "Windows":
        """Return the windows of a call on `x`."""
        number = len(kernel)
        if number not in _CONVOLUTIONS:
            raise call.error(f"windows of {number} dims are not supported", hint="1, 2 or 3 dims")
        strides = call.get("strides") or [1] * number
        dilations = call.get("dilations") or [1] * number
        auto = call.get("auto_pad", "NOTSET")
        if auto in ("NOTSET", "", "VALID"):
            flat = [0] * 2 * number if auto == "VALID" else call.get("pads") or [0] * 2 * number
            pads = list(zip(flat[:number], flat[number:], strict=True))
            return Windows(list(kernel), strides, dilations, pads)
        pads = []
        for n, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
            total = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
            small, large = total // 2, total - total // 2
            pads.append((small, large) if auto == "SAME_UPPER" else (large, small))
        return Windows(list(kernel), strides, dilations, pads)

    @staticmethod
    def of_pool(call: Call, x: Tensor, *, dilated: bool = False) -> "tuple[Windows, Pads]":
        """Return the windows of a pooling, and their padding with what `ceil_mode` adds behind."""
        windows = Windows.of(call, x, call.get("kernel_shape"))
        if not dilated and any(d != 1 for d in windows.dilations):
            raise call.error(f"dilated {call.op} is not supported")
        if not call.get("ceil_mode", 0):
            return windows, windows.pads
        result = []
        every = (windows.kernel, windows.strides, windows.dilations, windows.pads)
        for n, k, s, d, (before, after) in zip(x.shape[2:], *every, strict=True):
            reach = (k - 1) * d + 1
            count = -(-(n + before + after - reach) // s) + 1
            if (count - 1) * s >= n + before:  # the last window must begin inside of the input
                count -= 1
            result.append((before, max(after, (count - 1) * s + reach - n - before)))
        return windows, result


def _pad_window(x: Tensor, pads: Pads, value: float = 0.0) -> Tensor:
    flat = [side for pair in reversed(pads) for side in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operator("Conv")
def convolution(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Value:
    windows = Windows.of(call, x, weight.shape[2:])
    padding = [before for before, _ in windows.pads]
    if any(before != after for before, after in windows.pads):
        x, padding = _pad_window(x, windows.pads), [0] * len(padding)
    function, groups = _CONVOLUTIONS[len(padding)], call.get("group", 1)
    return function(x, weight, bias, windows.strides, padding, windows.dilations, groups)


@operator("ConvTranspose")
def transposed_convolution(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Value:
    windows = Windows.of(call, x, weight.shape[2:])
    kernel, strides, dilations = windows.kernel, windows.strides, windows.dilations
    extra = call.get("output_padding") or [0] * len(kernel)
    full = [
        s * (n - 1) + e + (k - 1) * d + 1
        for n, k, s, d, e in zip(x.shape[2:], kernel, strides, dilations, extra, strict=True)
    ]
    wanted, auto = call.get("output_shape"), call.get("auto_pad", "NOTSET")
    if wanted is None and auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
    if wanted is None:
        pads = windows.pads
    else:
        totals = [f - w for f, w in zip(full, wanted[-len(kernel) :], strict=True)]
        pads = [
            (t // 2, t - t // 2) if auto == "SAME_UPPER" else (t - t // 2, t // 2) for t in totals
        ]
    result = _TRANSPOSED[len(kernel)](
        x, weight, bias, strides, 0, extra, call.get("group", 1), dilations
    )
    return _pad_window(result, [(-before, -after) for before, after in pads])


# ------------------------------------------------------------ pooling
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS: Mapping[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@operator("MaxPool")
def max_pool(call: Call, x: Tensor) -> Value:
    windows, pads = Windows.of_pool(call, x, dilated=True)
    kernel, strides, dilations = windows.kernel, windows.strides, windows.dilations
    padding = [before for before, _ in pads]
    simple = all(a == b and 2 * a <= k for (a, b), k in zip(pads, kernel, strict=True))
    if not simple:
        x, padding = _pad_window(x, pads, -math.inf), [0] * len(pads)
    function = _MAX_POOLS[len(kernel)]
    if call.num_outputs == 1:
        return function(x, kernel, strides, padding, dilations)
    if not simple or call.get("storage_order", 0):
        raise call.error("indices of a padded or column-major MaxPool are not supported")
    values, indices = function(x, kernel, strides, padding, dilations, return_indices=True)
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device) * math.prod(x.shape[2:])
    return values, indices + planes.reshape(*x.shape[:2], *[1] * len(kernel))


@operator("AveragePool")
def average_pool(call: Call, x: Tensor) -> Value:
    windows, pads = Windows.of_pool(call, x)
    kernel, strides, given = windows.kernel, windows.strides, windows.pads
    function = _AVERAGE_POOLS[len(kernel)]
    padded = function(_pad_window(x, pads), kernel, strides)
    counted = torch.ones_like(x[:1, :1])
    if call.get("count_include_pad", 0):  # but not what ceil_mode adds
        counted = _pad_window(counted, given, 1.0)
        pads = [(0, a - b) for (_, a), (_, b) in zip(pads, given, strict=True)]
    if not any(side for pair in pads for side in pair):
        return padded  # every window is full
    return padded / function(_pad_window(counted, pads), kernel, strides)


@operator("LpPool")
def lp_pool(call: Call, x: Tensor) -> Value:
    windows, pads = Windows.of_pool(call, x)
    kernel, p = windows.kernel, call.get("p", 2)
    powers = _pad_window(x.abs().pow(p), pads)
    mean = _AVERAGE_POOLS[len(kernel)](powers, kernel, windows.strides)
    return (mean * math.prod(kernel)).pow(1 / p)


@operator("GlobalLpPool")
def global_lp_pool(call: Call, x: Tensor) -> Value:
    p = call.get("p", 2)
    return x.abs().pow(p).sum(list(range(2, x.dim())), keepdim=True).pow(1 / p)


# ------------------------------------------------------------ normalization, dropout, losses
@operator("BatchNormalization")
def batch_normalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Value:
    epsilon, momentum = call.get("epsilon", 1e-5), call.get("momentum", 0.9)
    trains = bool(call.get("training_mode", 0))
    if not trains or not call.module.training:
        result = F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
        return (result, mean, variance) if trains else result
    dims = [d for d in range(x.dim()) if d != 1]
    now, spread = x.mean(dims), x.var(dims, unbiased=False)
    new_mean = (mean * momentum + now * (1 - momentum)).detach()
    new_variance = (variance * momentum + spread * (1 - momentum)).detach()
    result = F.batch_norm(x, None, None, scale, bias, True, 0.0, epsilon)
    with torch.no_grad():  # the running statistics are state of the module
        mean.copy_(new_mean)
        variance.copy_(new_variance)
    return result, new_mean, new_variance


@operator("InstanceNormalization")
def instance_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Value:
    return F.instance_norm(x, weight=scale, bias=bias, eps=call.get("epsilon", 1e-5))


@operator("LayerNormalization")
def layer_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Value:
    axis = call.get("axis", -1) % x.dim()
    sizes, epsilon = list(x.shape[axis:]), call.get("epsilon", 1e-5)
    bias = None if bias is None else bias.expand(sizes)
    result = F.layer_norm(x, sizes, scale.expand(sizes), bias, epsilon)
    if call.num_outputs == 1:
        return result
    dims = list(range(axis, x.dim()))
    variance = x.var(dims, unbiased=False, keepdim=True)
    return result, x.mean(dims, keepdim=True), torch.rsqrt(variance + epsilon)


@operator("RMSNormalization")
def rms_normalization(call: Call, x: Tensor, scale: Tensor) -> Value:
    sizes = list(x.shape[call.get("axis", -1) % x.dim() :])
    return F.rms_norm(x, sizes, scale.expand(sizes), call.get("epsilon", 1e-5))


@operator("GroupNormalization")
def group_normalization(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Value:
    groups = call.get("num_groups")
    if scale.shape[0] == groups != x.shape[1]:  # by group up to opset 20
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    return F.group_norm(x, groups, scale, bias, call.get("epsilon", 1e-5))


@operator("LpNormalization")
def lp_normalization(call: Call, x: Tensor) -> Value:
    axis, p = call.get("axis", -1), call.get("p", 2)
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else torch.linalg.vector_norm(x, 2, axis, True)
    return x / norm.clamp_min(torch.finfo(x.dtype).tiny)  # zeros stay zeros


@operator("MeanVarianceNormalization")
def mean_variance_normalization(call: Call, x: Tensor) -> Value:
    axes = call.get("axes", [0, 2, 3])
    centred = x - x.mean(axes, keepdim=True)
    return centred / ((centred * centred).mean(axes, keepdim=True).sqrt() + 1e-9)


@operator("LRN")
def local_response_normalization(call: Call, x: Tensor) -> Value:
    size, alpha = call.get("size"), call.get("alpha", 1e-4)
    squares = (x * x).unsqueeze(1)
    around = [0, 0] * (x.dim() - 2) + [(size - 1) // 2, size - 1 - (size - 1) // 2]
    total = F.pad(squares, around).unfold(2, size, 1).sum(-1).squeeze(1)
    return x / (call.get("bias", 1.0) + alpha / size * total).pow(call.get("beta", 0.75))


@operator("Dropout")
def dropout(call: Call, x: Tensor, ratio: Value = None, training: Value = None) -> Value:
    rate = 0.5 if ratio is None else float(call.known(ratio, "the ratio"))
    active = training is not None and bool(call.known(training, "training_mode"))
    result = F.dropout(x, rate, training=active and call.module.training)
    if call.num_outputs == 1:
        return result
    if active and call.module.training:
        raise call.error("the mask of an active Dropout is not supported as an output")
    return result, torch.ones_like(x, dtype=torch.bool)


@operator("NegativeLogLikelihoodLoss")
def nll_loss(call: Call, x: Tensor, target: Tensor, weight: Tensor | None = None) -> Value:
    ignored, reduction = call.get("ignore_index", -100), call.get("reduction", "mean")
    return F.nll_loss(x, target.long(), weight, ignore_index=ignored, reduction=reduction)


@operator("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(
    call: Call, x: Tensor, target: Tensor, weight: Tensor | None = None
) -> Value:
    logs = torch.log_softmax(x, 1)
    loss = nll_loss(call, logs, target, weight)
    return (loss, logs) if call.num_outputs > 1 else loss


# ------------------------------------------------------------ quantization
def _along(call: Call, values: Value, x: Tensor) -> Tensor:
    """Return scales as a tensor that broadcasts along the axis of the call."""
    if call.get("block_size", 0):
        raise call.error("blocked quantization is not supported")
    scales, axis = tensor(values, x), call.get("axis", 1)
    if scales.dim() != 1 or scales.numel() == 1:
        return scales
    return scales.reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])


@operator("DequantizeLinear")
def dequantize(call: Call, x: Value, scale: Value, zero: Value = None) -> Value:
    x = tensor(x, scale if isinstance(scale, Tensor) else None)
    factor = _along(call, scale, x)
    shifted = x.int() if zero is None else x.int() - _along(call, zero, x).int()
    return shifted.to(factor.dtype) * factor


@operator("QuantizeLinear")
def quantize(call: Call, x: Tensor, scale: Value, zero: Value = None) -> Value:
    dtype = torch.uint8 if zero is None else tensor(zero).dtype
    shift = 0 if zero is None else _along(call, zero, x).int()
    limits = torch.iinfo(dtype)
    steps = torch.round(x / _along(call, scale, x)) + shift
    return torch.clamp(steps, limits.min, limits.max).to(dtype)


# ------------------------------------------------------------ attention
@operator("Attention")
def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *past: Value
) -> Value:
    simple = {"scale", "is_causal", "q_num_heads", "kv_num_heads", "softmax_precision"}
    if any(p is not None for p in past) or call.num_outputs > 1 or call.attributes.keys() - simple:
        raise call.error("Attention with a cache, a window or further outputs is not supported")
    is_flat = q.dim() == 3
    if is_flat:
        heads, groups = call.get("q_num_heads"), call.get("kv_num_heads")
        q, k, v = (
            torch.unflatten(t, -1, (n, -1)).transpose(1, 2)
            for t, n in ((q, heads), (k, groups), (v, groups))
        )
    result = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(call.get("is_causal", 0)), scale=call.get("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return result.transpose(1, 2).flatten(-2) if is_flat else result


@operator("GridSample")
def grid_sample(call: Call, x: Tensor, grid: Tensor) -> Value:
    mode = call.get("mode", "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    padding, corners = call.get("padding_mode", "zeros"), bool(call.get("align_corners", 0))
    return F.grid_sample(x, grid, mode, padding, corners)
