"""Conversion to and from Hugging Face folders and torch files, and the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import shardwise as sw
from shardwise.checkpoint import box_io, convert_checkpoint
from shardwise.checkpoint.open import open_checkpoint
from shardwise.checkpoint.shards import Box, LocalBox, narrow
from shardwise.cli import app
from shardwise.errors import CheckpointError


class Base(nn.Module):
    """The base of a model with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 4), nn.LayerNorm(4)


class WithHead(nn.Module):
    """A model as in transformers: the base under a prefix, and a head that may be tied."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.model, self.head = Base(), nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = WithHead()
    ema = {name: p.detach() + 1 for name, p in model.named_parameters()}
    sw.save_checkpoint(tmp_path / "c", model, step=5, copies={"ema": ema}, extra={"note": "x"})
    return tmp_path / "c"


def assert_equal(actual: object, expected: dict[str, torch.Tensor]) -> None:
    assert isinstance(actual, dict)
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_conversion_to_torch_and_to_shardwise(saved: Path, tmp_path: Path) -> None:
    expected = dict(sw.load_checkpoint(saved).state_dict)
    (file,) = convert_checkpoint(saved, tmp_path / "w.pt", to="torch")
    state = torch.load(file, weights_only=True)
    assert_equal(state, expected)
    assert state["head.weight"].data_ptr() == state["model.embed.weight"].data_ptr()
    convert_checkpoint(saved, tmp_path / "again", to="shardwise")
    loaded = sw.load_checkpoint(tmp_path / "again")
    assert_equal(loaded.state_dict, expected)
    assert (loaded.step, loaded.extra) == (5, {"note": "x"})
    assert "ema.model.norm.weight" in loaded.names
    convert_checkpoint(
        saved, tmp_path / "mean", to="shardwise", section="ema", dtype=torch.bfloat16
    )
    mean = sw.load_checkpoint(tmp_path / "mean").state_dict
    assert torch.equal(mean["model.norm.bias"], torch.ones(4, dtype=torch.bfloat16))
    sw.load_checkpoint(tmp_path / "mean", WithHead())


def test_conversion_to_hf_in_shards_and_back(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"needs the model's config\.json"):
        convert_checkpoint(saved, tmp_path / "hf", to="hf")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy"}))
    convert_checkpoint(
        saved, tmp_path / "hf", to="hf", config=tmp_path / "config.json", shard_bytes=100
    )
    names = {p.name for p in (tmp_path / "hf").iterdir()}
    assert {"config.json", "model.safetensors.index.json"} < names
    assert "model-00001-of-00002.safetensors" in names
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert "head.weight" not in index["weight_map"]  # tied
    torch.manual_seed(1)
    model = WithHead()
    sw.load_checkpoint(tmp_path / "hf", model)
    assert_equal(model.state_dict(), dict(sw.load_checkpoint(saved).state_dict))
    convert_checkpoint(tmp_path / "hf", tmp_path / "ours", to="shardwise")
    sw.load_checkpoint(tmp_path / "ours", WithHead())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_prefixes_of_base_models_are_matched(saved: Path, tmp_path: Path) -> None:
    model = WithHead()
    weights = {n: t.clone() for n, t in model.model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")  # without "model."
    loaded_model = WithHead()
    sw.load_checkpoint(tmp_path, loaded_model)
    assert torch.equal(loaded_model.head.weight, model.model.embed.weight)
    with pytest.raises(CheckpointError, match=r"has no head\.weight"):
        sw.load_checkpoint(tmp_path, WithHead(tied=False))
    loaded = sw.load_checkpoint(tmp_path, WithHead(tied=False), strict=False)
    assert loaded.missing == ("head.weight",)
    (tmp_path / "with").mkdir()
    save_file({f"model.{n}": t for n, t in weights.items()}, tmp_path / "with" / "x.safetensors")
    base = Base()
    sw.load_checkpoint(tmp_path / "with", base)
    assert torch.equal(base.norm.weight, model.model.norm.weight)


def test_only_the_needed_ranges_of_a_file_without_checksums_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box_io, "_RUN_BYTES", 16)
    monkeypatch.setattr(box_io, "BOX_BYTES", 64)
    shapes = {"a": (7, 5, 6), "b": (40,), "c": (), "d": (3, 50)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint, rng = open_checkpoint(tmp_path), random.Random(0)
    for _ in range(200):
        name, full = rng.choice(list(tensors.items()))
        offset = tuple(rng.randrange(n) for n in full.shape)
        size = tuple(rng.randint(1, n - o) for n, o in zip(full.shape, offset, strict=True))
        target = torch.zeros(size)
        targets = [LocalBox(Box(offset, size), target)]
        with box_io.Reader(checkpoint.folder, checkpoint.manifest) as reader:
            reader.fill([box_io.Request(section="model", name=name, targets=targets)])
            rows = full.numel() // (*full.shape, 1)[0] * (*size, 1)[0]
            assert reader.bytes_read <= 4 * rows
        assert torch.equal(target, narrow(full, offset, size))


def test_safetensors_opens_saved_files(saved: Path) -> None:
    with safe_open(saved / "model-00000.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = sw.load_checkpoint(saved).state_dict
    assert set(tensors) == set(expected) - {"head.weight"}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name])


def test_checkpoint_commands(saved: Path, tmp_path: Path) -> None:
    run = CliRunner()
    text = run.invoke(app, ["checkpoint", "inspect", str(saved), "--tensors"]).output
    assert "step 5" in text
    assert "model.embed.weight" in text
    inspected = json.loads(run.invoke(app, ["checkpoint", "inspect", str(saved), "--json"]).output)
    assert inspected["sections"]["model"] == {"tensors": 3, "boxes": 3, "bytes": 192}
    assert run.invoke(app, ["checkpoint", "verify", str(saved)]).exit_code == 0
    out = str(tmp_path / "w.pt")
    done = run.invoke(app, ["checkpoint", "convert", str(saved), "--to", "torch", "-o", out])
    assert done.exit_code == 0
    file = saved / "model-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    verified = run.invoke(app, ["checkpoint", "verify", str(saved), "--json"])
    assert verified.exit_code == 1
    assert "model-00000.safetensors is corrupt" in json.loads(verified.output)["problems"][0]


@pytest.mark.slow
def test_transformers_opens_converted_folders(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    for tied in (False, True):
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=tied)
        model = transformers.LlamaForCausalLM(config)
        folder = tmp_path / str(tied)
        model.save_pretrained(folder / "own")
        sw.save_checkpoint(folder / "c", model, extra={"hf_config": config.to_dict()})
        convert_checkpoint(folder / "c", folder / "hf", to="hf", shard_bytes=20_000)
        pretrained = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf")
        assert_equal(dict(pretrained.state_dict()), dict(model.state_dict()))
        with torch.device("meta"):
            empty = transformers.LlamaForCausalLM(config)
        loaded = sw.load_checkpoint(folder / "own", empty)
        assert_equal(dict(empty.state_dict()), dict(model.state_dict()))
        assert all("inv_freq" in name for name in loaded.missing)
