"""No data hides a wrong program from the verifier: it is caught, or nothing is certified."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.api import verify as verifying
from shardwise.collectives.solver.derive import verify as verify_trees
from shardwise.equivalence.certificate import Jitter, compare
from shardwise.equivalence.trial import perturb_inputs
from shardwise.errors import PlanError, ProgramError, RuleError, ShardwiseError, VerifyError

Batch = dict[str, torch.Tensor]


@torch.library.custom_op("blinding::center", mutates_args=())
def center(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


center.register_fake(torch.empty_like)
center.register_autograd(lambda ctx, grad: grad - grad.mean(0))
sw.register_rule("blinding::center", "b n -> b n")  # wrong: the mean is over b


class Centered(nn.Module):
    """An operator with a wrong rule, before a loss with two terms."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.coefficient = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
        self.register_buffer("limits", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(center(self.a(x))) + self.limits.clamp(-1, 1)
        return y.square().mean() + self.coefficient * self.a(x).square().mean()


def zero_layer(model: Centered, batch: Batch) -> None:
    model.b.weight.data.zero_()


HIDING: dict[str, Callable[[Centered, Batch], Any]] = {
    "nothing": lambda model, batch: None,
    "a layer of zeros": zero_layer,
    "a batch of zeros": lambda model, batch: batch["x"].zero_(),
    "a loss term 1e14 times larger": lambda model, batch: setattr(model, "coefficient", 1e14),
    "finfo.min in a buffer": lambda model, batch: model.limits.fill_(torch.finfo().min),
    "equal rows": lambda model, batch: batch["x"].copy_(batch["x"][:1].expand(6, 4)),
}


def planned(model: nn.Module, batch: Any, strategy: str = "ddp", **options: Any) -> sw.Plan:
    graph = sw.capture(model, batch, **options)
    extra = {"num_microbatches": 2} if strategy == "pipeline" else {}
    plan: sw.Plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(2), **extra)
    return plan


@pytest.mark.parametrize("hidden_by", HIDING)
def test_a_wrong_rule_is_caught_behind(hidden_by: str) -> None:
    torch.manual_seed(0)
    model, batch = Centered(), {"x": torch.randn(6, 4)}
    plan = planned(model, batch)
    HIDING[hidden_by](model, batch)
    certificate = sw.verify(model, batch, plan)
    assert not certificate.ok
    assert "blinding.center" in str(certificate.first_difference)
    assert "test_blinding.py" in str(certificate.first_difference)


def fill(tensor: torch.Tensor, value: float) -> None:
    tensor.view(-1)[0] = value


NOT_FINITE: dict[str, tuple[Callable[[Centered, Batch], Any], str]] = {
    "batch": (lambda model, batch: fill(batch["x"], torch.nan), "input x is nan at [0, 0]"),
    "infinite batch": (lambda model, batch: fill(batch["x"], torch.inf), "the loss is "),
    "weights": (lambda model, batch: fill(model.a.weight.data, torch.nan), "parameter a.weight"),
    "loss": (lambda model, batch: setattr(model, "coefficient", torch.inf), "the loss is inf"),
}


@pytest.mark.parametrize("place", NOT_FINITE)
def test_non_finite_data_is_not_certified(place: str) -> None:
    model, batch = Centered(), {"x": torch.randn(6, 4)}
    change, words = NOT_FINITE[place]
    plan = planned(model, batch)
    change(model, batch)
    with pytest.raises(VerifyError) as raised:
        sw.verify(model, batch, plan)
    assert words in str(raised.value)


def test_a_loss_without_labels_is_refused() -> None:
    model, batch = nn.Linear(4, 3), {"input": torch.randn(4, 4)}

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, torch.full((4,), -100))

    plan = planned(model, batch, loss_fn=loss)
    with pytest.raises(VerifyError, match="the loss is nan"):
        sw.verify(model, batch, plan, loss)


def test_elements_are_compared_relative_to_their_magnitude() -> None:
    expected = torch.tensor([1e20, 1.0, 1e-20], dtype=torch.float64)
    assert compare("x", expected * (1 + 1e-12), expected).ok
    for place in range(3):
        wrong = expected.clone()
        wrong[place] *= 1.001
        assert compare("x", wrong, expected).relative_error == pytest.approx(1e-3)
    noise = torch.tensor([0.0, 0.0, 1e-19], dtype=torch.float64)
    assert compare("x", expected + 0.9 * noise, expected, noise=noise).ok
    nan = expected.clone().fill_(torch.nan)
    assert not compare("x", nan, expected).ok
    assert not compare("x", expected, nan).ok


