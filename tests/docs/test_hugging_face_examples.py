"""The examples with Hugging Face models run as their first lines say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripts import EXAMPLES, run

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

pytest.importorskip("accelerate", reason="the Hugging Face integration is an extra")


@pytest.mark.slow
def test_llama_trains_alone(tmp_path: Path) -> None:
    text = run(str(EXAMPLES / "05_llama.py"), "--steps", "2", folder=tmp_path)
    losses = [float(line.split()[-1]) for line in text.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_on_ranks_has_the_losses_of_one(tmp_path: Path) -> None:
    script = str(EXAMPLES / "05_llama.py")
    one_process = run(script, "--steps", "3", folder=tmp_path)
    assert (
        run(*TORCHRUN, script, "--plan", "tensor", "--steps", "3", folder=tmp_path) == one_process
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_8b_with_128k_tokens_fits_on_8_h100(tmp_path: Path) -> None:
    text = run(str(EXAMPLES / "05_llama.py"), "--size", "8b-128k", folder=tmp_path)
    assert "Plan auto for LlamaForCausalLM on Mesh(" in text
    used, limit = text.split("\nmemory ")[1].split(" GiB")[0].split(" of ")
    assert 16 < float(used) < float(limit) < 80
    assert "\nstep " in text


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [(), ("--plan", "pipeline", "--lora")])
def test_the_trainer_trains_and_saves(tmp_path: Path, options: tuple[str, ...]) -> None:
    start = TORCHRUN if options else ()
    text = run(*start, str(EXAMPLES / "07_hf_trainer.py"), *options, folder=tmp_path)
    assert f"{options[1] if options else 'ddp'}: loss " in text
    if options:
        assert (tmp_path / "out-hf/adapter_model.safetensors").is_file()
        assert not (tmp_path / "out-hf/model.safetensors").exists()
    else:
        assert "out-hf loads with from_pretrained: True" in text
