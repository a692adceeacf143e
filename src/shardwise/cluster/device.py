"""Describe a device: compute rates, memory and price.

The figures come from a data sheet, a preset or a measurement. Every rate is scaled by `speed`, so
that a slow device differs from the others in a single figure.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Annotated

from shardwise.dtypes import DTYPES
from shardwise.errors import ClusterError
from shardwise.schema import AS_MAPPING, OneOf, Range, Stored, check_fields

KINDS = ("cuda", "cpu")  # torch's device types; ROCm devices are "cuda" as well
GIB = str(2**30)
DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES.values() if dtype.can_multiply)


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate as a function of size: log-log interpolation between points, constant outside.

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
            numbers = all(isinstance(value, int | float) for value in (size, rate))
            if not numbers or not (0 < size < math.inf and 0 < rate < math.inf):
                raise ClusterError(f"a rate has the point {(size, rate)}", hint="numbers above 0")
        sizes = [size for size, _ in self.points]
        if sorted(set(sizes)) != sizes:
            raise ClusterError(f"sizes {sizes} of a rate must ascend", hint="sort the points")

    @classmethod
    def constant(cls, rate: float) -> Curve:
        """Return a curve with the same rate for every size."""
        return cls(((1.0, float(rate)),))

    @property
    def is_constant(self) -> bool:
        return len(self.points) == 1 and self.points[0][0] == 1.0

    @property
    def best(self) -> float:
        return max(rate for _, rate in self.points)

    def at(self, size: float) -> float:
        """Return the rate for `size`."""
        index = bisect_right(self.points, size, key=lambda point: point[0])
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            return self.points[-1][1]
        (x0, y0), (x1, y1) = self.points[index - 1], self.points[index]
        share = math.log(size / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0)) if y0 != y1 else y0


Rates = Annotated[
    tuple[tuple[Annotated[str, OneOf(DTYPE_NAMES, "dtype")], Curve], ...],
    AS_MAPPING,
    Stored(always=True),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process's share of a CPU.

    `kind` is the torch device type; `name` is a label. Rates are by dtype name, for example
    "bfloat16"; the size of a matrix product is the cube root of m·n·k, that of an attention its
    sequence length.
    """

    name: Annotated[str, Stored(hidden=True)]
    kind: Annotated[str, OneOf(KINDS)]
    memory_bytes: Annotated[int, Range(0, above=True), Stored("memory_gib", GIB)]
    reserved_bytes: Annotated[int, Range(0), Stored("reserved_gib", GIB, always=True)] = 0
    matmul_flops_per_s: Rates
    attention_flops_per_s: Rates = ()
    memory_bytes_per_s: Curve
    overhead_s: Annotated[float, Range(0), Stored(always=True)] = 0.0
    host_bytes_per_s: Annotated[float, Range(0, above=True, infinite=True), Stored(always=True)] = (
        math.inf
    )
    host_memory_bytes: Annotated[int, Range(0), Stored("host_memory_gib", GIB, always=True)] = 0
    price_per_hour: Annotated[float, Range(0), Stored(always=True)] = 0.0
    # The fraction of its speed that compute loses while messages travel.
    overlap_loss: Annotated[float, Range(0, 1), Stored(always=True)] = 0.0
    speed: Annotated[float, Range(0, above=True), Stored(always=True)] = 1.0
    # Times of programs and of the optimizer, as replays measured them, over those predicted.
    compute_factor: Annotated[float, Range(0, above=True)] = 1.0
    update_factor: Annotated[float, Range(0, above=True)] = 1.0

    def __post_init__(self) -> None:
        where = f"device {self.name}"
        check_fields(self, ClusterError, where)
        if not self.matmul_flops_per_s:
            raise ClusterError(
                "no matmul rates", where=where, hint="matmul_flops_per_s: {float32: 1.0e12}"
            )
        if self.reserved_bytes >= self.memory_bytes:
            raise ClusterError(
                f"all memory is reserved: {self.reserved_bytes / 2**30:.2f} GiB of "
                f"{self.memory_bytes / 2**30:.2f} GiB",
                where=where,
                hint="reduce reserved_gib",
            )

    @property
    def usable_bytes(self) -> int:
        """The memory that a program may allocate."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for dtype, _ in self.matmul_flops_per_s)

    def matmul_rate(self, dtype: str, m: float, n: float, k: float, batch: float = 1) -> float:
        """Return the operations per second of `batch` products of m×k and k×n matrices.

        A batch of small products fills the device like one product with the same operations.
        """
        return self._matmul(dtype).at((m * n * k * batch) ** (1 / 3)) * self.speed

    def attention_rate(self, dtype: str, sequence: float = math.inf) -> float:
        """Return the operations per second of a fused attention over `sequence` positions."""
        curve = dict(self.attention_flops_per_s).get(dtype)
        return (curve or self._matmul(dtype)).at(sequence) * self.speed

    def memory_rate(self, num_bytes: float) -> float:
        """Return the bytes read and written per second by an operator that moves `num_bytes`."""
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
        speed = "" if self.speed == 1 else f" at {self.speed:g} of its speed"
        return f"{self.name} ({self.memory_bytes / 2**30:.1f} GiB){speed}"
