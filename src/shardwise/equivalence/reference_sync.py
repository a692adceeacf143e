"""What inexact synchronization computes: a reference in plain PyTorch for a single process.

`SimulatedRanks` is the definition of local steps, delayed gradients and compression; `verify` shows
that ranks compute the same. It loops over ranks and parameters and shares no code with the runtime.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from shardwise.inexact import Compression, Inexact

Parameters = Mapping[str, Tensor]


class SimulatedRanks:
    """Replicas of a model's parameters, one for each rank, and everything that outlives a step."""

    def __init__(
        self,
        parameters: Parameters,
        syncs: Mapping[str, Inexact],
        num_ranks: int,
        make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.syncs, self.num_ranks, self.number = dict(syncs), num_ranks, 0
        self.replicas = [
            {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
            for _ in range(num_ranks)
        ]
        self.optimizers = [make_optimizer(list(replica.values())) for replica in self.replicas]
        self.anchors = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
        self.outer = {
            name: torch.optim.SGD(
                [self.anchors[name]], lr=o.lr, momentum=o.momentum, nesterov=o.nesterov
            )
            for name, sync in self.syncs.items()
            if (o := sync.outer) is not None
        }
        self.late: dict[str, list[Tensor]] = {name: [] for name in parameters}
        self.sent: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self.residuals = {n: [torch.zeros_like(p)] * num_ranks for n, p in parameters.items()}
        self.right: dict[str, Tensor] = {}

    def step(self, contributions: Sequence[Parameters], max_norm: float | None = None) -> None:
        """Update all replicas once.

        The contribution of a rank is the gradient of the full batch's loss with respect to its
        replica, which computes its rows of the batch: the contributions of equal replicas add up to
        the gradient. A local update uses the rank's contribution times the number of ranks.
        Gradients of local updates are clipped by their norm on the rank, apart from the others.
        """
        for name, sync in self.syncs.items():
            parts = [part[name] for part in contributions]
            if sync.every > 1:
                gradients: list[Tensor | None] = [self.num_ranks * part for part in parts]
            else:
                self.late[name].append(self.sum(name, sync.compression, parts, self.number))
                is_due = len(self.late[name]) > sync.stale
                gradients = [self.late[name].pop(0) if is_due else None] * self.num_ranks
            for replica, gradient in zip(self.replicas, gradients, strict=True):
                replica[name].grad = None if gradient is None else gradient.clone()
        for replica, optimizer in zip(self.replicas, self.optimizers, strict=True):
            for is_local in (False, True):
                chosen = [replica[n] for n, s in self.syncs.items() if (s.every > 1) == is_local]
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(chosen, max_norm)
            optimizer.step()
        self.number += 1
        for name, sync in self.syncs.items():
            if sync.every > 1:
                self.round(name, sync)

    @torch.no_grad()
    def round(self, name: str, sync: Inexact) -> None:
        """Send the differences from the last round if one is due, and apply those that arrive."""
        anchor, replicas = self.anchors[name], [replica[name] for replica in self.replicas]
        equals = [other for other, s in self.syncs.items() if s == sync]
        fragment = equals.index(name) * sync.fragments // len(equals)
        due = self.number + fragment * sync.every // sync.fragments
        if due % sync.every == 0:
            differences = [anchor - replica for replica in replicas]
            total = self.sum(name, sync.compression, differences, due // sync.every - 1)
            self.sent[name] = total / self.num_ranks, [replica.clone() for replica in replicas]
        if due % sync.every == sync.overlap and name in self.sent:
            mean, before = self.sent.pop(name)
            if name in self.outer:
                anchor.grad = mean
                self.outer[name].step()
            else:
                anchor -= mean
            for replica, old in zip(replicas, before, strict=True):
                replica.copy_(anchor + (replica - old))

    # ------------------------------------------------------------ compressed sums
    @torch.no_grad()
    def sum(
        self, name: str, compression: Compression | None, parts: list[Tensor], number: int
    ) -> Tensor:
        """Return the sum of the ranks' tensors as it arrives: sum `number` of this parameter."""
        if compression is None or number < compression.warmup or self.num_ranks == 1:
            return torch.stack(parts).sum(0)
        errors = self.residuals[name]
        values = parts
        if compression.error_feedback:
            values = [part + error for part, error in zip(parts, errors, strict=True)]
        key, shape = (compression.seed, number, name), parts[0].shape
        if compression.kind == "powersgd":
            total, left = self.power_iteration(name, compression, values)
        elif compression.kind in ("topk", "randomk"):
            total, left = sparse_sum(compression, [v.flatten() for v in values], key)
        else:
            total, left = quantized_sum(compression.kind, [v.flatten() for v in values], key)
        self.residuals[name] = [error.view(shape) for error in left]
        return total.view(shape)

    def power_iteration(
        self, name: str, compression: Compression, values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Approximate the sum of matrices by factors; small tensors are sent in full."""
        if not compression.is_factored(values[0].shape):
            return torch.stack(values).sum(0), [torch.zeros_like(v) for v in values]
        matrices = [value.flatten(1) for value in values]
        if name not in self.right:
            size = (matrices[0].shape[1], compression.rank)
            source = random_numbers(compression.seed, name)
            self.right[name] = torch.randn(size, generator=source, dtype=values[0].dtype)
        left = torch.linalg.qr(torch.stack([m @ self.right[name] for m in matrices]).sum(0)).Q
        self.right[name] = torch.stack([m.T @ left for m in matrices]).sum(0)
        total = left @ self.right[name].T
        return total, [m - total / len(matrices) for m in matrices]


def random_numbers(*key: object) -> torch.Generator:
    """Return the generator of a key."""
    digest = hashlib.blake2b("|".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


def sparse_sum(
    compression: Compression, values: list[Tensor], key: tuple[object, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Add up the largest elements of every rank, or the same random ones of all."""
    numel = len(values[0])
    count = min(numel, math.ceil(compression.ratio * numel))
    common = random_places(numel, count, key)
    total, left = torch.zeros_like(values[0]), []
    for value in values:
        largest = compression.kind == "topk"
        chosen = torch.zeros(numel, dtype=torch.bool)
        chosen[value.abs().topk(count).indices if largest else common] = True
        total += torch.where(chosen, value, 0.0)
        left.append(torch.where(chosen, 0.0, value))
    if compression.kind == "randomk" and not compression.error_feedback:
        total *= numel / max(count, 1)
    return total, left


def random_places(numel: int, count: int, key: tuple[object, ...]) -> Tensor:
    """Return distinct places: a random arithmetic progression modulo the number of all places."""
    start, stride = torch.randint(max(1, numel), (2,), generator=random_numbers(*key)).tolist()
    while math.gcd(stride, numel) > 1:
        stride += 1
    return torch.tensor([(start + stride * number) % numel for number in range(count)])


def quantized_sum(
    kind: str, values: list[Tensor], key: tuple[object, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Round the ranks' values, add up each rank's range, and round the sums of the ranges."""
    num_ranks, numel = len(values), len(values[0])
    total, left = torch.zeros_like(values[0]), [value.clone() for value in values]
    sent = [uniform(numel, *key, rank, "sent") for rank in range(num_ranks)]
    for owner, places in enumerate(torch.arange(numel).tensor_split(num_ranks)):
        if not len(places):
            continue
        messages = []
        for rank, value in enumerate(values):
            messages.append(rounded(kind, value[places], sent[rank][places]))
            left[rank][places] -= messages[-1]
        exact = torch.stack(messages).sum(0)
        total[places] = rounded(kind, exact, uniform(len(places), *key, owner, "sum"))
        left[owner][places] += exact - total[places]
    return total, left


def uniform(numel: int, *key: object) -> Tensor:
    """Return numbers between 0 and 1: odd multiples of 2**-16, four from each draw of 64 bits."""
    draws = torch.zeros((numel + 3) // 4, dtype=torch.int64).random_(generator=random_numbers(*key))
    words = torch.stack([draws >> shift & 0x7FFF for shift in (0, 16, 32, 48)], 1)
    return (2 * words.flatten()[:numel] + 1).double() / 2**16


def rounded(kind: str, values: Tensor, noise: Tensor) -> Tensor:
    """Round values up or down at random, to those that the format has."""
    if kind == "onebit":
        return torch.where(values >= 0, 1.0, -1.0).to(values.dtype) * values.abs().mean()
    largest = values.abs().max()
    if kind == "int8":
        unit = largest / 127 if largest > 0 else torch.ones_like(largest)
        return torch.floor(values / unit + noise.to(values.dtype)).clamp(-127, 127) * unit
    bits, lowest, limit = {
        "bf16": (7, -126, torch.finfo(torch.bfloat16).max),
        "fp16": (10, -14, 65504.0),
        "fp8": (3, -6, 448.0),
    }[kind]
    scale = largest / limit if kind == "fp8" and largest > 0 else torch.ones_like(largest)
    scaled = values / scale
    _, exponents = torch.frexp(scaled)
    unit = torch.ldexp(torch.ones_like(scaled), (exponents - 1).clamp(min=lowest) - bits)
    steps = torch.floor(scaled / unit + noise.to(values.dtype))
    return (steps * unit).clamp(-limit, limit) * scale
