"""Check redistributions against full tensors, forward and backward.

A full tensor is distributed to local tensors of one kind (S, P, R, R~), which a redistribution maps
to local tensors of another kind; both are compared with the same full tensor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.redistribution import REDISTRIBUTIONS
from shardwise.runtime import redistribute as c
from shardwise.runtime.mesh import Axis
from shardwise.runtime.splits import Of, take_part

FORWARD = {
    r.name: (r.source, "S'" if r.name == "all_to_all" else r.target)
    for r in REDISTRIBUTIONS.values()
    # Ranks compute different values of the source of "once"; rows of experts are ragged.
    if r.name not in ("once", "to_experts", "to_tokens")
}
GRADIENT = {"S": "S", "S'": "S'", "P": "R", "R": "R", "R~": "P"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One redistribution of a tensor of some shape."""

    name: str
    shape: tuple[int, ...]
    dim: int
    of: Of
    to_dim: int = 0
    to_of: Of = 0


def local(full: Tensor, kind: str, case: Case, size: int, index: int) -> Tensor:
    """Return the local tensor of rank `index` of `size` for a kind of placement."""
    if kind == "S":
        return take_part(full, case.dim, case.of, size, index).clone()
    if kind == "S'":
        return take_part(full, case.to_dim, case.to_of, size, index).clone()
    if kind == "P":
        generator = torch.Generator().manual_seed(7)
        parts = torch.randn(size, *full.shape, generator=generator, dtype=full.dtype)
        parts[-1] = full - parts[:-1].sum(0)
        return parts[index].clone()
    return full.clone()


def check(case: Case, axis: Axis) -> None:
    """Run the case on this rank and compare; a Partial is compared as the sum over ranks."""
    generator = torch.Generator().manual_seed(3)
    full = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    source, target = FORWARD[case.name]
    x = local(full, source, case, axis.size, axis.index)
    before = x.clone()
    x.requires_grad_()
    y = apply(case, x, axis)
    compare(y.detach(), full, target, case, axis)
    grad = local(weight, GRADIENT[target], case, axis.size, axis.index)
    if grad.dim() > 1:  # gradients may arrive in any memory order
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    y.backward(grad)
    assert x.grad is not None
    compare(x.grad, weight, GRADIENT[source], case, axis)
    assert torch.equal(x.detach(), before), "the argument was changed"


def apply(case: Case, x: Tensor, axis: Axis) -> Tensor:
    function = getattr(c, case.name)
    if case.name == "all_to_all":
        return function(x, axis, case.dim, case.of, case.to_dim, case.to_of)
    if case.name in ("reduce", "reduce_fanout", "fanout", "as_partial"):
        return function(x, axis)
    return function(x, axis, case.dim, case.of)


def compare(actual: Tensor, full: Tensor, kind: str, case: Case, axis: Axis) -> None:
    if kind == "P":
        actual = axis.all_reduce(actual.contiguous().clone()).wait()
        kind = "R"
    expected = local(full, kind, case, axis.size, axis.index)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
