"""Compare training on one device and on many.

`dense` trains a model in this process and `parallel` on a rank of a pool. Both return a `Run`, and
`assert_equal` compares two runs; `check_parallel` does all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.equivalence.reference import KeepDouble
from tests.support import attentions, experts, packed, packed_sequences, zoo
from tests.support.pool import Pool

STEPS = 3
LEARNING_RATE = 0.01
MAX_NORM = 0.5


@dataclass(frozen=True, kw_only=True)
class Run:
    """Losses and norms of every step, the first gradients, and the final state."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]


class Odd(nn.Module):
    """A model with tied, frozen and unused parameters and prime sizes."""

    def __init__(self, vocab: int = 13, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 7), nn.Linear(7, width)
        self.scale = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(input_ids) * self.scale
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        return {"loss": loss, "more": (logits, [labels]), "name": "odd"}


def tokens(batch: int, length: int, vocab: int) -> dict[str, Tensor]:
    """Return token ids and ragged labels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, vocab, (batch, length), generator=generator)
    labels = torch.randint(0, vocab, (batch, length), generator=generator)
    for row in range(batch):
        labels[row, : (3 * row) % length] = -100
    return {"input_ids": ids, "labels": labels}


def make(name: str, batch: int = 7) -> tuple[nn.Module, Any]:
    """Return a float64 model with seeded weights, and a batch."""
    torch.manual_seed(0)
    if name == "odd":
        return Odd().double(), tokens(batch, 5, 13)
    if name == "fused_gpt":
        model = zoo.FusedGPT(vocab=37, dim=24, heads=4, layers=2, length=8)
        return model.double(), tokens(batch, 6, 37)
    if name == "resnet":
        images = torch.randn(batch, 3, 6, 6, dtype=torch.float64)
        labels = torch.arange(batch) % 5
        return zoo.ResNet(width=6).double(), {"pixel_values": images, "labels": labels}
    if name.startswith("rnn_"):
        return packed_sequences.make(name, batch)
    if name == "experts":
        model, inputs = experts.make(5, batch)
        return model.double(), {k: v.double() for k, v in inputs.items()}
    if name == "language_of_experts":
        model, inputs = experts.make_language(batch)
        return model.double(), inputs
    if name.startswith("attention_"):
        return attentions.make(name.removeprefix("attention_"))
    if name.startswith("packed_"):
        model, inputs = packed.make(name.removeprefix("packed_"), min(batch, 3))
        return model.double(), inputs
    model, inputs = zoo.build(name)
    inputs = {k: torch.cat([v, v.flip(0)])[:batch] for k, v in inputs.items()}
    return model, inputs


def plan_for(model: nn.Module, batch: Any, strategy: str, ranks: int, **options: Any) -> sw.Plan:
    graph = sw.capture(model, batch)
    return getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **options)


def device_of_rank() -> torch.device:
    """Return the device on which the default group communicates."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def dense(name: str, batch: int = 7, device: torch.device | str = "cpu") -> Run:
    """Train on one device with plain PyTorch."""
    model, inputs = to_device(*make(name, batch), device)
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        with KeepDouble():
            output = model(**inputs)
            loss = output["loss"] if isinstance(output, dict) else zoo.loss_of(output)
            loss.backward()
        if step == 0:
            gradients = {
                n: None if p.grad is None else p.grad.cpu().clone()
                for n, p in model.named_parameters()
            }
        norms.append(torch.nn.utils.clip_grad_norm_(trained, MAX_NORM).item())
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    state = {n: t.detach().cpu().clone() for n, t in model.state_dict().items()}
    return Run(losses=losses, norms=norms, gradients=gradients, state=state)


def to_device(
    model: nn.Module, inputs: Any, device: torch.device | str
) -> tuple[nn.Module, dict[str, Tensor]]:
    return model.to(device), {name: tensor.to(device) for name, tensor in inputs.items()}


def parallel(name: str, strategy: str, ranks: int, options: dict[str, Any], batch: int = 7) -> Run:
    """Train on this rank of a plan."""
    model, inputs = to_device(*make(name, batch), device_of_rank())
    with KeepDouble():
        plan = plan_for(model, inputs, strategy, ranks, **options)
        pm = sw.parallelize(model, inputs, plan=plan)
        del model
        return trained(pm, inputs)


def trained(pm: Any, inputs: Any) -> Run:
    """Train a parallel module with AdamW and clipping."""
    opt = sw.optimizer(pm, torch.optim.AdamW, lr=LEARNING_RATE)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        losses.append(pm.train_step(inputs).item())
        if step == 0:
            gradients = {
                n: None if g is None else g.cpu() for n, g in pm.gather_gradients().items()
            }
        norms.append(sw.clip_grad_norm_(pm, MAX_NORM).item())
        opt.step()
        opt.zero_grad()
    state = {n: t.cpu() for n, t in pm.gather_state_dict().items()}
    return Run(losses=losses, norms=norms, gradients=gradients, state=state)


@functools.cache
def _dense(name: str, batch: int, device: str) -> Run:
    return dense(name, batch, device)


def check_parallel(
    pool: Callable[[int], Pool],
    model: str,
    strategy: str,
    ranks: int,
    options: dict[str, Any],
    batch: int = 7,
) -> None:
    """Require that training is equal on all ranks of a pool and on one device."""
    group = pool(ranks)
    runs = group.run(parallel, model, strategy, ranks, options, batch, timeout=300)
    device = "cuda" if group.backend == "nccl" else "cpu"
    for run in runs:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        assert_equal(run, _dense(model, batch, device))


def assert_equal(actual: Run, expected: Run, tolerance: float = 1e-9) -> None:
    """Compare all numbers of two runs, relative to the largest of each tensor."""
    for what in ("losses", "norms"):
        pairs = zip(getattr(actual, what), getattr(expected, what), strict=True)
        for step, (value, reference) in enumerate(pairs):
            error = abs(value - reference)
            assert error <= tolerance * abs(reference), f"{what}[{step}] {value} {reference}"
    assert list(actual.gradients) == list(expected.gradients)
    largest = max(g.abs().max().item() for g in expected.gradients.values() if g is not None)
    for name, gradient in expected.gradients.items():
        assert_close(actual.gradients[name], gradient, f"gradient of {name}", 1e-4 * largest)
    assert set(actual.state) == set(expected.state)
    for name, tensor in expected.state.items():
        assert_close(actual.state[name], tensor, f"{name} after {STEPS} steps", LEARNING_RATE, 1e-7)


def assert_close(
    actual: Tensor | None,
    expected: Tensor | None,
    what: str,
    floor: float = 0.0,
    tolerance: float = 1e-9,
) -> None:
    """Require equality up to `tolerance` of the largest expected element, or of `floor`."""
    assert (actual is None) == (expected is None), f"{what}: {actual} instead of {expected}"
    if actual is None or expected is None:
        return
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if expected.numel():
        scale = max(expected.abs().max().item(), floor)
        error = (actual - expected).abs().max().item()
        assert error <= tolerance * scale, f"{what}: error {error} of {scale}"


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the type and text of the error that a call raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
