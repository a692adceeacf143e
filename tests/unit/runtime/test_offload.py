"""Training with values in host memory equals training without; here both are plain memory.

What a GPU adds (pinned memory, streams, where tensors live) is in `tests/gpu/test_offload.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import ProgramError
from shardwise.runtime.memory import offload_activations
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.optimizer import clip_grad_norm_, optimizer
from tests.support.mixed import SHAPES, Module, full_state
from tests.support.threads import on
from tests.support.tiers import thinned

PARAMETERS, OPTIMIZER = ("parameters",), ("optimizer",)
CASES = [({"dp": n}, zero, OPTIMIZER) for n in (1, 2) for zero in range(4)]
CASES += [({"dp": 2}, 3, PARAMETERS), ({"dp": 2}, 3, PARAMETERS + OPTIMIZER)]
CASES += [({"dp": 1}, 0, PARAMETERS), ({"dp": 1}, 3, PARAMETERS)]


def train(mesh: ProcessMesh, zero: int, types: dict[str, str], offload: tuple[str, ...]) -> Any:
    module = Module(mesh, zero, offload=offload, **types)
    opt = optimizer(module, torch.optim.AdamW, lr=0.01)
    norms = []
    for num_micro in (1, 2, 2):
        module.train_step(num_micro)
        module.train_step()
        norms.append(clip_grad_norm_(module, 1.0).item())
        opt.step()
        opt.zero_grad()
    module.train_step()
    saved = opt.state_dict()
    return norms, module.store.gather_state_dict(), module.store.gather_gradients(), saved["state"]


TYPES = [{"dtype": "float32"}, {"master": "float32"}]
GRID = [(types, *case) for case in CASES for types in TYPES]


@pytest.mark.parametrize(
    ("types", "axes", "zero", "offload"), thinned(GRID, lambda i, _: i % 2 == i // 2 % 2), ids=str
)
def test_offloaded_training_equals_plain_training(
    axes: dict[str, int], zero: int, offload: tuple[str, ...], types: dict[str, str]
) -> None:
    for got, want in zip(
        on(axes, train, zero, types, offload), on(axes, train, zero, types, ()), strict=True
    ):
        assert got[0] == pytest.approx(want[0], rel=1e-6)
        torch.testing.assert_close(got[1:], want[1:], rtol=0, atol=0)


def test_parameters_are_on_the_device_only_during_use() -> None:
    module = Module(ProcessMesh({"dp": 1}), 0, dtype="float32", offload=PARAMETERS)
    store = module.store
    flat = [e for e in store.entries if e.group is not None]
    assert [e.spec.name for e in flat] == [n for n, shape in SHAPES.items() if shape]
    num_gathered: list[int] = []

    def note(*_: Any) -> None:
        num_gathered.append(sum(g.full.untyped_storage().size() > 0 for g in store.groups))

    for block in module.net.blocks:
        block.register_forward_hook(note, prepend=True)
    module.train_step(2)
    assert not any(g.full.untyped_storage().size() for g in store.groups)
    assert num_gathered == [3, 2, 3, 2]  # the root, the block and the next one
    state = store.gather_state_dict()
    assert all(torch.equal(state[n], t) for n, t in full_state().items())


def test_replicated_parameters_cannot_be_offloaded() -> None:
    def run(mesh: ProcessMesh) -> None:
        with pytest.raises(ProgramError, match="with zero 1 each of the 2 ranks of dp"):
            Module(mesh, 1, offload=PARAMETERS)

    on({"dp": 2}, run)


def test_activations_on_a_cpu_are_not_offloaded() -> None:
    def gradient(offloaded: bool) -> tuple[Tensor, int]:
        x = torch.linspace(0, 1, 8).requires_grad_()
        if not offloaded:
            y = x.exp()
        else:
            with offload_activations(min_bytes=0):
                y = x.exp()
        saved = y.grad_fn._saved_result.data_ptr()  # type: ignore[union-attr]
        y.sum().backward()
        assert x.grad is not None
        return x.grad, saved - y.data_ptr()

    plain, moved = gradient(False), gradient(True)
    assert torch.equal(plain[0], moved[0])
    assert moved[1] == 0
