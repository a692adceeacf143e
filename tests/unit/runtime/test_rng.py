import math
import subprocess
import sys

import pytest
import torch

from shardwise.errors import ProgramError
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.rng import Rng, bernoulli, draw, dropout, multinomial
from shardwise.runtime.splits import Split, assemble
from shardwise.runtime.transport.threads import ThreadTransport, run_threads

SHAPE = (7, 6)
SPLITS = (Split(axis="dp", dim=0, of=((1, 7, 1),)), Split(axis="tp", dim=1, of=((3, 2, 1),)))


def on_mesh(axes, fn):  # type: ignore[no-untyped-def]
    def run(rank: int, transport: ThreadTransport) -> object:
        mesh = ProcessMesh(axes, rank, transport)
        return tuple(mesh.coordinates.values()), fn(mesh)

    return run_threads(math.prod(axes.values()), run)


@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 1}, {"dp": 3, "tp": 2}, {"dp": 2, "tp": 5}])
def test_exact_draws_are_the_same_for_any_number_of_ranks(axes: dict[str, int]) -> None:
    def run(mesh: ProcessMesh) -> torch.Tensor:
        return draw("normal", Rng(5, "exact", mesh), "block.3", SHAPE, SPLITS)

    full = assemble(dict(on_mesh(axes, run)), SHAPE, SPLITS, axes)
    assert torch.equal(full, draw("normal", Rng(5), "block.3", SHAPE))


def test_fast_draws_differ_by_shard_and_agree_on_replicas() -> None:
    def run(mesh: ProcessMesh) -> torch.Tensor:
        return draw("uniform", Rng(5, "fast", mesh), "k", (8, 4), (dp,))

    dp = Split(axis="dp", dim=0, of=((1, 8, 1),))
    parts = dict(on_mesh({"dp": 2, "tp": 2}, run))
    assert torch.equal(parts[0, 0], parts[0, 1])
    assert not torch.equal(parts[0, 0], parts[1, 0])


def test_a_draw_repeats_within_a_step_and_changes_with_step_key_and_seed() -> None:
    rng = Rng(1)
    first = draw("normal", rng, "a", (4,))
    assert torch.equal(first, draw("normal", rng, "a", (4,)))
    assert not torch.equal(first, draw("normal", rng, "b", (4,)))
    assert not torch.equal(first, draw("normal", Rng(2), "a", (4,)))
    rng.step += 1
    assert not torch.equal(first, draw("normal", rng, "a", (4,)))


def test_draws_do_not_depend_on_pythons_hash_seed() -> None:
    code = """
from shardwise.runtime.rng import *
print(hash("x"), *draw("uniform", Rng(3), "x", (2,)).tolist())
"""
    there, *drawn = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    ).stdout.split()
    assert int(there) != hash("x")
    assert [float(x) for x in drawn] == draw("uniform", Rng(3), "x", (2,)).tolist()


def test_dropout_preserves_the_mean_and_its_gradient_uses_the_mask() -> None:
    x = torch.ones(2000, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, Rng(0), "d", (2000,))
    assert set(y.tolist()) == {0.0, 1 / 0.75}
    assert abs(y.mean().item() - 1) < 0.05
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert dropout(x, 0.0, Rng(0), "d", (2000,)) is x
    assert dropout(x, 1.0, Rng(0), "d", (2000,)).abs().max() == 0


@pytest.mark.parametrize(
    ("kind", "options", "low", "high"),
    [
        ("uniform", (2.0, 3.0), 2, 3),
        ("bernoulli", (0.5,), 0, 1),
        ("exponential", (2.0,), 0, math.inf),
        ("randint", (3, 9), 3, 8),
        ("geometric", (0.5,), 1, math.inf),
    ],
)
def test_distributions(kind: str, options: tuple[float, ...], low: float, high: float) -> None:
    numbers = draw(kind, Rng(0), "k", (500,), options=options)
    assert low <= numbers.min()
    assert numbers.max() <= high
    assert numbers.std() > 0


def test_bernoulli_and_multinomial() -> None:
    assert sorted(draw("randperm", Rng(0), "p", (9,), dtype=torch.int64).tolist()) == list(range(9))
    ones = bernoulli(torch.tensor([0.0, 1.0]), Rng(0), "b", (2,))
    assert ones.tolist() == [0, 1]
    weights = torch.tensor([0.0, 1.0, 1.0])
    assert set(multinomial(weights, 50, True, Rng(0), "m").tolist()) == {1, 2}
    with pytest.raises(ProgramError, match="did you mean 'normal'"):
        draw("norml", Rng(0), "k", (2,))
    with pytest.raises(ProgramError, match="did you mean 'fast'"):
        Rng(0, "fsat")
