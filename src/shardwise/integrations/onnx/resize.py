"""ONNX's Resize: one matrix of interpolation weights for each dim that changes its size."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.integrations.onnx.operators import Call, Value, operator, tensor

Array = np.ndarray[Any, Any]


@operator("Resize")
def resize(
    call: Call, x: Tensor, roi: Value = None, scales: Value = None, sizes: Value = None
) -> Value:
    """Resize the dims whose size changes; common cases are calls of `F.interpolate`."""
    mode = call.get("mode", "nearest")
    transform = call.get("coordinate_transformation_mode", "half_pixel")
    if call.get("antialias", 0) or transform == "tf_crop_and_resize":
        raise call.error("antialiased and cropping Resize is not supported")
    axes = call.get("axes") or list(range(x.dim()))
    new = [int(n) for n in x.shape]
    ratios = [1.0] * x.dim()
    if sizes is not None and np.size(sizes):
        wanted = call.integers(sizes, "the new sizes")
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            choose = min if policy == "not_larger" else max
            ratio = choose(w / new[a] for w, a in zip(wanted, axes, strict=True))
            wanted = [math.floor(new[a] * ratio + 0.5) for a in axes]
        for axis, size in zip(axes, wanted, strict=True):
            ratios[axis], new[axis] = size / new[axis], size
    else:
        factors = call.known(scales, "the scales").reshape(-1)
        for axis, factor in zip(axes, factors, strict=True):
            ratios[axis], new[axis] = float(factor), math.floor(new[axis] * float(factor))
    if new == list(x.shape):
        return x
    if (torch_mode := _torch_mode(call, x, new, ratios, mode, transform)) is not None:
        corners = None if torch_mode.startswith("nearest") else transform == "align_corners"
        return F.interpolate(x, size=new[2:], mode=torch_mode, align_corners=corners)
    for axis, (size, ratio) in enumerate(zip(new, ratios, strict=True)):
        if size != x.shape[axis]:
            weights = _weights(call, x.shape[axis], size, ratio, mode, transform)
            matrix = tensor(weights, x).to(x.dtype)
            x = torch.tensordot(x, matrix, ([axis], [1])).movedim(-1, axis)
    return x


def _torch_mode(
    call: Call, x: Tensor, new: list[int], ratios: list[float], mode: str, transform: str
) -> str | None:
    """Return the mode of `F.interpolate` that computes the same, if there is one."""
    spatial = x.dim() - 2
    exact = all(r * n == s for r, n, s in zip(ratios, x.shape, new, strict=True))
    if not 1 <= spatial <= 3 or new[:2] != list(x.shape[:2]) or not exact:
        return None
    rounding = call.get("nearest_mode", "round_prefer_floor")
    if mode == "nearest" and transform == "asymmetric" and rounding == "floor":
        return "nearest"
    # With one output element, ONNX and torch place it differently in some modes.
    plain = transform in ("half_pixel", "align_corners") and min(new[2:]) > 1
    if mode == "linear" and plain:
        return ("linear", "bilinear", "trilinear")[spatial - 1]
    usual = call.get("cubic_coeff_a", -0.75) == -0.75 and not call.get("exclude_outside", 0)
    return "bicubic" if mode == "cubic" and spatial == 2 and plain and usual else None


def _weights(call: Call, old: int, new: int, ratio: float, mode: str, transform: str) -> Array:
    """Return the weights of old elements for each new one."""
    at = np.arange(new, dtype=np.float64)
    if transform == "asymmetric":
        place = at / ratio
    elif transform == "align_corners":
        length = ratio * old  # not rounded, as in ONNX's reference
        place = at * (old - 1) / (length - 1) if length > 1 else np.zeros(new)
    elif transform == "pytorch_half_pixel" and new == 1:
        place = np.zeros(1)
    elif transform == "half_pixel_symmetric":
        adjustment = new / (old * ratio)
        place = old / 2 * (1 - adjustment) + (at + 0.5) / ratio - 0.5
    else:
        place = (at + 0.5) / ratio - 0.5
    result = np.zeros((new, old))
    rows = np.arange(new)
    if mode == "nearest":
        rounding: Any = {
            "round_prefer_floor": lambda p: np.ceil(p - 0.5),
            "round_prefer_ceil": lambda p: np.floor(p + 0.5),
            "floor": np.floor,
            "ceil": np.ceil,
        }[call.get("nearest_mode", "round_prefer_floor")]
        result[rows, np.clip(rounding(place), 0, old - 1).astype(int)] = 1
        return result
    first = np.floor(place).astype(int)
    rest = place - first
    if mode == "linear":
        taps = {0: 1 - rest, 1: rest}
    else:
        a = call.get("cubic_coeff_a", -0.75)
        taps = {
            -1: ((a * (rest + 1) - 5 * a) * (rest + 1) + 8 * a) * (rest + 1) - 4 * a,
            0: ((a + 2) * rest - (a + 3)) * rest**2 + 1,
            1: ((a + 2) * (1 - rest) - (a + 3)) * (1 - rest) ** 2 + 1,
            2: ((a * (2 - rest) - 5 * a) * (2 - rest) + 8 * a) * (2 - rest) - 4 * a,
        }
    for offset, weight in taps.items():
        column = first + offset
        if call.get("exclude_outside", 0):
            weight = np.where((column < 0) | (column >= old), 0, weight)
        np.add.at(result, (rows, np.clip(column, 0, old - 1)), weight)
    if call.get("exclude_outside", 0):
        result /= result.sum(1, keepdims=True)
    return result
