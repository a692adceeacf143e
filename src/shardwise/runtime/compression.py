"""Sums over ranks of compressed messages, with error feedback.

A `CompressedSum` adds up several tensors of all ranks; each one is compressed separately, and the
messages of all travel together. Its state is a residual per tensor: what this rank's messages have
omitted so far. The sum of a tensor's residuals over all ranks is all that is missing in the sums,
which is why a change of the number of ranks has to preserve this sum and nothing else.

`Quantized` messages go both ways: each rank adds up the decoded messages for its range of every
tensor, and sends the sum of the range, compressed again, to all others. The owner of a range adds
the error of that second message to its own residual.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.inexact import BITS, QUANTIZED, Compression
from shardwise.runtime.mesh import Axis
from shardwise.runtime.rng import seeded
from shardwise.runtime.transport import Pending
from shardwise.shares import part as part_of


# ------------------------------------------------------------ rounding to few bits
def _round_randomly(scaled: Tensor, noise: Tensor) -> Tensor:
    """Round to one of the two nearest integers, so that the expectation is the value."""
    return torch.floor(scaled + noise)


def _powers_of_two(values: Tensor) -> Tensor:
    """Return the highest power of two that is not above each magnitude, from its exponent bits."""
    wide = values.dtype == torch.float64
    integer, mask = (torch.int64, 0x7FF << 52) if wide else (torch.int32, 0xFF << 23)
    return (values.view(integer) & mask).view(values.dtype)


_FLOATS = {"bf16": (torch.bfloat16, 7, -126), "fp16": (torch.float16, 10, -14)}
_FLOATS["fp8"] = (torch.float8_e4m3fn, 3, -6)  # dtype, bits of the mantissa, smallest exponent
_PACK = 0x0102040810204080  # times eight bytes of 0 or 1: the highest byte has a bit of each


def _signs(device: torch.device) -> Tensor:
    """Return the eight signs that each byte of packed bits stands for."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    return (bits & 1) * 2 - 1


