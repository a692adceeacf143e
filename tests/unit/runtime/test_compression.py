"""Compressed sums of ranks in threads against the reference of a single process."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.equivalence.reference_sync import SimulatedRanks
from shardwise.inexact import COMPRESSIONS, INDEX_BYTES, Compression, Inexact
from shardwise.runtime.compression import Feedback, compressed_sum, decode, encode, message_bytes
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.transport.threads import run_threads

SHAPES = {"w": (7, 11), "b": (11,), "scalar": (), "few": (2,), "conv": (6, 5, 3)}


def tensors(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    drawn["b"][3] = 0.0
    return drawn


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("feedback", [True, False])
def test_sums_equal_the_reference(kind: str, num_ranks: int, feedback: bool) -> None:
    compression = Compression(
        kind=kind, ratio=0.3, rank=2, error_feedback=feedback, warmup=1, seed=4
    )
    inexact = Inexact(compression=compression)
    reference = SimulatedRanks(
        {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()},
        dict.fromkeys(SHAPES, inexact),
        num_ranks,
        lambda ps: torch.optim.SGD(ps, lr=0.1),
    )
    steps = 4
    expected = [
        {
            name: reference.sum(
                name, compression, [tensors(r, step)[name] for r in range(num_ranks)], step
            )
            for name in SHAPES
        }
        for step in range(steps)
    ]

    def run(rank, transport):
        axis = ProcessMesh({"dp": num_ranks}, rank, transport).axis("dp")
        state = Feedback()
        total = compressed_sum(compression, list(SHAPES), list(SHAPES.values()), axis, state)
        numels = [math.prod(shape) for shape in SHAPES.values()]
        sums = []
        for step in range(steps):
            flat = [t.reshape(-1) for t in tensors(rank, step).values()]
            result = total.start(flat, step).wait()
            sums.append(dict(zip(SHAPES, result.split(numels), strict=True)))
        return sums, state

    results = run_threads(num_ranks, run, timeout_s=60)
    for rank, (sums, state) in enumerate(results):
        for step in range(steps):
            for name, shape in SHAPES.items():
                torch.testing.assert_close(
                    sums[step][name].view(shape), expected[step][name], rtol=1e-12, atol=1e-12
                )
        for name, residual in state.residuals.items():
            torch.testing.assert_close(
                residual.view(SHAPES[name]), reference.residuals[name][rank], rtol=1e-12, atol=1e-12
            )
        assert bool(state.residuals) == (feedback and num_ranks > 1)


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_the_error_of_a_sum_is_what_its_residuals_hold(kind: str) -> None:
    compression = Compression(kind=kind, ratio=0.3, rank=2)

    def run(rank, transport):
        axis = ProcessMesh({"dp": 2}, rank, transport).axis("dp")
        state = Feedback(measures=True)
        total = compressed_sum(compression, list(SHAPES), list(SHAPES.values()), axis, state)
        for step in range(2):
            flat = [t.reshape(-1) for t in tensors(rank, step).values()]
            sent = [t + state.residuals.get(n, 0.0) for n, t in zip(SHAPES, flat, strict=True)]
            total.start(flat, step).wait()
        return state, torch.cat(sent).norm()

    for state, norm in run_threads(2, run, timeout_s=60):
        (error,) = state.errors.values()
        assert error == pytest.approx(torch.cat([*state.residuals.values()]).norm() / norm)
        assert 0 < error < 1


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8", "fp8", "onebit"])
def test_messages_are_small_and_unbiased(kind: str) -> None:
    values = torch.linspace(-3, 2, 1001)
    total = torch.zeros_like(values)
    for seed in range(200):
        noise = torch.rand(1001, generator=torch.Generator().manual_seed(seed))
        scale, data = encode(kind, values, noise)
        assert scale.nbytes + data.nbytes == message_bytes(kind, 1001, 4)
        total += decode(kind, scale, data, 1001)
    if kind == "onebit":
        assert torch.equal(total.sign(), torch.where(values >= 0, 1.0, -1.0))
    else:  # the mean error of 200 roundings is far below a single one
        unit = {"bf16": 2**-6, "fp16": 2**-9, "int8": 3 / 127, "fp8": 3 * 32 / 448}[kind]
        assert float((total / 200 - values).abs().max()) < 0.2 * unit
    assert torch.int32.itemsize == INDEX_BYTES


def test_values_that_are_not_finite_reach_all_ranks_and_are_forgotten() -> None:
    def run(rank, transport):
        axis = ProcessMesh({"dp": 2}, rank, transport).axis("dp")
        state = Feedback()
        total = compressed_sum(Compression(kind="int8"), ["w"], [(6,)], axis, state)
        spoiled = torch.ones(6, dtype=torch.float64)
        spoiled[1] = float("inf") if rank else 1.0
        first = total.start([spoiled], 0).wait()
        return first, total.start([torch.ones(6, dtype=torch.float64)], 1).wait()

    for first, second in run_threads(2, run, timeout_s=30):
        assert not first.isfinite().all()
        assert second.isfinite().all()