def test_a_certificate_names_what_was_not_exercised() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.used(x).square().mean() + 0.0 * self.unused(x).mean()

    batch = {"x": torch.randn(4, 4), "other": torch.randn(4)}
    model = Partly()
    certificate = sw.verify(model, batch, planned(model, batch))
    assert certificate.ok
    assert certificate.trials == (
        "weights and batch as given",
        "weights, buffers and batch changed",
    )
    text = str(certificate)
    assert "not exercised: parameter unused.weight: its gradient is zero" in text
    assert "not exercised: input other: nothing reads it" in text


@torch.library.custom_op("blinding::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, grad: 3 * grad - 0.1 * grad.mean(0))
sw.register_rule("blinding::triple", "~b n -> b n")  # wrong for b in the backward pass


class Tripled(nn.Module):
    """The loss does not reach the coupling of rows if the batch is tiny: the rows are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(triple(self.a(x))).square().mean()


def test_a_wrong_gradient_is_caught_behind_a_tiny_batch() -> None:
    torch.manual_seed(0)
    model, batch = Tripled().double(), {"x": 1e-30 * torch.randn(6, 4, dtype=torch.float64)}
    certificate = sw.verify(model, batch, planned(model, batch))
    assert not certificate.ok
    assert "blinding.triple" in str(certificate.first_difference)


class Saturated(Tripled):
    """The triple is in effect switched off, so that its wrong backward changes nothing."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.gate, self.use = nn.Parameter(torch.zeros(())), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        gate = torch.sigmoid(self.gate - 300)
        if self.use == "triple":
            return self.b(h).square().mean() + (gate * triple(h)).square().mean()
        return self.b(gate * triple(h)).square().mean()


@pytest.mark.parametrize("use", ["triple", "linear_1"])
def test_a_certificate_names_what_saturated_functions_hide(use: str) -> None:
    torch.manual_seed(0)
    model, batch = Saturated(use), {"x": torch.randn(6, 4)}
    text = " ".join(sw.verify(model, batch, planned(model, batch)).not_exercised)
    assert re.search(rf"the use of %\w+ in %{use} .*: its gradient is tiny", text)


class Masked(nn.Module):
    """A mean over the rows of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, keep: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = self.a(x).squeeze(1) * keep * weights
        return rows.sum() / keep.sum()


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 1)])
def test_a_mask_of_equal_elements_gets_a_hole(value: bool, shape: tuple[int, ...]) -> None:
    model = Masked()
    batch = {"x": torch.randn(6, 4), "keep": torch.ones(6).bool(), "weights": torch.full((6,), 7)}
    graph = sw.capture(model, batch)
    changed = perturb_inputs(graph, batch | {"keep": torch.full(shape, value)}, True, True)["keep"]
    assert changed.any()
    assert not changed.all()
    unseen = sw.verify(model, batch, planned(model, batch)).not_exercised
    assert unseen == ("input weights: the same in all trials",)


def test_a_certificate_names_the_choices_of_rules_that_no_node_takes() -> None:
    model, batch = Tripled(), {"x": torch.randn(6, 4)}
    rule = "rule of blinding.triple.default: no node takes"
    for strategy, unused in (("ddp", "shard n, pass 0"), ("tensor", "shard b, pass 0")):
        certificate = sw.verify(model, batch, planned(model, batch, strategy))
        assert f"{rule} {unused}" in certificate.not_exercised
        assert certificate.ok == (strategy == "tensor")  # which does not shard the rows


class Critic(nn.Module):
    """A score whose last bias cancels: its gradient is zero up to rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        return self.net(fake).mean() - self.net(real).mean()


def test_an_optimizer_step_caused_by_rounding_alone_is_tolerated() -> None:
    model, batch = Critic(), {"real": torch.randn(6, 4), "fake": torch.randn(6, 4)}
    certificate = sw.verify(model, batch, planned(model, batch))
    assert certificate.ok
    assert "not exercised: parameter net.2.bias: its gradient is zero" in str(certificate)


# ------------------------------------------------ models that can be verified


WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def weighted(output: torch.Tensor, batch: Any) -> torch.Tensor:
    labels = torch.tensor([0, 1, 2, 1])
    scaled = F.cross_entropy(output, labels, weight=WEIGHT) * torch.tensor(0.1)
    return scaled + output.square().mean() * torch.tensor([0.5], dtype=torch.float16)[0]


def test_constants_of_a_loss_function_are_widened() -> None:
    model, batch = nn.Linear(4, 3), {"input": torch.randn(4, 4)}
    certificate = sw.verify(model, batch, planned(model, batch, loss_fn=weighted), weighted)
    assert certificate.ok, str(certificate)
    assert certificate.max_relative_error < 1e-12
    assert torch.get_default_dtype() == torch.float32


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.randn(4, 4).cfloat()), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((x.to(torch.complex64) @ self.w).abs()).square().mean()


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "tensor"])
def test_complex_parameters_are_verified(strategy: str) -> None:
    model, batch = Rotated(), {"x": torch.randn(4, 4)}
    assert sw.verify(model, batch, planned(model, batch, strategy)).ok