def encode(kind: str, values: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return values as a scale and bytes; `noise` is uniform in [0, 1)."""
    if not values.numel():
        return values.new_ones(1), torch.empty(0, dtype=torch.uint8, device=values.device)
    if kind == "onebit":
        bits = torch.nn.functional.pad(values >= 0, (0, -len(values) % 8)).view(torch.int64)
        scale = torch.linalg.vector_norm(values, 1).reshape(1) / len(values)
        return scale, (bits * _PACK >> 56).to(torch.uint8)
    largest = values.abs().amax().reshape(1)
    if kind == "int8":
        scale = torch.where(largest == 0, 1, largest / 127)
        rounded = _round_randomly(values / scale, noise).clamp_(-127, 127)
        return scale, rounded.to(torch.int8).view(torch.uint8)
    dtype, num_bits, lowest = _FLOATS[kind]
    limit = torch.finfo(dtype).max
    scale = torch.where(largest.isfinite(), 1.0, largest)  # infinite or NaN must be seen
    if kind == "fp8":  # few exponents: use all of them
        scale = torch.where(largest == 0, 1, largest / limit)
    scaled = values / scale
    unit = _powers_of_two(scaled).clamp_(min=2.0**lowest) * 2.0**-num_bits
    rounded = (_round_randomly(scaled / unit, noise) * unit).clamp(-limit, limit)
    return scale, rounded.to(dtype).view(torch.uint8)


def decode(kind: str, scale: Tensor, data: Tensor, numel: int) -> Tensor:
    """Return the values that `encode` rounded, in the dtype of the scale."""
    if kind == "onebit":
        return (_signs(data.device) * scale).index_select(0, data.int()).view(-1)[:numel]
    dtype = torch.int8 if kind == "int8" else _FLOATS[kind][0]
    return data.view(dtype).to(scale.dtype) * scale


def message_bytes(kind: str, numel: int, scale_bytes: int) -> int:
    """Return the size of a message of `encode`."""
    return scale_bytes + (BITS[kind] * numel + 7) // 8


# ------------------------------------------------------------ sums over ranks
@dataclass(slots=True)
class Feedback:
    """The state of compressed sums, by the names of tensors, all of them flat.

    `residuals` are this rank's own. `warm` are the right factors of "powersgd", the same on all
    ranks. With `measures`, `errors` has the norm of what the messages of each last sum omitted,
    relative to that of its tensors.
    """

    residuals: dict[str, Tensor] = field(default_factory=dict)
    warm: dict[str, Tensor] = field(default_factory=dict)
    measures: bool = False
    errors: dict[tuple[str, ...], float] = field(default_factory=dict)


class CompressedSum:
    """Add up tensors of given names and shapes over the ranks of an axis, again and again.

    `feedback` is the state between sums.
    """

    def __init__(
        self,
        compression: Compression,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        axis: Axis,
        feedback: Feedback,
    ) -> None:
        self.compression, self.names, self.axis = compression, tuple(names), axis
        self.shapes, self.feedback = tuple(shapes), feedback
        self.numels = [torch.Size(shape).numel() for shape in self.shapes]

    def start(self, tensors: Sequence[Tensor], step: int) -> Pending:
        """Start the sum number `step` of flat tensors, in which all ranks take part.

        The result is one flat tensor; the given ones are overwritten. Collectives of a second
        message run in `wait`.
        """
        if step < self.compression.warmup or self.axis.size == 1:
            return self.axis.all_reduce(joined(tensors))
        residuals = self.feedback.residuals if self.compression.error_feedback else {}
        for name, tensor in zip(self.names, tensors, strict=True):
            if name in residuals:
                tensor += residuals[name]
        values = list(tensors)
        if not self.feedback.measures:
            return self._start(values, step)
        norm = torch.linalg.vector_norm(joined(values)).item()

        def measure(total: Tensor) -> Tensor:
            omitted = torch.linalg.vector_norm(joined(values)).item()
            self.feedback.errors[self.names] = omitted / norm if norm else 0.0
            return total

        return self._start(values, step).then(measure)

    def _start(self, values: list[Tensor], step: int) -> Pending:
        """Start the sum, and overwrite the values with what this rank's messages omit of them."""
        raise NotImplementedError

    def _keep(self, index: int, residual: Tensor) -> None:
        """Remember what the messages of a tensor have omitted.

        A tensor that is not finite is reported by its sum; it must not spoil the next one.
        """
        if self.compression.error_feedback:
            self.feedback.residuals[self.names[index]] = residual.nan_to_num_(0.0, 0.0, 0.0)

    def _noise(self, step: int, index: int, rank: int, sample: Tensor, phase: str) -> Tensor:
        if self.compression.kind == "onebit":
            return sample
        key = (self.compression.seed, step, self.names[index], rank, phase)
        source = seeded(sample.device, *key)
        # Of each 64 random bits, the four words of 16 are one number each, without its sign.
        words = torch.empty(-(-len(sample) // 4), dtype=torch.int64, device=sample.device)
        bits = words.random_(generator=source).view(torch.int16)[: len(sample)] & 0x7FFF
        return bits.to(sample.dtype).add_(0.5).mul_(2.0**-15)


class Quantized(CompressedSum):
    """Rounds elements to few bits, both ways."""

    def _start(self, values: list[Tensor], step: int) -> Pending:
        kind, axis = self.compression.kind, self.axis
        ranges = [[part_of(n, axis.size, r)[1] for r in range(axis.size)] for n in self.numels]
        messages = []
        for index, (value, sizes) in enumerate(zip(values, ranges, strict=True)):
            noise = self._noise(step, index, axis.index, value, "sent")
            parts = zip(torch.split(value, sizes), torch.split(noise, sizes), strict=True)
            encoded = [encode(kind, part, random) for part, random in parts]
            decoded = [decode(kind, *e, n) for e, n in zip(encoded, sizes, strict=True)]
            messages.append(encoded)
            self._keep(index, value.sub_(joined(decoded)))
        outgoing = [_message([row[rank] for row in messages]) for rank in range(axis.size)]
        own = len(outgoing[axis.index])
        sent = axis.all_to_all(torch.cat(outgoing), [len(m) for m in outgoing], [own] * axis.size)
        return sent.then(lambda arrived: self._add(arrived, ranges, values[0], step))

    def _add(self, arrived: Tensor, ranges: list[list[int]], sample: Tensor, step: int) -> Tensor:
        """Add up the messages for this rank's ranges, and exchange the sums of all ranges."""
        kind, axis = self.compression.kind, self.axis
        numels = [row[axis.index] for row in ranges]
        rows = arrived.view(axis.size, -1)
        sums = [
            sum(parts) for parts in zip(*(self._read(r, numels, sample) for r in rows), strict=True)
        ]
        encoded = []
        for index, total in enumerate(sums):
            assert isinstance(total, Tensor)
            noise = self._noise(step, index, axis.index, total, "sum")
            encoded.append(encode(kind, total, noise))
            if self.compression.error_feedback:
                begin = sum(ranges[index][: axis.index])
                error = total - decode(kind, *encoded[-1], len(total))
                residual = self.feedback.residuals[self.names[index]]
                residual[begin : begin + len(total)] += error.nan_to_num(0.0, 0.0, 0.0)
        scale = sample.element_size()
        by_rank = [[row[rank] for row in ranges] for rank in range(axis.size)]
        sizes = [sum(message_bytes(kind, n, scale) for n in row) for row in by_rank]
        every = axis.all_gather(_message(encoded), sizes).wait()
        pairs = zip(torch.split(every, sizes), by_rank, strict=True)
        parts = [self._read(message, row, sample) for message, row in pairs]
        return joined([part for tensor in zip(*parts, strict=True) for part in tensor])

    def _read(self, message: Tensor, numels: Sequence[int], sample: Tensor) -> list[Tensor]:
        """Return the decoded tensors of a message."""
        kind, width = self.compression.kind, sample.element_size()
        scales = message[: width * len(numels)].clone().view(sample.dtype)
        sizes = [message_bytes(kind, n, 0) for n in numels]
        data = torch.split(message[width * len(numels) :], sizes)
        return [
            decode(kind, scale, part.clone(), numel)
            for scale, part, numel in zip(torch.split(scales, 1), data, numels, strict=True)
        ]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return flat tensors as one, without a copy of a single one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _message(encoded: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return one message: all scales, then all data."""
    scales = torch.cat([scale for scale, _ in encoded]).view(torch.uint8)
    return torch.cat([scales, *(data for _, data in encoded)])


class TopK(CompressedSum):
    """Sends the largest elements of each tensor, with their indices, to all ranks."""

    def _start(self, values: list[Tensor], step: int) -> Pending:
        counts = [self.compression.count(numel) for numel in self.numels]
        indices, chosen = [], []
        for index, value in enumerate(values):
            places = value.abs().topk(counts[index], sorted=False).indices
            indices.append(places.to(torch.int32))
            chosen.append(value[places])
            self._keep(index, value.index_fill_(0, places, 0.0))
        sample, total = values[0], sum(counts)
        message = torch.cat([torch.cat(part).view(torch.uint8) for part in (chosen, indices)])
        sent = self.axis.all_gather(message, [len(message)] * self.axis.size)

        def add(every: Tensor) -> Tensor:
            sums = [sample.new_zeros(numel) for numel in self.numels]
            for row in every.view(self.axis.size, -1):
                numbers = row[: total * sample.element_size()].clone().view(sample.dtype)
                places = row[total * sample.element_size() :].clone().view(torch.int32)
                parts = zip(torch.split(numbers, counts), torch.split(places, counts), strict=True)
                for result, (part, at) in zip(sums, parts, strict=True):
                    result.index_add_(0, at, part)
            return joined(sums)

        return sent.then(add)


class RandomK(CompressedSum):
    """Sends random elements of each tensor, the same on all ranks; no index is sent.

    Without error feedback, they are scaled so that the expectation of the sum is exact.
    """

    def _start(self, values: list[Tensor], step: int) -> Pending:
        counts = [self.compression.count(numel) for numel in self.numels]
        places = [self._places(step, i, n, values[i].device) for i, n in enumerate(counts)]
        chosen = joined([value[at] for value, at in zip(values, places, strict=True)])
        for index, value in enumerate(values):
            self._keep(index, value.index_fill_(0, places[index], 0.0))
        sent = self.axis.all_reduce(chosen)
        unbiased = not self.compression.error_feedback

        def spread(chosen: Tensor) -> Tensor:
            sums, parts = [], torch.split(chosen, counts)
            for numel, at, part in zip(self.numels, places, parts, strict=True):
                scaled = part * (numel / max(len(at), 1)) if unbiased else part
                sums.append(chosen.new_zeros(numel).index_copy_(0, at, scaled))
            return joined(sums)

        return sent.then(spread)

    def _places(self, step: int, index: int, count: int, device: torch.device) -> Tensor:
        """Return a random arithmetic progression, modulo the number of elements: all are distinct.

        A permutation would take longer than the sum of all elements.
        """
        numel = self.numels[index]
        source = seeded(torch.device("cpu"), self.compression.seed, step, self.names[index])
        start, stride = torch.randint(max(1, numel), (2,), generator=source).tolist()
        while math.gcd(stride, numel) > 1:
            stride += 1
        return torch.arange(count, device=device).mul_(stride).add_(start).remainder_(numel)


class PowerSGD(CompressedSum):
    """Sends the factors of an approximation of each matrix, found by one step of power iteration.

    The right factors of the last sum are the start of the next. Tensors whose factors would not be
    smaller are sent in full, together with the left factors.
    """

    def _start(self, values: list[Tensor], step: int) -> Pending:
        matrices = {
            index: values[index].view(shape[0], -1)
            for index, shape in enumerate(self.shapes)
            if self.compression.is_factored(shape)
        }
        lefts = list(values)
        for index, matrix in matrices.items():
            lefts[index] = matrix @ self._right(index, matrix)
        sent = self.axis.all_reduce(joined([left.reshape(-1) for left in lefts]))

        def multiply(flat: Tensor) -> Tensor:
            sums = torch.split(flat, [left.numel() for left in lefts])
            result = flat.new_empty(sum(self.numels))
            totals = torch.split(result, self.numels)
            bases = {i: torch.linalg.qr(sums[i].view_as(lefts[i])).Q for i in matrices}
            rights = [matrix.T @ bases[i] for i, matrix in matrices.items()]
            if rights:
                both = self.axis.all_reduce(joined([right.reshape(-1) for right in rights])).wait()
                sizes = [right.numel() for right in rights]
                for i, right in zip(matrices, torch.split(both, sizes), strict=True):
                    warm = right.view(-1, self.compression.rank).clone()
                    self.feedback.warm[self.names[i]] = warm
                    torch.mm(bases[i], warm.T, out=totals[i].view_as(matrices[i]))
                    self._keep(i, values[i].sub_(totals[i], alpha=1 / self.axis.size))
            for i in set(range(len(sums))) - set(matrices):
                totals[i].copy_(sums[i])
                values[i].zero_()
            return result

        return sent.then(multiply)

    def _right(self, index: int, matrix: Tensor) -> Tensor:
        warm = self.feedback.warm.get(self.names[index])
        if warm is not None:
            return warm
        source = seeded(matrix.device, self.compression.seed, self.names[index])
        right = matrix.new_empty(matrix.shape[1], self.compression.rank)
        return right.normal_(generator=source)


_CLASSES: dict[str, type[CompressedSum]] = {
    **dict.fromkeys(QUANTIZED, Quantized),
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
}


def compressed_sum(
    compression: Compression,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    axis: Axis,
    feedback: Feedback,
) -> CompressedSum:
    """Return the sum that a compression describes."""
    return _CLASSES[compression.kind](compression, names, shapes, axis, feedback)
