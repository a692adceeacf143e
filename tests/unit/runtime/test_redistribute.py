import pytest
import torch

from shardwise.errors import ProgramError
from shardwise.runtime import redistribute as c
from shardwise.runtime.mesh import Axis, ProcessMesh
from shardwise.runtime.transport.threads import ThreadTransport, run_threads


def on_two(fn):  # type: ignore[no-untyped-def]
    def run(rank: int, transport: ThreadTransport) -> object:
        return fn(ProcessMesh({"tp": 2}, rank, transport).axis("tp"))

    return run_threads(2, run, timeout_s=20)


def test_an_axis_of_one_rank_returns_the_argument() -> None:
    axis, x = ProcessMesh({"tp": 1}).axis("tp"), torch.ones(3)
    assert c.gather(x, axis, 0, 3) is x
    assert c.all_to_all(x, axis, 0, 3, 0, ((1, 3, 1),)) is x
    assert c.reduce(x, axis, "max") is x


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.int16])
def test_all_dtypes_are_supported(dtype: torch.dtype) -> None:
    full = torch.tensor([1, 0, 1, 1, 0]).to(dtype)

    def run(axis: Axis) -> torch.Tensor:
        return c.gather(c.shard(full, axis, 0, 5), axis, 0, 5)

    assert all(torch.equal(got, full) for got in on_two(run))


def test_max_has_no_gradient() -> None:
    def run(axis: Axis) -> bool:
        x = torch.tensor([float(axis.index)], requires_grad=True)
        y = c.reduce(x, axis, "max")
        assert y.item() == 1.0
        return y.requires_grad

    assert on_two(run) == [False, False]


def test_a_result_may_be_changed_without_changing_the_argument() -> None:
    def run(axis: Axis) -> None:
        x = torch.ones(4, requires_grad=True)
        for y in (c.fanout(x, axis), c.as_partial(x, axis), c.reduce(x, axis)):
            (y * 2).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.detach(), torch.ones(4))

    on_two(run)


def test_a_wrong_local_size_is_refused() -> None:
    def run(axis: Axis) -> None:
        c.gather(torch.ones(3), axis, 0, 4)

    with pytest.raises(ProgramError, match=r"dim 0 of shape \(3,\) should be 2 of 4"):
        on_two(run)


def test_compiled_code_may_call_redistributions() -> None:
    mesh = ProcessMesh({"tp": 1})

    def run(axis: Axis) -> torch.Tensor:
        def step(x: torch.Tensor) -> torch.Tensor:
            return c.reduce(torch.sin(x) * 2, axis) + 1

        x = torch.ones(4, requires_grad=True)
        compiled = torch.compile(step, backend="eager")
        out = compiled(x)
        torch.testing.assert_close(out, step(x))
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    run(mesh.axis("tp"))
    lock_step = [ProcessMesh({"tp": 2}, 0, _Echo()).axis("tp")]
    torch.testing.assert_close(run(lock_step[0]), 2 * torch.cos(torch.ones(4)))


class _Echo:
    """A transport whose second rank always has zeros."""

    rank, world_size = 0, 2

    def all_reduce(self, flat, op, group):  # type: ignore[no-untyped-def]
        from shardwise.runtime.transport import Pending

        return Pending(flat)
