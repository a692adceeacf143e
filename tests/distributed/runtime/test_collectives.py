"""The same redistributions on real gloo processes, with every dtype and size."""

from collections.abc import Callable

import pytest
import torch

from shardwise.shares import part
from tests.support.pool import Pool
from tests.support.redistribution import FORWARD, Case, check
from tests.support.toy import process_mesh

CUTS = [(0, 5), (1, ((3, 3, 2),)), (2, ((1, 4, 2), (2, 2, 1)))]


def every_case(size: int) -> int:
    axis = process_mesh({"tp": size}).axis("tp")
    done = 0
    for name in FORWARD:
        for dim, of in CUTS:
            shape = [4, 3, 2]
            shape[dim] = of if isinstance(of, int) else sum(a * b * c for a, b, c in of)
            to_dim = (dim + 1) % 3
            to_of = shape[to_dim]
            check(
                Case(name=name, shape=tuple(shape), dim=dim, of=of, to_dim=to_dim, to_of=to_of),
                axis,
            )
            done += 1
    recut = Case(name="all_to_all", shape=(18,), dim=0, of=((3, 3, 2),), to_dim=0, to_of=18)
    check(recut, axis)
    return done


def every_type(size: int) -> None:
    mesh = process_mesh({"tp": size})
    axis = mesh.axis("tp")
    names = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64"
    sizes = [part(4, size, i)[1] for i in range(size)]
    for name in names.split():
        dtype = getattr(torch, name)
        data = torch.full((sizes[axis.index],), axis.index % 2).to(dtype)
        gathered = axis.all_gather(data, sizes).wait()
        assert gathered.tolist() == [i % 2 for i in range(size) for _ in range(sizes[i])], name
        summed = axis.all_reduce(torch.ones(3, dtype=dtype)).wait()
        assert summed.tolist() == [1 if dtype is torch.bool else size] * 3, name
        if dtype is not torch.bool:
            scattered = axis.reduce_scatter(torch.ones(4, dtype=dtype), sizes).wait()
            assert scattered.tolist() == [size] * sizes[axis.index], name
        sent = axis.broadcast(torch.full((2,), axis.index).to(dtype), size - 1).wait()
        assert sent.tolist() == torch.full((2,), size - 1).to(dtype).tolist(), name
        empty = torch.empty(0, dtype=dtype)
        assert axis.all_reduce(empty).wait().numel() == 0
        assert axis.all_gather(empty, [0] * size).wait().numel() == 0
        assert axis.all_to_all(empty, [0] * size, [0] * size).wait().numel() == 0


def two_axes() -> list[float]:
    mesh = process_mesh({"dp": 2, "tp": 2})
    x = torch.tensor([float(mesh.rank)])
    sums = [mesh.axis(*names).all_reduce(x.clone()).wait().item() for names in (["dp"], ["tp"])]
    return [*sums, mesh.world.all_reduce(x.clone()).wait().item()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_redistribution(pool: Callable[[int], Pool], size: int) -> None:
    assert pool(size).run(every_case, size) == [len(FORWARD) * len(CUTS)] * size


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_every_dtype_and_empty_tensors(pool: Callable[[int], Pool], size: int) -> None:
    pool(size).run(every_type, size)


@pytest.mark.distributed
def test_axes_of_a_mesh_are_separate_groups(pool: Callable[[int], Pool]) -> None:
    assert pool(4).run(two_axes) == [[2, 1, 6], [4, 1, 6], [2, 5, 6], [4, 5, 6]]
