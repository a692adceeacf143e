"""What is kept in host memory is there, pinned, and training is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.runtime.memory import offload_activations
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.optimizer import clip_grad_norm_, optimizer
from tests.support.mixed import SHAPES, Module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PARAMETERS, OPTIMIZER = ("parameters",), ("optimizer",)


def train(offload: tuple[str, ...], types: dict[str, str]) -> tuple[Module, Any, dict[str, Tensor]]:
    module = Module(ProcessMesh({"dp": 1}), 0, device="cuda", offload=offload, **types)
    opt = optimizer(module, torch.optim.AdamW, lr=0.01)
    for num_micro in (1, 2, 2):
        module.train_step(num_micro)
        clip_grad_norm_(module, 1.0)
        opt.step()
        opt.zero_grad()
    module.train_step()
    state = {n: t.cpu() for n, t in module.store.gather_state_dict().items()}
    return module, opt, state


@pytest.mark.parametrize("offload", [OPTIMIZER, PARAMETERS, PARAMETERS + OPTIMIZER])
@pytest.mark.parametrize("types", [{"dtype": "float32"}, {"master": "float32"}], ids=str)
def test_stored_values_and_optimizer_state_are_on_the_host(
    offload: tuple[str, ...], types: dict[str, str]
) -> None:
    module, opt, state = train(offload, types)
    for entry in module.store.entries:
        if entry.spec.shape or "optimizer" in offload:
            assert entry.piece.device.type == "cpu"
            assert entry.piece.is_pinned()
            moments = opt.state[entry.piece]
            assert all(t.device.type == "cpu" for t in moments.values())
        assert entry.leaf.device.type == "cuda"
    gathered = [g.full.untyped_storage().size() for g in module.store.groups]
    assert gathered == [0] * (3 if "parameters" in offload else 0)
    _, _, want = train((), types)
    for name in SHAPES:
        torch.testing.assert_close(state[name], want[name], rtol=1e-5, atol=1e-5)


def test_saved_activations_leave_the_gpu_and_parameters_stay() -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
    layers = layers.cuda()
    x = torch.randn(4096, 512, device="cuda")

    def step(offloaded: bool) -> tuple[int, list[Tensor]]:
        layers.zero_grad()
        before = torch.cuda.memory_allocated()
        if offloaded:
            with offload_activations():
                loss = layers(x).square().mean()
            torch.cuda.synchronize()
        else:
            loss = layers(x).square().mean()
        allocated_bytes = torch.cuda.memory_allocated() - before
        loss.backward()
        return allocated_bytes, [p.grad.clone() for p in layers.parameters() if p.grad is not None]

    plain, want = step(False)
    moved, got = step(True)
    assert len(want) == 16
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    one = x.nbytes
    assert plain > 14 * one
    assert moved < 3 * one


def test_small_tensors_and_parameters_are_not_moved() -> None:
    weight = nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    x = torch.randn(8, 1024, device="cuda", requires_grad=True)
    with offload_activations(min_bytes=1 << 20):
        y = x @ weight.t()
    saved = [y.grad_fn._saved_self, y.grad_fn._saved_mat2]  # type: ignore[union-attr]
    assert saved[0].data_ptr() == x.data_ptr()
    assert saved[1].data_ptr() == weight.data_ptr()
