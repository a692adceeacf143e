"""Emitted files equal files that a person has read and approved.

`pytest tests/golden --update-golden` writes them again; read the difference before you commit it.
Source lines, versions and fingerprints are removed because they change with every edit elsewhere.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import runtime as rt
from shardwise.runtime.loader import load
from tests.support import zoo
from tests.support.pool import Pool
from tests.support.toy import process_mesh
from tests.support.training import assert_close, make

EXPECTED = Path(__file__).parent / "expected"
CASES: dict[str, tuple[str, str, int, dict[str, int]]] = {
    "fused_gpt_hybrid": ("fused_gpt", "hybrid", 4, {"dp": 2, "tp": 2}),
    "llama_tensor": ("llama", "tensor", 2, {}),
    "mlp_fsdp": ("mlp", "fsdp", 3, {}),
}


def program(name: str) -> sw.types.Program:
    model_name, strategy, ranks, options = CASES[name]
    model, batch = zoo.build(model_name)
    graph = sw.capture(model, batch)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(ranks), **options)
    return sw.compile(graph, plan)


def normalized(source: str) -> str:
    """Return the text without the parts that change with every edit of other files."""
    source = re.sub(r"shardwise \S+ for the graph [0-9a-f]+", "shardwise for the graph G", source)
    return re.sub(r"[\w./-]*?([\w-]+\.py):\d+", r"\1", source)


@pytest.mark.parametrize("name", CASES)
def test_emitted_files(name: str, request: pytest.FixtureRequest) -> None:
    sources = [normalized(source) for source in program(name).sources]
    path = EXPECTED / f"{name}.py"
    text = sources[0] + f"\n# {len(sources)} distinct rank programs\n"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    expected = path.read_text()
    changes = difflib.unified_diff(expected.splitlines(), text.splitlines(), lineterm="")
    assert text == expected, "\n".join(["run with --update-golden if intended:", *changes])


@pytest.mark.parametrize("name", CASES)
def test_emitted_code_passes_ruff(name: str, tmp_path: Path) -> None:
    compiled = program(name)
    compiled.save(tmp_path)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert (tmp_path / "plan.json").exists()
    for source in compiled.sources:
        assert max(map(len, source.splitlines())) <= 110
        assert not re.search(r"^(from|import) (?!torch|shardwise|math)", source, re.MULTILINE)


PRINT = """
import sys
from tests.golden.test_emitted_code import CASES, program
for name in ("fused_gpt_hybrid", "mlp_fsdp"):
    compiled = program(name)
    print(compiled.fingerprint, compiled.graph.fingerprint)
    print(*compiled.sources, sep="\\n")
"""


@pytest.mark.slow
def test_processes_and_hash_seeds_write_the_same_text() -> None:
    texts = set()
    for seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "src:."}
        command = [sys.executable, "-c", PRINT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        texts.add(done.stdout)
    assert len(texts) == 1
    assert len(texts.pop()) > 5000


# ------------------------------------------------------------------ torch.compile


def train_compiled(
    name: str, strategy: str, mesh: rt.ProcessMesh, options: dict[str, Any], backend: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return the loss and gradients of the emitted module under `torch.compile`."""
    torch._dynamo.reset()
    model, batch = make(name)
    graph = sw.capture(model, batch)
    plan = getattr(sw.strategies, strategy)(graph, sw.Cluster.local(mesh.size), **options)
    compiled = sw.compile(graph, plan)
    generated = load(compiled.source(mesh.rank), graph.functions)
    module = generated.Model(mesh, rt.Rng(0, "exact", mesh), "cpu")
    store = rt.ParameterStore(module, mesh, generated.PARAMETERS, generated.BUFFERS)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    store.load_with(lambda key: tensors[key].detach())
    inputs = [
        rt.take_local(batch[key], splits, mesh.coordinates, mesh.axes)
        for key, splits in generated.INPUTS.items()
    ]
    run = torch.compile(module, backend=backend)
    for _ in range(2):  # the second time with compiled code
        store.zero_grad()
        with store.step():
            loss = run(*inputs)
            loss.backward()
    return loss.detach(), store.gather_gradients()


def compiled_on_ranks(name: str, strategy: str, axes: dict[str, int], backend: str) -> Any:
    mesh = process_mesh(axes)
    return train_compiled(name, strategy, mesh, {}, backend)


def assert_dense(name: str, result: tuple[torch.Tensor, dict[str, torch.Tensor | None]]) -> None:
    model, batch = make(name)
    loss = model(**batch)
    loss.backward()
    assert_close(result[0], loss.detach(), "loss")
    for key, parameter in model.named_parameters():
        assert_close(result[1][key], parameter.grad, key, 1e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_one_rank_compiles(backend: str) -> None:
    mesh = rt.ProcessMesh({"dp": 1})
    assert_dense("fused_gpt", train_compiled("fused_gpt", "ddp", mesh, {}, backend))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("strategy", "axis"), [("fsdp", "dp"), ("tensor", "tp")])
def test_two_ranks_compile(
    pool: Callable[[int], Pool], strategy: str, axis: str, backend: str
) -> None:
    results = pool(2).run(compiled_on_ranks, "fused_gpt", strategy, {axis: 2}, backend, timeout=280)
    for result in results:
        assert_dense("fused_gpt", result)
