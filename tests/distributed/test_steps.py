"""Several named steps over the same modules, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from tests.support.pool import Pool
from tests.support.tiers import thinned
from tests.support.training import error_of

pytestmark = pytest.mark.distributed
STRATEGIES = ["ddp", "zero1", "zero2", "fsdp", "tensor", "pipeline"]
Step = Callable[[Any, Any], Any]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 5)

    def forward(self, z: Tensor) -> Tensor:
        for layer in self.layers:
            z = z + torch.tanh(layer(z))
        return self.out(self.norm(z))


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.out(x)


def bce(x: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, torch.full_like(x, label))


def d_step(modules: Any, batch: Any) -> Tensor:
    fake = modules.G(batch["z"]).detach()
    return bce(modules["D"](batch["x"]), 1.0) + bce(modules.D(fake), 0.0)


def g_step(modules: Any, batch: Any) -> dict[str, Tensor]:
    fake = modules.G(batch["z"])
    return {"loss": bce(modules.D(fake), 1.0), "fake": fake}


STEPS: dict[str, Step] = {"d": d_step, "g": g_step}


def gan(rows: int = 6) -> tuple[dict[str, nn.Module], nn.ModuleDict, dict[str, Any]]:
    torch.manual_seed(5)
    modules = {"G": Generator().double(), "D": Discriminator().double()}
    batches = {
        "d": {"x": torch.randn(rows, 5).double(), "z": torch.randn(rows, 6).double()},
        "g": {"z": torch.randn(rows, 6).double()},
    }
    return modules, nn.ModuleDict(copy.deepcopy(modules)), batches


def plan_for(strategy: str, ranks: int) -> Callable[[sw.Graph], sw.Plan]:
    all_options = {"pipeline": {"num_microbatches": 1}, "hybrid": {"dp": 2, "tp": 2, "zero": 3}}
    options = all_options.get(strategy, {})
    make = getattr(sw.strategies, strategy)
    return lambda graph: make(graph, sw.Cluster.local(ranks), **options)  # type: ignore[no-any-return]


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output  # type: ignore[no-any-return]


def assert_same(pm: Any, plain: nn.Module, what: str) -> None:
    """Compare gradients, parameters and buffers."""
    gradients, state = pm.gather_gradients(), pm.gather_state_dict()
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            assert gradients[name] is None, f"{what}: {name}"
        else:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


def train_gan(strategy: str, ranks: int, folder: str = "") -> None:
    modules, plain, batches = gan()
    pm = sw.parallelize(modules, batches, plan_for(strategy, ranks), steps=STEPS)
    options = {"lr": 0.01, "betas": (0.5, 0.9)}
    d_opt = sw.optimizer(pm, torch.optim.Adam, params="D.*", **options)
    g_opt = sw.optimizer(pm, torch.optim.Adam, params=modules["G"].parameters(), **options)
    references = {
        "d": torch.optim.Adam(plain["D"].parameters(), **options),  # type: ignore[arg-type]
        "g": torch.optim.Adam(plain["G"].parameters(), **options),  # type: ignore[arg-type]
    }
    for round_ in range(3):
        for name, opt in (("d", d_opt), ("g", g_opt)):
            opt.zero_grad()
            references[name].zero_grad()
            loss = pm.train_step(batches[name], step=name)
            expected = loss_of(STEPS[name](plain, batches[name]))
            expected.backward()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0.0)
            assert_same(
                pm, plain, f"{name} {round_}"
            )  # step d leaves G without a gradient, step g gives D one
            if name == "d":
                norm = sw.clip_grad_norm_(pm, 0.1, params="D.*")
                expected = torch.nn.utils.clip_grad_norm_(plain["D"].parameters(), 0.1)
                torch.testing.assert_close(norm, expected)
            opt.step()
            references[name].step()
            assert_same(pm, plain, f"{name} {round_} updated")
        if round_ == 1 and folder:  # a checkpoint of both optimizers changes nothing
            sw.save_checkpoint(folder, pm, {"d": d_opt, "g": g_opt})
            state = pm.gather_state_dict()
            for opt in (d_opt, g_opt):
                opt.state.clear()
            pm.load_state_dict({name: torch.zeros_like(t) for name, t in state.items()})
            sw.load_checkpoint(folder, pm, {"d": d_opt, "g": g_opt})
    plain.eval()
    with torch.no_grad():
        expected = g_step(plain, batches["g"])
    torch.testing.assert_close(pm.eval_loss(batches["g"], step="g"), expected["loss"])
    torch.testing.assert_close(pm.eval_step(batches["g"], step="g")["fake"], expected["fake"])


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    thinned(
        [*((s, 2) for s in STRATEGIES), ("ddp", 4), ("fsdp", 3), ("hybrid", 4)],
        lambda _, case: case == ("fsdp", 2),
    ),
)
def test_a_gan_trains_as_on_one_device(
    pool: Callable[[int], Pool], tmp_path: Path, strategy: str, ranks: int
) -> None:
    pool(ranks).run(train_gan, strategy, ranks, str(tmp_path / "saved"), timeout=110)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy = nn.Linear(4, 7), nn.Linear(7, 3)
        self.value = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.policy(hidden), self.value(hidden)


def actor(model: ActorCritic, batch: Any) -> Tensor:
    logits, value = model(batch["x"])
    advantage = (batch["reward"] - value.squeeze(-1)).detach()
    return (F.cross_entropy(logits, batch["action"], reduction="none") * advantage).mean()


def critic(model: ActorCritic, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["x"])[1].squeeze(-1), batch["reward"])


def decay(model: ActorCritic, batch: Any) -> Tensor:
    return 0.1 * (model.policy.weight**2).sum() + 0.0 * batch["x"].sum()


def one_model(strategy: str) -> None:
    torch.manual_seed(1)
    model = ActorCritic().double()
    plain = copy.deepcopy(model)
    batch = {
        "x": torch.randn(6, 4).double(),
        "reward": torch.randn(6).double(),
        "action": torch.randint(3, (6,)),
    }
    steps: dict[str, Step] = {"actor": actor, "critic": critic, "decay": decay}
    pm = sw.parallelize(model, batch, plan_for(strategy, 2), steps=steps)
    opt = sw.optimizer(pm, torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for name, step in steps.items():  # gradients of three objectives add up
            loss = step(plain, batch)
            loss.backward()
            torch.testing.assert_close(pm.train_step(batch, step=name), loss.detach())
            assert_same(pm, plain, name)
        for each in (opt, reference):
            each.step()
            each.zero_grad()
        assert_same(pm, plain, "updated")


@pytest.mark.parametrize(
    "strategy",
    thinned(["ddp", "zero1", "zero2", "fsdp", "tensor"], lambda _, name: name == "zero2"),
)
def test_objectives_of_one_model_add_up(pool: Callable[[int], Pool], strategy: str) -> None:
    pool(2).run(one_model, strategy, timeout=110)


def distill(modules: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        target = modules.teacher(batch["x"])
    return F.mse_loss(modules.student(batch["x"]), target)


def teacher_and_student(strategy: str) -> None:
    torch.manual_seed(2)
    student = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    with torch.no_grad():
        for p in teacher.parameters():
            p.add_(0.1)
    plain = nn.ModuleDict({"student": copy.deepcopy(student), "teacher": copy.deepcopy(teacher)})
    modules = {"student": student, "teacher": teacher}
    batch = {"x": torch.randn(6, 5).double()}
    pm = sw.parallelize(modules, batch, plan_for(strategy, 2), steps={"distill": distill})
    opt = sw.optimizer(pm, torch.optim.SGD, params="student.*", lr=0.1)
    reference = torch.optim.SGD(plain["student"].parameters(), lr=0.1)
    for _ in range(2):
        pm.train_step(batch, step="distill")
        distill(plain, batch).backward()
        assert_same(pm, plain, "distilled")
        for each in (opt, reference):
            each.step()
            each.zero_grad()
        with torch.no_grad():  # the teacher is an average of the student
            for module in (pm, plain):
                named = dict(module.named_parameters())
                for name, p in named.items():
                    if name.startswith("teacher."):
                        p.lerp_(named[name.replace("teacher", "student")], 0.25)
        assert_same(pm, plain, "averaged")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor"])
def test_a_teacher_averages_its_student(pool: Callable[[int], Pool], strategy: str) -> None:
    pool(2).run(teacher_and_student, strategy, timeout=110)


def errors_of_mistakes() -> list[str]:
    modules, _, batches = gan()
    make = plan_for("ddp", 2)

    def start(**changes: Any) -> Any:
        arguments = {"model": modules, "batch": batches, "plan": make, "steps": STEPS}
        return sw.parallelize(**{**arguments, **changes})

    graph = sw.capture(modules, batches["g"], step=g_step)
    tensor = sw.strategies.tensor(graph, sw.Cluster.local(2))
    replicated = {name: {"layout": {"tp": "replicate"}} for name in tensor.parameters}
    other = sw.Plan.from_json({**tensor.to_json(), "parameters": replicated})
    pm = start()
    errors = [
        error_of(pm.train_step, batches["d"]),
        error_of(pm.train_step, batches["d"], step="dd"),
        error_of(sw.parallelize, modules["G"], batches["g"], make),
    ]
    del pm
    return [
        *errors,
        error_of(start, steps={"d": lambda modules: 0.0}),
        error_of(start, steps={}),
        error_of(start, plan={"d": make}),
        error_of(start, plan={"d": tensor, "g": other}, batch=batches["d"]),
        error_of(start, model={"keys": modules["G"], "D": modules["D"]}),
        error_of(start, loss_fn=lambda output, batch: output),
    ]


def test_errors_name_the_mistake(pool: Callable[[int], Pool]) -> None:
    expected = [
        "no step was named", "did you mean 'd'", "G.layers.0.weight",
        "the step function takes", "steps must map names", "the plans are for steps",
        "store the parameter differently",
        "cannot be the name of a module", "a step computes its own loss",
    ]  # fmt: skip
    for errors in pool(2).run(errors_of_mistakes, timeout=110):
        for error, text in zip(errors, expected, strict=True):
            assert text in error, (text, error)


def test_each_step_is_verified() -> None:
    modules, _, batches = gan()
    for (name, step), strategy in zip(STEPS.items(), ("tensor", "fsdp"), strict=True):
        plan = plan_for(strategy, 2)(sw.capture(modules, batches[name], step=step))
        assert sw.verify(modules, batches[name], plan, step=step).ok
