import threading

import pytest
import torch

from shardwise.errors import ProgramError, RankError
from shardwise.runtime.mesh import Axis, ProcessMesh, axis_groups
from shardwise.runtime.transport.threads import ThreadTransport, run_threads
from shardwise.shares import part


def test_four_elements_on_five_ranks_leave_one_empty() -> None:
    assert [part(4, 5, i)[1] for i in range(5)] == [1, 1, 1, 1, 0]


def test_ranks_are_row_major_and_axes_combine() -> None:
    def look(rank: int, transport: ThreadTransport) -> tuple[object, ...]:
        mesh = ProcessMesh({"dp": 2, "cp": 1, "tp": 3}, rank, transport)
        assert mesh.axis("tp") is mesh.axis("tp")
        return mesh.axis("dp").ranks, mesh.axis("tp").index, mesh.axis("dp", "tp").ranks

    seen = run_threads(6, look)
    assert seen[4] == ((1, 4), 1, (0, 1, 2, 3, 4, 5))


def test_groups_are_unique_and_have_several_ranks() -> None:
    groups = axis_groups({"dp": 2, "tp": 2, "cp": 1}, [["dp"], ["tp"], ["cp"], ["dp", "tp"]])
    assert groups == [(0, 2), (1, 3), (0, 1), (2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("names", [("tp", "dp"), ("tpp",), ("dp", "dp")])
def test_axes_must_exist_and_be_in_order(names: tuple[str, ...]) -> None:
    with pytest.raises(ProgramError, match="tp"):
        ProcessMesh({"dp": 1, "tp": 1}).axis(*names)


def test_a_mesh_larger_than_the_transport_is_refused() -> None:
    with pytest.raises(ProgramError, match="more ranks than the 1"):
        ProcessMesh({"dp": 2})


def _axis(rank: int, transport: ThreadTransport, size: int) -> Axis:
    return ProcessMesh({"tp": size}, rank, transport).axis("tp")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_flat_collectives(size: int) -> None:
    sizes = [part(7, size, i)[1] for i in range(size)]

    def run(rank: int, transport: ThreadTransport) -> list[torch.Tensor]:
        axis = _axis(rank, transport, size)
        part_of_rank = torch.full((sizes[rank],), float(rank))
        full = torch.arange(7.0) + rank
        sent = torch.arange(size) * 10 + rank
        return [
            axis.all_reduce(full.clone(), "max").wait(),
            axis.all_gather(part_of_rank, sizes).wait(),
            axis.reduce_scatter(full, sizes).wait(),
            axis.all_to_all(sent, [1] * size, [1] * size).wait(),
            axis.broadcast(full.clone(), size - 1).wait(),
        ]

    for rank, (highest, gathered, scattered, swapped, sent) in enumerate(run_threads(size, run)):
        start, length = part(7, size, rank)
        expected = torch.cat([torch.full((n,), float(i)) for i, n in enumerate(sizes)])
        assert torch.equal(highest, torch.arange(7.0) + size - 1)
        assert torch.equal(gathered, expected)
        total = torch.arange(7.0) * size + sum(range(size))
        assert torch.equal(scattered, total[start : start + length])
        assert torch.equal(swapped, torch.arange(size) + rank * 10)
        assert torch.equal(sent, torch.arange(7.0) + size - 1)


def test_the_first_failing_rank_is_named_and_the_others_are_released() -> None:
    def run(rank: int, transport: ThreadTransport) -> None:
        axis = _axis(rank, transport, 3)
        if rank == 1:
            raise ValueError("no")
        axis.all_reduce(torch.ones(1)).wait()

    with pytest.raises(ValueError, match="no") as caught:
        run_threads(3, run, timeout_s=30)
    assert caught.value.__notes__ == ["on rank 1 of 3"]


def test_a_missing_rank_is_named_after_the_timeout() -> None:
    started = threading.Barrier(3)

    def run(rank: int, transport: ThreadTransport) -> None:
        axis = _axis(rank, transport, 3)
        started.wait(60)  # so that only rank 2 is missing
        if rank != 2:
            axis.all_reduce(torch.ones(1)).wait()

    with pytest.raises(RankError, match=r"ranks \[2\] did not join all_reduce"):
        run_threads(3, run, timeout_s=2.0)


def test_ranks_that_call_different_operations_are_named() -> None:
    def run(rank: int, transport: ThreadTransport) -> None:
        axis = _axis(rank, transport, 2)
        (axis.all_reduce(torch.ones(2)) if rank else axis.broadcast(torch.ones(2))).wait()

    with pytest.raises(RankError, match=r"broadcast.*all_reduce"):
        run_threads(2, run)
