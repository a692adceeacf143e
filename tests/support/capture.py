"""Compare a captured graph, run node by node, with its model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from shardwise.frontend import capture, flatten_batch
from shardwise.frontend.objective import LossFn, find_loss
from shardwise.ir import Graph
from shardwise.ir.operators import interpret


def assert_captured(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    tolerance: float = 1e-10,
    **options: Any,
) -> Graph:
    """Require that the graph has the loss, gradients and buffer updates of the unchanged model."""
    before = copy.deepcopy(model.state_dict())
    graph = capture(model, batch, loss_fn, **options)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"capture changed {name}"
    if options.get("training") not in (None, model.training):
        model.train(options["training"])
    parameters = dict(model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(0)
    values = interpret(graph, parameters, buffers, flatten_batch(batch)[0])
    assert graph.loss is not None
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(
        values[graph.loss], list(trained.values()), allow_unused=True, retain_graph=True
    )
    torch.manual_seed(0)
    loss = find_loss(_call(model, batch), batch, loss_fn)
    model.zero_grad(set_to_none=True)
    loss.backward()  # reentrant checkpointing refuses autograd.grad
    expected = [parameter.grad for parameter in trained.values()]
    close(values[graph.loss], loss, "loss", tolerance)
    for name, actual, grad in zip(trained, gradients, expected, strict=True):
        assert (actual is None) == (grad is None), f"gradient of {name}: {actual} {grad}"
        if actual is not None and grad is not None:
            close(actual, grad, f"gradient of {name}", tolerance)
    for buffer in graph.buffers:
        now = dict(model.named_buffers(remove_duplicate=False))[buffer.name]
        actual = values[buffer.mutation] if buffer.mutation else buffers[buffer.name]
        close(actual.double(), now.double(), f"buffer {buffer.name}", tolerance)
    return graph


def close(
    actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-10
) -> None:
    scale = expected.abs().max().item() if expected.numel() else 0.0
    error = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= tolerance * max(scale, 1e-30), f"{what}: error {error} of {scale}"


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
