"""Random numbers that depend on seed, node, step and shard coordinates, never on the rank.

In mode "exact" every rank draws the full tensor's numbers and takes its part: results do not depend
on the number of ranks. In mode "fast" each shard draws its own numbers. A node that is recomputed
in the same step draws the same numbers again.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardwise.errors import ProgramError, did_you_mean
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.operators import untraced
from shardwise.runtime.splits import Split, local_shape, take_local
from shardwise.shares import Segments

MODES = ("exact", "fast")
Splits = Sequence[Split] | Sequence[tuple[str, int, Segments]]  # generated code writes tuples


def seeded(device: torch.device | str, *key: object) -> torch.Generator:
    """Return a generator whose numbers depend on the key alone."""
    digest = hashlib.blake2b("|".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


class Rng:
    """The source of a program's random numbers; `step` counts the training steps so far."""

    def __init__(self, seed: int, mode: str = "exact", mesh: ProcessMesh | None = None) -> None:
        if mode not in MODES:
            raise ProgramError(
                f"rng mode {mode!r} is not one of {MODES}{did_you_mean(mode, MODES)}"
            )
        self.seed, self.mode, self.step = seed, mode, 0
        self.mesh = mesh if mesh is not None else ProcessMesh({})

    @contextlib.contextmanager
    def next_step(self) -> Iterator[int]:
        """Yield the number of a training step; a failed step can be repeated with its numbers."""
        self.step += 1
        try:
            yield self.step
        except BaseException:
            self.step -= 1
            raise

    def generator(
        self, key: str, device: torch.device | str = "cpu", place: Sequence[tuple[str, int]] = ()
    ) -> torch.Generator:
        """Return a generator for one node in this step, at coordinates on some axes."""
        separate = self.mesh.num_microbatches > 1 and not self.mesh.timed  # each is a batch
        batch = [f"micro-batch {self.mesh.microbatch}"] if separate else []
        return seeded(device, self.seed, self.step, key, list(place), *batch)

    def part(
        self,
        fill: Callable[[tuple[int, ...], torch.Generator], Tensor],
        key: str,
        shape: Sequence[int],
        splits: Splits,
        device: torch.device | str,
    ) -> Tensor:
        """Return this rank's part of a random tensor of a full shape."""
        coords, axes = self.mesh.place, self.mesh.place_axes
        splits = [
            s if isinstance(s, Split) else Split(axis=s[0], dim=s[1], of=s[2]) for s in splits
        ]
        if self.mode == "exact":
            full = fill(tuple(shape), self.generator(key, device))
            return take_local(full, splits, coords, axes).contiguous()
        sharded = {split.axis for split in splits if axes[split.axis] != 1}
        place = [(name, coords[name]) for name in axes if name in sharded]
        local = local_shape(shape, splits, coords, axes)
        return fill(local, self.generator(key, device, place))


ALPHA = 1.7580993408473766  # SELU's scale times its alpha

_KINDS: dict[str, Callable[..., Tensor]] = {
    "uniform": lambda t, g, low=0.0, high=1.0: t.uniform_(low, high, generator=g),
    "normal": lambda t, g, mean=0.0, std=1.0: t.normal_(mean, std, generator=g),
    "bernoulli": lambda t, g, p=0.5: t.bernoulli_(p, generator=g),
    "exponential": lambda t, g, rate=1.0: t.exponential_(rate, generator=g),
    "randint": lambda t, g, low, high: t.random_(int(low), int(high), generator=g),
    "cauchy": lambda t, g, median=0.0, sigma=1.0: t.cauchy_(median, sigma, generator=g),
    "log_normal": lambda t, g, mean=1.0, std=2.0: t.log_normal_(mean, std, generator=g),
    "geometric": lambda t, g, p: t.geometric_(p, generator=g),
    "randperm": lambda t, g: torch.randperm(t.numel(), generator=g, dtype=t.dtype, device=t.device),
}


@untraced
def draw(
    kind: str,
    rng: Rng,
    key: str,
    shape: Sequence[int],
    splits: Splits = (),
    *,
    options: Sequence[float] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return this rank's part of the random numbers of the node `key`.

    `kind` and its options: uniform(low, high), normal(mean, std), bernoulli(p),
    exponential(rate), randint(low, high), cauchy(median, sigma), log_normal(mean, std),
    geometric(p), randperm (unsharded only).
    """
    if kind not in _KINDS:
        raise ProgramError(f"unknown distribution {kind!r}{did_you_mean(kind, _KINDS)}")

    def fill(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return _KINDS[kind](torch.empty(size, dtype=dtype, device=device), generator, *options)

    return rng.part(fill, key, shape, splits, device)


def dropout(
    x: Tensor, p: float, rng: Rng, key: str, shape: Sequence[int], splits: Splits = ()
) -> Tensor:
    """Zero elements of x with probability `p` and scale the others; `shape` is the full one."""
    if p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    return x * _mask(x, p, rng, key, shape, splits).mul_(1 / (1 - p))


def native_dropout(
    x: Tensor, p: float, rng: Rng, key: str, shape: Sequence[int], splits: Splits = ()
) -> tuple[Tensor, Tensor]:
    """Return `dropout` and its mask."""
    mask = _mask(x, p, rng, key, shape, splits)
    scale = 1 / (1 - p) if p < 1 else 0.0
    return x * (mask * scale), mask.to(torch.bool)


def alpha_dropout(
    x: Tensor, p: float, rng: Rng, key: str, shape: Sequence[int], splits: Splits = ()
) -> Tensor:
    """Apply dropout that preserves the mean and variance of SELU activations."""
    if p == 1.0:
        return x * 0.0
    a = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    mask = _mask(x, p, rng, key, shape, splits)
    return x * (mask * a) + ((mask - 1) * (ALPHA * a) + ALPHA * a * p)


def _mask(x: Tensor, p: float, rng: Rng, key: str, shape: Sequence[int], splits: Splits) -> Tensor:
    """Return ones with probability 1 - p, broadcast over dims that the mask lacks."""
    mask = draw(
        "bernoulli", rng, key, shape, splits, options=(1 - p,), dtype=torch.bool, device=x.device
    )
    return mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim())).to(x.dtype)


def draw_like(
    x: Tensor,
    kind: str,
    rng: Rng,
    key: str,
    shape: Sequence[int],
    splits: Splits = (),
    *,
    options: Sequence[float] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Call `draw` on the device of a tensor whose values do not matter."""
    return draw(kind, rng, key, shape, splits, options=options, dtype=dtype, device=x.device)


def bernoulli(p: Tensor, rng: Rng, key: str, shape: Sequence[int], splits: Splits = ()) -> Tensor:
    """Return ones with the probabilities of a local tensor, and zeros."""
    numbers = draw("uniform", rng, key, shape, splits, dtype=p.dtype, device=p.device)
    return (numbers < p).to(p.dtype)


def multinomial(weights: Tensor, num_samples: int, replacement: bool, rng: Rng, key: str) -> Tensor:
    """Draw indices by full weights, the same on all ranks."""
    generator = rng.generator(key, weights.device)
    return torch.multinomial(weights, num_samples, replacement, generator=generator)
