"""The examples run as their first lines say, and print what they promise."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.support.scripts import EXAMPLES, ROOT, run


def run_here(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What an example of one process prints, without another import of torch."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return printed.getvalue()


def test_numbered_examples_are_short() -> None:
    for path in (*EXAMPLES.glob("[01]*.py"), *EXAMPLES.glob("0*/*.py")):
        assert len(path.read_text().splitlines()) < 80, path.name


@pytest.mark.slow
def test_quickstart_trains_and_saves_the_whole_model(tmp_path: Path) -> None:
    script = str(EXAMPLES / "01_quickstart.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = run(*torchrun, script, "--tp", "2", "--steps", "2", folder=tmp_path)
    assert "step 1  loss " in text
    sys.path.insert(0, str(EXAMPLES))
    try:
        import small_gpt
    finally:
        sys.path.remove(str(EXAMPLES))
    model, _ = small_gpt.make()
    state = torch.load(tmp_path / "model.pt")
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    with torch.no_grad():
        loss = model(**small_gpt.batch(0))
    assert f"model.pt on one process: loss {loss:.4f}" in text


@pytest.mark.slow
def test_the_guide_to_pipelines_trains_and_records(tmp_path: Path) -> None:
    script = str(ROOT / "docs/guides/train_pipeline.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = run(*torchrun, script, folder=tmp_path)
    assert text.count("step ") == 3
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    computed = {(e["pid"], e["name"].rstrip("0123456789")) for e in events if e["cat"] == "compute"}
    kinds = ("{}F", "{}I", "{}W", "clipping", "optimizer")
    assert computed == {(rank, kind.format(rank)) for rank in (0, 1) for kind in kinds}


def test_an_own_operator_is_cut_as_its_rule_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run_here("02_own_operator.py", tmp_path, monkeypatch)
    assert "up         tp: 0" in text
    assert "down       tp: 1" in text
    assert "plan tensor on Mesh(tp=3) equals Ranker" in text
    assert "torch.ops.mylib.scores.default" in text


def test_an_edited_plan_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_here("03_edit_a_plan.py", tmp_path, monkeypatch)
    assert text.count("plan hybrid on Mesh(dp=2, tp=2) equals SmallGPT") == 2
    assert "did you mean 'blocks.1.attn.qkv.weight'?" in text


@pytest.mark.slow
def test_own_strategies_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_here("08_own_strategy.py", tmp_path, monkeypatch)
    peaks = {
        line.split()[0]: int(line.split()[1]) for line in text.splitlines() if " KiB at " in line
    }
    assert peaks["fsdp"] < peaks["frugal"] < peaks["ddp"]
    assert "plan frugal on Mesh(dp=4) equals SmallGPT" in text
    assert "plan tall_and_wide on 2 stages of Mesh(dp=2) and Mesh(tp=2)" in text


@pytest.mark.slow
def test_two_unequal_nodes_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = run_here("09_two_nodes.py", tmp_path, monkeypatch)
    assert (tmp_path / "plan.json").is_file()
    step, even = (
        int(line.split()[-2]) for line in text.splitlines() if line.startswith(("dp=", "fsdp "))
    )
    assert step < even
    assert text.count(" -m shardwise.launch.node run ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_lightning_trains_resumes_and_leaves_a_plain_checkpoint(
    launcher: str, tmp_path: Path
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = str(EXAMPLES / "06_lightning.py")
    text = run(
        *(torchrun if launcher == "torchrun" else []), script, "--plan", "fsdp", folder=tmp_path
    )
    assert "epoch 0  loss " in text
    assert "epoch 1  loss 4.56" in text
    assert "last.ckpt on one process: loss 4.51" in text


@pytest.mark.slow
def test_the_demo_shows_both_loss_columns(tmp_path: Path) -> None:
    text = run(str(EXAMPLES / "demo.py"), folder=tmp_path)
    assert text.count("verified: ") == 3
    assert "class Block(nn.Module):" in text
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    losses = [(float(one), float(four)) for _, one, four, _ in (r for r in rows if len(r) == 4)]
    assert len(losses) == 8
    for one, four in losses:
        assert four == pytest.approx(one, abs=1e-4)


@pytest.mark.slow
def test_bytes_are_learned_stopped_resumed_and_sampled(tmp_path: Path) -> None:
    config = str(EXAMPLES / "04_train_bytes/config.yaml")
    train = ["-m", "shardwise.cli", "train", config, "--set", "schedule=[]"]
    two = ["--ranks", "2", "--set", "data.batch_size=8", "--json"]
    first = json.loads(run(*train, *two, "--set", "steps=3", folder=tmp_path))
    assert first["checkpoint"].endswith("step-00000003")
    more = ["--set", "steps=5", "--set", "plan=tensor"]
    then = json.loads(run(*train, *two, *more, folder=tmp_path))
    assert (then["steps"], len(then["losses"])) == (5, 2)
    straight = ["--set", "steps=5", "--set", "data.batch_size=8", "--set", "plan=ddp", "--json"]
    uninterrupted = json.loads(run(*train, *straight, "--folder", "other", folder=tmp_path))
    assert first["losses"] + then["losses"] == pytest.approx(uninterrupted["losses"], rel=1e-4)
    text = run(
        str(EXAMPLES / "04_train_bytes/train_bytes.py"), "runs/bytes", "def ", folder=tmp_path
    )
    assert text.startswith("def ")


@pytest.mark.slow
def test_experts_train_on_four_ranks_to_a_lower_loss(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    text = run(*torchrun, str(EXAMPLES / "11_experts.py"), folder=tmp_path)
    losses = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1", "8"])
def test_long_contexts_of_llama_are_planned(tmp_path: Path, nodes: str) -> None:
    script = str(EXAMPLES / "10_long_context.py")
    verify = ["--verify"] if nodes == "1" else []
    text = run(script, "--nodes", nodes, "--layers", "1", *verify, folder=tmp_path)
    assert text.count("equals LlamaForCausalLM") == (5 if verify else 0)
    memory = [float(line.split()[-2]) for line in text.splitlines() if line.endswith("GiB")]
    assert len(memory) == 5
    assert all(0 < peak < 80 for peak in memory)
