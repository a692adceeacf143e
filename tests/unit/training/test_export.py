"""An exported model has the weights and outputs of the model on one device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import shardwise as sw
from shardwise.cli import app
from shardwise.errors import ShardwiseError
from tests.support import huggingface as hf


def batch(rows: int) -> dict[str, torch.Tensor]:
    items = [hf.text(index) for index in range(rows)]
    return {k: torch.stack([item[k] for item in items]) for k in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a model with distinct weights, and its checkpoint."""
    model = hf.gpt2(seed=5)
    folder = tmp_path_factory.mktemp("checkpoint") / "step-1"
    sw.save_checkpoint(folder, model)
    return model.eval(), folder


def test_a_program_runs_on_other_batch_sizes(trained: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = trained
    out = sw.export(folder, tmp_path / "model.pt2", model=hf.gpt2(), batch=batch(2))
    program = torch.export.load(out)
    assert "transformer.h.0.attn.c_attn.weight" in program.state_dict
    for rows in (2, 5):
        logits = program.module()(**batch(rows))["logits"]
        torch.testing.assert_close(logits, model(**batch(rows)).logits)


@pytest.mark.slow
def test_a_program_needs_only_torch(trained: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = trained
    sw.export(folder, tmp_path / "model.pt2", model=hf.gpt2(), batch=batch(2))
    torch.save(batch(3), tmp_path / "inputs.pt")
    script = (
        "import sys, torch\n"
        "inputs = torch.load('inputs.pt')\n"
        "out = torch.export.load('model.pt2').module()(**inputs)\n"
        "assert 'transformers' not in sys.modules and 'shardwise' not in sys.modules\n"
        "torch.save(out['logits'], 'logits.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=120)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(**batch(3)).logits)


def test_a_folder_opens_with_from_pretrained(trained: tuple[Any, Path], tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    model, folder = trained
    for source, name in ((folder, "of-checkpoint"), (model, "of-model")):
        out = sw.export(source, tmp_path / name, config=model.config)
        loaded = GPT2LMHeadModel.from_pretrained(out, dtype=torch.float64)
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert {path.name for path in tmp_path.iterdir()} == {"of-checkpoint", "of-model"}


def test_a_parallel_module_is_exported_in_full(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), torch.randn(6, 4)
    graph = sw.capture(model, (x,), lambda y, _: y.pow(2).mean())
    plan = sw.strategies.ddp(graph, sw.Cluster.local(1))
    part = sw.parallelize(model, (x,), plan, lambda y, _: y.pow(2).mean())
    optimizer = sw.optimizer(part, torch.optim.SGD, lr=0.1)
    part.train_step((x,))
    optimizer.step()
    out = sw.export(
        part, tmp_path / "m.pt2", model=model, batch=(x,), dynamic=False, dtype=torch.float64
    )
    state = {name: tensor.double() for name, tensor in part.gather_state_dict().items()}
    output = torch.export.load(out).module()(x.double())
    expected = nn.functional.linear(x.double(), state["0.weight"], state["0.bias"])
    torch.testing.assert_close(output, expected)


def test_missing_arguments_and_parameters_are_named(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    _, folder = trained
    with pytest.raises(ShardwiseError, match="needs the model and an example batch"):
        sw.export(folder, tmp_path / "model.pt2")
    with pytest.raises(ShardwiseError, match="lacks"):
        sw.export(folder, tmp_path / "m.pt2", model=nn.Linear(2, 2), batch=torch.zeros(2, 2))


def test_the_command_writes_a_folder_and_a_program(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    model, folder = trained
    model.config.save_pretrained(tmp_path)
    script = tmp_path / "served.py"
    script.write_text(
        "from tests.support import huggingface as hf\n"
        "from tests.unit.training.test_export import batch\n"
        "def make():\n    return hf.gpt2(), batch(2)\n"
    )
    for out, option in (
        ("folder", ["--config", str(tmp_path)]),
        ("m.pt2", ["--model", f"{script}:make"]),
    ):
        done = CliRunner().invoke(app, ["export", str(folder), "-o", str(tmp_path / out), *option])
        assert done.exit_code == 0, done.output
    assert (tmp_path / "folder/model.safetensors").is_file()
    assert torch.export.load(tmp_path / "m.pt2").module()(**batch(3))["logits"].shape[0] == 3


class Branching(nn.Linear):
    """Branches on a value, which cannot be exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


class Longer(nn.Linear):
    """A model with a parameter that the weights lack."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.more = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (
            nn.Linear(5, 4),
            (torch.ones(2, 5),),
            "weight has shape (4, 4) in the weights, (4, 5) in Linear",
        ),
        (Longer(), (torch.ones(2, 4),), "Longer has more, which the weights lack"),
        (Branching(4, 4), (torch.ones(2, 4),), "Branching cannot be captured"),
        (nn.Linear(4, 4), {"y": torch.ones(2, 4)}, "forward does not take this batch"),
    ],
)
def test_export_errors_do_not_show_those_of_torch(
    model: nn.Module, batch: Any, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        sw.export(nn.Linear(4, 4), tmp_path / "m.pt2", model=model, batch=batch)
    assert message in str(caught.value)
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ShardwiseError, match="cannot write") as caught:
        sw.export(nn.Linear(4, 4), tmp_path / "file" / "m.pt2", batch=(torch.ones(2, 4),))
    assert str(tmp_path) in (caught.value.where or "")
