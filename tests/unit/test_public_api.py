"""The public API: its names, and types that can be imported."""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import pathlib
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shardwise

PUBLIC = [
    "Callback",
    "CheckpointManager",
    "Cluster",
    "Compression",
    "Graph",
    "Mesh",
    "OuterOptimizer",
    "Plan",
    "Precision",
    "ShardwiseError",
    "Stage",
    "Sync",
    "Trainer",
    "__version__",
    "advise",
    "capture",
    "clip_grad_norm_",
    "collectives",
    "compile",
    "errors",
    "explain",
    "export",
    "from_jax",
    "from_onnx",
    "load_checkpoint",
    "optimizer",
    "parallelize",
    "plan",
    "register_rule",
    "replay",
    "report",
    "save_checkpoint",
    "schedules",
    "simulate",
    "strategies",
    "tune",
    "types",
    "verify",
]


STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "fsdp",
    "tensor",
    "context",
    "pipeline",
    "hybrid",
    "make_plan",
)
ELSEWHERE = (builtins, typing, collections.abc, pathlib, torch, torch.nn, torch.optim)


def _signatures() -> Iterator[tuple[str, Any]]:
    """Yield every public function, constructor, method and field annotation by name."""
    for name in PUBLIC:
        value = getattr(shardwise, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            yield from ((f"{name}.{m}", f) for m, f in _methods(value))
    yield from ((f"strategies.{n}", getattr(shardwise.strategies, n)) for n in STRATEGIES)
    yield from ((f"collectives.{n}", getattr(shardwise.collectives, n)) for n in ("choose", "tune"))


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            yield name, function


# Ids are plain names, because addresses differ between the processes of pytest-xdist.
@pytest.mark.parametrize(
    ("name", "function"), [pytest.param(*pair, id=pair[0]) for pair in _signatures()]
)
def test_types_of_public_signatures_can_be_imported(name: str, function: Any) -> None:
    signature = inspect.signature(function)
    annotations = [p.annotation for p in signature.parameters.values()]
    for annotation in (*annotations, signature.return_annotation):
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = annotation.__origin__
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        text = re.sub(r"'[^']*'|\"[^\"]*\"", "", text.replace("NoneType", "None"))
        text = re.sub(r"(?<=, )[A-Z]\w*\([^()]*\)(?=\])", "", text)  # metadata of Annotated
        for word in re.findall(r"(?<!\w)[A-Z]\w*", text):
            public = word in shardwise.__all__ or word in shardwise.types.__all__
            alias = getattr(function, "__globals__", {}).get(word)
            public |= typing.get_origin(alias) is typing.Annotated  # an alias of a plain type
            assert public or any(hasattr(module, word) for module in ELSEWHERE), (name, text)


def test_all_types_exist_and_are_sorted() -> None:
    assert shardwise.types.__all__ == sorted(shardwise.types.__all__)
    assert all(hasattr(shardwise.types, name) for name in shardwise.types.__all__)


def test_all_is_pinned_and_sorted() -> None:
    assert shardwise.__all__ == PUBLIC == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(shardwise))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_can_be_imported(name: str) -> None:
    assert getattr(shardwise, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'shardwise' has no attribute 'paralelize'"):
        _ = shardwise.paralelize  # type: ignore[attr-defined]


@pytest.mark.parametrize("statement", ["import shardwise", "import shardwise.cli"])
def test_importing_is_quick_because_torch_is_not_imported(statement: str) -> None:
    check = f"import sys; {statement}; assert not {{'torch', 'numpy', 'scipy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_package_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "shardwise", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == f"shardwise {shardwise.__version__}\n"
