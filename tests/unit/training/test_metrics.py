"""User metrics are exact for any batching, and refused if they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

import shardwise as sw
from shardwise.errors import ConfigError, TrainingError
from tests.support import trainer as support


def reference_metrics(state: dict[str, torch.Tensor], size: int = 9) -> dict[str, float]:
    """Return a model's metrics in plain PyTorch, over all evaluation samples at once."""
    from shardwise.training.data import _Samples

    samples = _Samples(support.Samples(size), 0)
    batch = default_collate([samples[0, index] for index in range(size)])
    model = support.Scored().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        output = model(**batch)
    total, count = support.num_right(output, batch)
    return {
        "evaluation_loss": float(output["loss"]),
        "first": float(support.first_right(output, batch).double().mean()),
        "accuracy": float(total) / float(count),
        "largest": float(output["scores"].max()),
    }


def test_metrics_equal_those_over_all_samples_at_once() -> None:
    metrics, state = support.evaluate(steps=3)
    assert metrics == pytest.approx(reference_metrics(state), rel=1e-12)


def test_metrics_are_logged_and_stop_the_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with sw.Trainer(
        **support.fields(
            model=support.SCORED,
            metrics={"flat": lambda output, batch: torch.ones(len(batch["ids"]))},
            evaluation={"every_steps": 1},
            early_stop={"patience": 2, "metric": "flat", "mode": "max"},
            checkpoints={
                "every_steps": 1,
                "keep_last": 1,
                "keep_best": 1,
                "metric": "flat",
                "mode": "max",
            },
            logs={"console": "lines"},
            folder=str(tmp_path),
        )
    ) as trainer:
        result = trainer.fit()
    assert (result.steps, result.stopped) == (3, "callback")
    assert result.metrics["flat"] == 1.0
    assert '"flat": 1.0' in (tmp_path / "metrics.jsonl").read_text()
    assert "flat 1.0000" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda rows: torch.tensor(0.5), r"returned a Tensor of shape \(\) for 4 samples"),
        (lambda rows: torch.ones(rows + 1), r"of shape \(5,\) for 4 samples"),
        (lambda rows: 0.5, "returned a float for 4 samples"),
        (lambda rows: (0.0, 0), "sum to 0"),
        (lambda rows: {}["a"], "metrics.odd failed with KeyError: 'a'"),
    ],
)
def test_metrics_without_an_exact_mean_are_refused(returned: Any, message: str) -> None:
    metrics = {"odd": lambda output, batch: returned(len(batch["ids"]))}
    with (
        sw.Trainer(**support.fields(model=support.SCORED, metrics=metrics, steps=1)) as trainer,
        pytest.raises(TrainingError, match=message),
    ):
        trainer.fit()


@pytest.mark.parametrize(
    ("changes", "message", "where"),
    [
        ({"early_stop": {"patience": 1, "metric": "acuracy", "mode": "max"}},
         "'acuracy' is not reported; did you mean 'accuracy'?", "early_stop.metric"),
        ({"checkpoints": {"keep_best": 1, "metric": "acc"}}, "'acc' is not reported",
         "checkpoints.metric"),
        ({"checkpoints": {"metric": "gradient_norm"}, "clip_norm": None}, "is not reported",
         "checkpoints.metric"),
        ({"checkpoints": {"keep_best": 1}, "data": {"evaluation": None}, "metrics": {}},
         "'evaluation_loss' is not reported", "checkpoints.metric"),
        ({"early_stop": {"patience": 1, "metric": "accuracy"}}, "higher or a lower 'accuracy'",
         "early_stop.mode"),
        ({"early_stop": {"patience": 1, "metric": "loss"}}, "'loss' is not reported",
         "early_stop.metric"),
        ({"metrics": {"loss": support.num_right}}, "metric 'loss' is a reserved name", "metrics"),
        ({"metrics": {"a b": support.num_right}}, "is not an identifier", "metrics"),
        ({"metrics": {"accuracy": 3}}, "is 3", "sw.Trainer"),
        ({"data": {"evaluation": None}}, "no evaluation data", "data.evaluation"),
    ],
)  # fmt: skip
def test_unreported_metrics_are_refused_at_the_start(
    changes: dict[str, Any], message: str, where: str
) -> None:
    fields = support.fields(**{"metrics": support.METRICS, "model": "no.such:model", **changes})
    with pytest.raises(ConfigError) as caught:
        sw.Trainer(**fields).check()
    assert message in str(caught.value)
    assert where in (caught.value.where or "")


def test_figures_of_steps_may_select_the_best_checkpoint() -> None:
    for metric in ("loss", "gradient_norm", "learning_rate"):
        sw.Trainer(**support.fields(checkpoints={"keep_best": 1, "metric": metric})).check()