class Bagged(Looked):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, sparse=True)  # type: ignore[assignment]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
@pytest.mark.parametrize("kind", [Looked, Bagged])
def test_sparse_gradients_are_verified(kind: type[nn.Module], strategy: str) -> None:
    model, batch = kind(), {"ids": torch.randint(10, (4, 3))}
    assert sw.verify(model, batch, planned(model, batch, strategy)).ok


def test_an_error_of_the_model_names_its_line() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.line(x)
            if y.dtype == torch.float64 and not torch.compiler.is_compiling():
                raise ValueError("only for float32")
            return y.mean()

    model, batch = Narrow(), {"x": torch.randn(4, 4)}
    plan = planned(model, batch)
    with pytest.raises(VerifyError) as raised:
        sw.verify(model, batch, plan)
    assert "only for float32" in str(raised.value)
    assert "test_blinding.py" in str(raised.value.where)


FAMILIES = ["Llama", "Qwen2", "Gemma", "Mistral", "Mixtral"]


@pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES[1:])]
)
def test_default_models_of_transformers_are_verified_or_refused_with_a_line(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    ids = torch.randint(0, 50, (4, 6))
    batch = {"input_ids": ids, "labels": ids}
    plan = planned(model, batch, "tensor")
    if family == "Mixtral":
        with pytest.raises(VerifyError) as raised:
            sw.verify(model, batch, plan)
        assert raised.value.where
        assert "experts_implementation" in str(raised.value.hint)
        return
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)


# ------------------------------------------------ rules, trees, edited code, training


def test_a_rule_for_an_operator_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(RuleError, match="did you mean 'aten::linear'"):
        sw.register_rule("aten::linaer", "b k+, n k+ -> b n")
    with pytest.raises(RuleError, match=r"there is no operator aten::linear\.tensor"):
        sw.register_rule("aten::linear.tensor", "b k+, n k+ -> b n")
    from shardwise.sharding import registry

    sw.register_rule("blinding::centre", "b n -> b n")  # may be defined later
    try:
        model, batch = nn.Linear(4, 3), {"input": torch.randn(4, 4)}
        with pytest.raises(RuleError, match="did you mean 'blinding::center'"):
            planned(model, batch, loss_fn=lambda y, batch: y.mean())
    finally:
        registry.REGISTERED.remove("blinding.centre")
        del registry.RULES["blinding.centre"]


