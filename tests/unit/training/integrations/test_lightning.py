"""Lightning with compiled steps in one process equals plain Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import shardwise as sw
from shardwise.errors import BatchError, CaptureError, ConfigError, OptimizerError
from shardwise.integrations.lightning import ShardwiseStrategy, step_batch, step_model
from tests.support.lightning import Classifier, Run, assert_same, fit, loader, trainer


@pytest.fixture(scope="module")
def plain() -> Run:
    """Return a run of plain Lightning in one process."""
    return fit()


def test_a_training_equals_plain_lightning(plain: Run) -> None:
    run = fit(ShardwiseStrategy("ddp"))
    assert_same(run, plain)
    assert set(run.metrics[0]) >= {"train_loss_epoch", "hits", "accuracy", "val_loss", "val_worst"}


def test_init_initializes_a_meta_module() -> None:
    def seeded() -> Classifier:
        torch.manual_seed(5)
        return Classifier()

    def on_meta() -> Classifier:
        module = seeded()
        module.embed.to("meta")
        module.head.to("meta")
        return module

    options = {"num_sanity_val_steps": 0, "max_steps": 3}
    expected = fit("auto", seeded, **options)
    assert_same(fit(ShardwiseStrategy("ddp", init=seeded), on_meta, **options), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.3, "accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_steps": 3},
    ],
)
def test_clipping_and_accumulation_equal_plain_lightning(options: dict[str, Any]) -> None:
    assert_same(fit(ShardwiseStrategy("ddp"), **options), fit(**options))


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", pytest.param("bf16-true", marks=pytest.mark.slow)]
)
def test_dtypes_are_those_of_the_trainer(precision: str) -> None:
    run = fit(ShardwiseStrategy("ddp"), precision=precision)
    assert_same(run, fit(precision=precision), 2e-2)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert run.state["head.weight"].dtype is dtype


def test_checkpoints_have_lightnings_format_and_resume_exactly(tmp_path: Path) -> None:
    def saving(folder: str) -> dict[str, Any]:
        every = ModelCheckpoint(tmp_path / folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        return {"callbacks": [every], "enable_checkpointing": True}

    uninterrupted = fit(ShardwiseStrategy("zero1"), **saving("shardwise"))
    path = tmp_path / "shardwise/step=2.ckpt"  # in the middle of a shuffled epoch
    resumed = fit(ShardwiseStrategy("fsdp"), ckpt_path=path)
    assert resumed.losses == uninterrupted.losses[2:]
    assert resumed.rates == uninterrupted.rates[2:]
    assert all(
        torch.equal(resumed.state[name], uninterrupted.state[name]) for name in uninterrupted.state
    )

    saved = torch.load(path, weights_only=True)
    assert list(saved["state_dict"]) == list(Classifier().state_dict())
    loaded = Classifier.load_from_checkpoint(path)
    assert loaded.hparams.width == 8
    end = (
        tmp_path / "shardwise/step=4.ckpt"
    )  # at the end of an epoch, where plain Lightning shuffles anew
    fit(**saving("plain"))
    plain = torch.load(tmp_path / "plain/step=4.ckpt", weights_only=True)
    sharded = torch.load(end, weights_only=True)
    _assert_same_tree(sharded["optimizer_states"], plain["optimizer_states"])
    _assert_same_tree(sharded["lr_schedulers"], plain["lr_schedulers"])
    assert len(fit(ckpt_path=end).losses) == 4
    assert len(fit(ShardwiseStrategy("ddp"), ckpt_path=tmp_path / "plain/step=4.ckpt").losses) == 4


def _assert_same_tree(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            _assert_same_tree(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for item, expected_item in zip(actual, expected, strict=True):
            _assert_same_tree(item, expected_item)
    elif isinstance(expected, torch.Tensor | float):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    else:
        assert actual == expected


def test_loggers_callbacks_and_evaluation_equal_plain_lightning(tmp_path: Path) -> None:
    def run(strategy: Any, folder: str) -> tuple[str, Any, Any, int]:
        L.seed_everything(5, verbose=False)
        log = CSVLogger(tmp_path, name=folder, version="0")
        stop = EarlyStopping("val_loss", min_delta=10.0, patience=1)
        lightning_trainer, _ = trainer(
            strategy,
            logger=log,
            callbacks=[LearningRateMonitor(), stop],
            max_epochs=5,
            log_every_n_steps=1,
        )
        module = Classifier()
        lightning_trainer.fit(module, loader(), loader(10, shuffle=False))
        tested = lightning_trainer.test(module, loader(10, shuffle=False), verbose=False)
        predicted = lightning_trainer.predict(module, loader(10, shuffle=False))
        text = (tmp_path / folder / "0/metrics.csv").read_text()
        return text, tested, torch.cat(predicted), lightning_trainer.current_epoch

    text, tested, predicted, epochs = run(ShardwiseStrategy("ddp"), "shardwise")
    expected = run("auto", "plain")
    assert epochs == expected[3] == 2
    assert text.splitlines()[0] == expected[0].splitlines()[0]
    assert len(text.splitlines()) == len(expected[0].splitlines())
    assert torch.equal(predicted, expected[2])
    assert tested[0]["test_loss"] == pytest.approx(expected[1][0]["test_loss"], abs=1e-10)


@pytest.mark.slow
def test_uncaptured_validation_has_the_trained_weights(plain: Run) -> None:
    class Prints(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            assert self.trainer.validating or self.trainer.sanity_checking
            self.log("row", float(self(batch[0])[0, 0].item()))

    run = fit(ShardwiseStrategy("ddp", evaluate="whole"), Prints)
    for metrics, expected in zip(run.metrics, plain.metrics, strict=True):
        assert metrics["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-10)
    with pytest.raises(CaptureError, match=r"self\.trainer\.validating"):
        fit(ShardwiseStrategy("ddp"), Prints)


def test_weights_are_gathered_on_request_and_absent_otherwise() -> None:
    class Inspect(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            assert all(p.is_meta for p in module.parameters())
            with trainer.strategy.whole_module() as gathered:
                assert not any(p.is_meta for p in gathered.parameters())
                assert gathered(torch.zeros(1, 6, dtype=torch.float64)).shape == (1, 5)
            assert all(p.is_meta for p in module.parameters())

    module = Classifier()
    parameter = next(module.parameters())
    fit(ShardwiseStrategy("ddp"), lambda: module, callbacks=[Inspect()], max_steps=1)
    assert next(module.parameters()) is parameter
    assert parameter.shape == (8, 6)


class Wrong(Classifier):
    """A classifier with an unsupported feature."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0
        self.automatic_optimization = fault != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fault == "index" and batch_idx % 2:
            return None
        if self.fault == "epoch":
            return super().training_step(batch, batch_idx)["loss"] * (1 + self.current_epoch)
        if self.fault == "counter":
            self.calls += 1
        if self.fault == "metric":
            return (
                F.cross_entropy(self(batch[0]), batch[1]) * self.accuracy(batch[0], batch[1]).sum()
            )
        if self.fault == "lr":
            self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.fault == "several":
            return [torch.optim.SGD(p.parameters(), 0.1) for p in (self.embed, self.head)]
        if self.fault == "none":
            return None
        if self.fault == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("manual", OptimizerError, "automatic_optimization=False"),
        ("several", OptimizerError, "several optimizers"),
        ("none", OptimizerError, "no optimizer"),
        ("lbfgs", OptimizerError, "several times"),
        ("index", CaptureError, "batch_idx"),
        ("epoch", CaptureError, "self.current_epoch"),
        ("counter", CaptureError, "self.calls"),
        ("metric", CaptureError, "self.accuracy"),
        ("lr", CaptureError, "self.trainer.strategy"),
    ],
)
def test_features_that_a_compiled_step_cannot_have_are_refused(
    fault: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        fit(ShardwiseStrategy("ddp"), lambda: Wrong(fault), num_sanity_val_steps=0)


def test_unknown_strategies_and_distributed_samplers_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fsdp'"):
        ShardwiseStrategy("fsdpp")
    lightning_trainer, _ = trainer(ShardwiseStrategy("ddp"), max_steps=1)
    data = loader().dataset
    part = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(BatchError, match="DistributedSampler"):
        lightning_trainer.fit(Classifier(), part)


@pytest.mark.slow
def test_freezing_and_unfreezing_in_callbacks_equal_plain_lightning() -> None:
    class Freezes(L.Callback):
        """Freeze the embedding for some steps, and the head's bias at first."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            module.head.bias.requires_grad_(False)

        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            module.embed.requires_grad_(trainer.global_step not in (1, 2))
            module.head.bias.requires_grad_(trainer.global_step >= 3)

    options: dict[str, Any] = {"max_steps": 6}
    run = fit(ShardwiseStrategy("ddp"), callbacks=[Freezes()], **options)
    assert_same(run, fit(callbacks=[Freezes()], **options))


@pytest.mark.slow
def test_parameters_without_an_optimizer_do_not_change() -> None:
    class Head(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), 0.1)

    options = {"gradient_clip_val": 0.1, "max_steps": 3}  # the norm is that of the head only
    assert_same(fit(ShardwiseStrategy("ddp"), Head, **options), fit("auto", Head, **options))


def test_a_plan_can_be_made_in_advance(tmp_path: Path, plain: Run) -> None:
    module = Classifier().double()
    x, y = next(iter(loader()))
    graph = sw.capture(step_model(module), step_batch("training", [x.double(), y]))
    assert [p.name for p in graph.parameters] == [name for name, _ in module.named_parameters()]
    plan = sw.strategies.zero1(graph, sw.Cluster.local(1))
    plan.save(tmp_path / "plan.json")
    assert_same(fit(ShardwiseStrategy(tmp_path / "plan.json")), plain)


def test_a_meta_module_is_initialized_when_training_starts() -> None:
    class Large(Classifier):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.head = nn.Linear(8, 5)

    run = fit(ShardwiseStrategy("fsdp"), Large, num_sanity_val_steps=0, max_steps=1)
    assert run.state["head.weight"].isfinite().all()
