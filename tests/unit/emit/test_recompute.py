"""Programs with recomputation: their text, their equality to the model, and their memory."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise import runtime as rt
from shardwise.runtime.loader import load
from tests.support import zoo

OPTIONS = "use_reentrant=False, preserve_rng_state=False"


@functools.cache
def captured(name: str, dropout: float = 0.0) -> tuple[nn.Module, Any, Any]:
    model, batch = zoo.build(name, dropout=dropout)
    return model, batch, sw.capture(model, batch)


def program(name: str, strategy: str, recompute: Any) -> sw.types.Program:
    graph = captured(name)[2]
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2))
    return sw.compile(graph, plan.with_(recompute=recompute))


# ------------------------------------------------------------------ text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_recomputed_block_is_called_through_checkpoint(strategy: str) -> None:
    text = program("fused_gpt", strategy, "full").source()
    call = f"            add = checkpoint(block, add, {OPTIONS})"
    assert f"        for block in self.blocks[:2]:\n{call}\n" in text
    assert "from torch.utils.checkpoint import checkpoint\n" in text
    assert "def recomputed" not in text


def test_products_are_saved() -> None:
    result = program("fused_gpt", "fsdp", "selective")
    assert "context_fn=rt.keep_products" in result.source()
    assert "backward recomputes blocks.* with products kept (2)" in result.lowered.notes


@pytest.mark.slow
def test_parts_of_a_block_are_functions() -> None:
    result = program("llama", "fsdp", ("model.layers.*.mlp",))
    text = result.source()
    assert text.count("def recomputed_1(post_attention_layernorm):") == 1
    assert "for block in self.model.layers[:2]:" in text
    assert "backward recomputes model.layers.*.mlp (2)" in result.lowered.notes


def test_blocks_that_are_recomputed_differently_are_separate_calls() -> None:
    text = program("fused_gpt", "ddp", ("blocks.1",)).source()
    assert "x = self.blocks[0](add)" in text
    assert f"x = checkpoint(self.blocks[1], x, {OPTIONS})" in text
    assert text.count("(nn.Module):") == 2  # one class for both blocks, and the model


def test_nothing_changes_without_recomputation() -> None:
    assert "checkpoint" not in program("fused_gpt", "fsdp", "none").source()


class Clashing(nn.Module):
    """A module and an argument named like the function that recomputation imports."""

    def __init__(self) -> None:
        super().__init__()
        self.checkpoint = nn.Linear(6, 6)

    def forward(self, checkpoint: Tensor) -> Tensor:
        y = self.checkpoint(checkpoint * 2.0)
        return (y * y + checkpoint).mean()


def test_no_value_is_named_checkpoint() -> None:
    model, batch = Clashing(), {"checkpoint": torch.randn(4, 6)}
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
    certificate = sw.verify(model, batch, plan.with_(recompute=("checkpoint",)))
    assert certificate.ok, str(certificate)


# ------------------------------------------------------------------ equality


@pytest.mark.parametrize(
    ("name", "dropout", "strategy", "recompute"),
    [
        ("fused_gpt", 0.0, "ddp", "full"),
        pytest.param("fused_gpt", 0.0, "fsdp", "full", marks=pytest.mark.slow),
        ("fused_gpt", 0.0, "fsdp", "selective"),
        ("fused_gpt", 0.0, "fsdp", ("blocks.*.n1", "blocks.*.up")),
        pytest.param("fused_gpt", 0.0, "tensor", "full", marks=pytest.mark.slow),
        ("fused_gpt", 0.0, "tensor", "selective"),
        pytest.param("gpt2", 0.1, "ddp", "selective", marks=pytest.mark.slow),
        pytest.param("gpt2", 0.1, "fsdp", "full", marks=pytest.mark.slow),
        ("gpt2", 0.1, "tensor", "selective"),
        pytest.param("llama", 0.0, "ddp", "selective", marks=pytest.mark.slow),
        pytest.param(
            "llama", 0.0, "fsdp", ("model.layers.*.mlp", "*.self_attn"), marks=pytest.mark.slow
        ),
        pytest.param("llama", 0.0, "tensor", ("model",), marks=pytest.mark.slow),
        ("resnet", 0.0, "ddp", ("blocks.*",)),
    ],
)
def test_equal_to_the_model(name: str, dropout: float, strategy: str, recompute: Any) -> None:
    model, batch, graph = captured(name, dropout)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2))
    certificate = sw.verify(model, batch, plan.with_(recompute=recompute))
    assert certificate.ok, str(certificate)


# ------------------------------------------------------------------ memory


class Meter(TorchDispatchMode):
    """Records allocated storages, except the ignored ones, and counts products."""

    def __init__(self, ignored: set[int]) -> None:
        super().__init__()
        self.ignored = ignored
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    self.storages[storage._cdata] = weakref.ref(storage)
        return result

    @property
    def live_bytes(self) -> int:
        alive = [storage for ref in self.storages.values() if (storage := ref()) is not None]
        return sum(storage.nbytes() for storage in alive)


def measured(recompute: Any, backwards: int = 1) -> tuple[int, int, dict[str, Tensor]]:
    """Return the bytes that forward saves for backward, the number of products, and gradients."""
    model, batch, graph = captured("fused_gpt")
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1)).with_(recompute=recompute)
    generated = load(sw.compile(graph, plan).source())
    mesh = rt.ProcessMesh({"dp": 1})
    module = generated.Model(mesh)
    store = rt.ParameterStore(module, mesh, generated.PARAMETERS, generated.BUFFERS)
    store.load_state_dict(model.state_dict())
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    with Meter(own) as meter:
        loss = module(*(batch[name] for name in generated.INPUTS))
        live = meter.live_bytes
        for last in range(backwards)[::-1]:
            loss.backward(retain_graph=last > 0)
    return live, meter.products, {n: p.grad for n, p in module.named_parameters()}


def test_recomputation_saves_memory_and_only_full_repeats_products() -> None:
    result = {mode: measured(mode) for mode in ("none", "full", "selective")}
    live = {mode: row[0] for mode, row in result.items()}
    products = {mode: row[1] for mode, row in result.items()}
    assert live["full"] < 0.4 * live["none"]
    assert live["full"] < live["selective"] < 0.75 * live["none"]
    assert products["selective"] == products["none"] < products["full"]
    for row in result.values():
        for name, gradient in row[2].items():
            torch.testing.assert_close(gradient, result["none"][2][name], rtol=0, atol=0)


def test_backward_may_run_twice() -> None:
    once, twice = measured("selective")[2], measured("selective", backwards=2)[2]
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient)