def solved(ranks: int, strategy: str) -> tuple[nn.Module, Batch, sw.Plan]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x))).square().mean()

    torch.manual_seed(0)
    model, batch, cluster = Two(), {"x": torch.randn(7, 5)}, sw.Cluster.local(ranks)
    plan = getattr(sw.strategies, strategy)(sw.capture(model, batch), cluster)
    return model, batch, sw.collectives.choose(plan, cluster, use="solved")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_collectives_run_along_the_trees_of_the_plan(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, plan = solved(3, strategy)
    assert plan.collectives
    assert sw.verify(model, batch, plan).ok
    from shardwise.equivalence import ranks

    def slightly_wrong(program: Any, inputs: Any) -> Any:
        return [None if r is None else r + 1e-3 for r in interpret(program, inputs)]

    interpret = ranks.interpret
    monkeypatch.setattr(ranks, "interpret", slightly_wrong)
    assert not sw.verify(model, batch, plan).ok


@pytest.mark.parametrize(("ranks", "runs"), [(2, True), (8, False)])
def test_a_twin_runs_the_collectives_of_the_plan_or_says_that_it_does_not(
    ranks: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, plan = solved(ranks, "ddp")
    model.to("meta")
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok
    assert any("collectives" in line for line in certificate.scaled) is not runs
    from shardwise.equivalence import ranks as on_ranks

    calls = []
    interpret = on_ranks.interpret
    monkeypatch.setattr(on_ranks, "interpret", lambda *a: calls.append(a) or interpret(*a))
    sw.verify(model, batch, plan)
    assert bool(calls) is runs


@pytest.mark.parametrize("half", ["inward", "outward"])
def test_a_small_tree_without_a_half_is_caught(half: str) -> None:
    _, _, plan = solved(3, "ddp")
    (choice,) = plan.collectives
    (forest,) = choice.forests
    *trees, last = forest.trees
    large, small = replace(last, weight=last.weight - 0.03), replace(last, weight=0.03)
    right = replace(forest, trees=(*trees, large, small))
    verify_trees(replace(choice, forests=(right,)))
    wrong = replace(forest, trees=(*trees, large, replace(small, **{half: ()})))
    with pytest.raises(PlanError, match=f"tree 3 of weight 0.03 has no {half} half"):
        verify_trees(replace(choice, forests=(wrong,)))


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_edited_code_in_a_folder_is_verified(tmp_path: Path, strategy: str) -> None:
    model, batch, _ = solved(2, "ddp")
    graph = sw.capture(model, batch)
    plan = planned(model, batch, strategy)
    sw.compile(graph, plan).save(tmp_path)
    assert sw.verify(model, batch, program=tmp_path).ok
    files = [file for file in tmp_path.glob("*.py") if ".tanh()" in file.read_text()]
    for file in files:
        file.write_text(file.read_text().replace(".tanh()", ".sin()"))
    certificate = sw.verify(model, batch, program=tmp_path)
    assert not certificate.ok
    assert ".sin()" in str(certificate.first_difference)
    files[0].unlink()
    with pytest.raises(ProgramError, match="cannot be read"):
        sw.verify(model, batch, program=tmp_path)


def test_an_edit_that_no_result_depends_on_is_refused(tmp_path: Path) -> None:
    class Terms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            return 1e16 * y.square().mean() + y.tanh().square().mean()

    model, batch = Terms(), {"x": torch.randn(6, 4)}
    plan = planned(model, batch)
    sw.compile(sw.capture(model, batch), plan).save(tmp_path)
    file = tmp_path / "rank_0.py"
    file.write_text(file.read_text().replace(".tanh()", ".sin()"))
    certificate = sw.verify(model, batch, program=tmp_path)
    assert not certificate.ok
    assert "no result depends on it" in str(certificate)


def test_training_verifies_once_for_each_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, _ = solved(2, "ddp")
    plan = planned(model, batch)
    verifying.verify_first(model, batch, plan, folder=tmp_path)
    (entry,) = json.loads((tmp_path / verifying.VERIFIED).read_text()).values()
    assert "equals Two" in entry["certificate"]

    def fail(*args: Any, **options: Any) -> Any:
        raise ShardwiseError("verified again")

    monkeypatch.setattr(verifying, "verify", fail)
    verifying.verify_first(model, batch, plan, folder=tmp_path)
    with pytest.raises(ShardwiseError, match="verified again"):
        verifying.verify_first(model, batch, planned(model, batch, "fsdp"), folder=tmp_path)
    (tmp_path / verifying.VERIFIED).write_text("{")
    with pytest.raises(ShardwiseError, match="verified again"):
        verifying.verify_first(model, batch, plan, folder=tmp_path)


def test_training_stops_if_the_plan_is_wrong(tmp_path: Path) -> None:
    model, batch = Centered(), {"x": torch.randn(6, 4)}
    with pytest.raises(VerifyError, match="DIFFERS FROM Centered"):
        verifying.verify_first(model, batch, planned(model, batch), folder=tmp_path)
    assert not (tmp_path / verifying.VERIFIED).exists()


def test_one_measurement_of_noise_separates_equal_values() -> None:
    equal = torch.full((5,), 0.1, dtype=torch.float64)
    with Jitter(1):
        assert len(set((equal * 3).tolist())) == 1
    with Jitter(1, by_position=True) as jitter:
        assert len(set((equal * 3).tolist())) == 5
        assert jitter.decisions == []
        equal.argmax()
        assert len(jitter.decisions) == 1


class NarrowExp(torch.autograd.Function):
    """Computes in float32, whatever its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.float().exp().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.float().exp().to(grad.dtype)


class CallsNarrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return NarrowExp.apply(self.line(x)).mean()  # type: ignore[no-untyped-call]


def test_functions_that_compute_in_float32_are_widened_on_every_rank() -> None:
    model, batch = CallsNarrow(), {"x": torch.randn(6, 4)}
    plan = sw.strategies.ddp(sw.capture(model, batch), sw.Cluster.local(2))
    certificate = sw.verify(model, batch, plan)
    assert certificate.ok, str(certificate)
