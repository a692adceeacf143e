"""A device: how fast it computes, what its memory holds, and what it costs.

Enters: figures of a data sheet, a preset or a measurement. Leaves: `Device`, whose methods give
the rate for a size. Every rate is scaled by `speed`, so that one slow device is one changed figure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ClusterError, did_you_mean

KINDS = ("cuda", "cpu")  # which library computes and communicates; ROCm answers to "cuda" in torch
DTYPES = (  # torch's names of number types that products can have
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex128",
    "complex64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate by size: interpolated between points in logarithms, constant outside them.

    >>> Curve(((1.0, 10.0), (100.0, 1000.0))).at(10.0)
    100.0
    >>> Curve.constant(5.0).at(123.0)
    5.0
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ClusterError("a rate needs at least one point", hint="[[1024, 1.0e12]]")
        for size, rate in self.points:
            require_finite("size of a rate", size, "rate")
            require_finite("rate", rate, "rate")
        sizes = [size for size, _ in self.points]
        if sorted(set(sizes)) != sizes:
            raise ClusterError(f"sizes {sizes} of a rate do not ascend", hint="sort the points")

    @classmethod
    def constant(cls, rate: float) -> Curve:
        """The same rate for every size."""
        return cls(((1.0, float(rate)),))

    @property
    def is_constant(self) -> bool:
        return len(self.points) == 1 and self.points[0][0] == 1.0

    @property
    def best(self) -> float:
        return max(rate for _, rate in self.points)

    def at(self, size: float) -> float:
        """The rate for `size`."""
        index = bisect_right(self.points, size, key=lambda point: point[0])
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (x0, y0), (x1, y1) = self.points[index - 1], self.points[index]
        share = math.log(size / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0)) if y0 != y1 else y0


Rates = tuple[tuple[str, Curve], ...]


_NOT_NEGATIVE = (
    "reserved_bytes",
    "overhead_s",
    "host_memory_bytes",
    "price_per_hour",
    "overlap_loss",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process's share of a CPU.

    `kind` is the torch device type; `name` what people call it. Rates are by dtype name, for
    example "bfloat16"; a product's size is the cube root of m·n·k, an attention's its sequence.
    """

    name: str
    kind: str
    memory_bytes: int
    matmul_flops_per_s: Rates
    memory_bytes_per_s: Curve
    attention_flops_per_s: Rates = ()
    reserved_bytes: int = 0
    overhead_s: float = 0.0
    host_bytes_per_s: float = math.inf
    host_memory_bytes: int = 0
    price_per_hour: float = 0.0
    overlap_loss: float = 0.0  # of computing, in the time that messages travel meanwhile
    speed: float = 1.0

    def __post_init__(self) -> None:
        where = f"device {self.name}"
        if self.kind not in KINDS:
            raise ClusterError(f"kind is {self.kind!r}, must be one of {KINDS}", where=where)
        if not self.matmul_flops_per_s:
            raise ClusterError(
                "no matmul rates", where=where, hint="matmul_flops_per_s: {float32: 1.0e12}"
            )
        for rates in (self.matmul_flops_per_s, self.attention_flops_per_s):
            _check_dtypes(rates, where)
        require_positive("host_bytes_per_s", self.host_bytes_per_s, where)
        for name in ("memory_bytes", "speed"):
            require_finite(name, getattr(self, name), where)
        for name in _NOT_NEGATIVE:
            require_not_negative(name, getattr(self, name), where)
        if self.overlap_loss > 1:
            raise ClusterError(
                f"overlap_loss is {self.overlap_loss:g}, a part of 1",
                where=where,
                hint="overlap_loss: 0.5",
            )
        if self.reserved_bytes >= self.memory_bytes:
            raise ClusterError(
                f"reserves {self.reserved_bytes / 2**30:.2f} GiB of {self.memory_bytes / 2**30:.2f}"
                " GiB: nothing is left",
                where=where,
                hint="a smaller reserved_gib",
            )

    @property
    def usable_bytes(self) -> int:
        """What a program may allocate."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for dtype, _ in self.matmul_flops_per_s)

    def matmul_rate(self, dtype: str, m: float, n: float, k: float, batch: float = 1) -> float:
        """Operations per second of `batch` products of m×k and k×n matrices.

        A batch of small products fills the device like one product of as many operations.
        """
        return self._matmul(dtype).at((m * n * k * batch) ** (1 / 3)) * self.speed

    def attention_rate(self, dtype: str, sequence: float = math.inf) -> float:
        """Operations per second of a fused attention over `sequence` positions."""
        curve = dict(self.attention_flops_per_s).get(dtype)
        return (curve or self._matmul(dtype)).at(sequence) * self.speed

    def memory_rate(self, num_bytes: float) -> float:
        """Bytes per second, read and written together, of an operator that moves `num_bytes`."""
        return self.memory_bytes_per_s.at(num_bytes) * self.speed

    def _matmul(self, dtype: str) -> Curve:
        rates = dict(self.matmul_flops_per_s)
        if dtype not in rates:
            raise ClusterError(
                f"device {self.name} has no rate for {dtype}, only for {', '.join(rates)}",
                hint=f"add {dtype} to its matmul_flops_per_s",
            )
        return rates[dtype]

    def __str__(self) -> str:
        slowed = "" if self.speed == 1 else f" at {self.speed:g} of its speed"
        return f"{self.name} ({self.memory_bytes / 2**30:.1f} GiB){slowed}"


def _check_dtypes(rates: Rates, where: str) -> None:
    for dtype, _ in rates:
        if dtype not in DTYPES:
            raise ClusterError(
                f"no number type {dtype!r}{did_you_mean(dtype, DTYPES)}",
                where=where,
                hint=", ".join(DTYPES[:4]),
            )


def require_positive(name: str, value: Any, where: str) -> None:
    """Refuse what is not a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ClusterError(f"{name} is {value!r}, must be a number above 0", where=where)


def require_finite(name: str, value: Any, where: str) -> None:
    """Refuse what is not a finite number above 0."""
    require_positive(name, value, where)
    if value == math.inf:
        raise ClusterError(f"{name} is inf, must be a finite number", where=where)


def require_not_negative(name: str, value: Any, where: str) -> None:
    """Refuse what is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ClusterError(f"{name} is {value!r}, must be a number of at least 0", where=where)
