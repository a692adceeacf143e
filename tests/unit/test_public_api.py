from __future__ import annotations

import subprocess
import sys

import pytest

import shardwise

PUBLIC = [
    "Advice",
    "Callback",
    "Certificate",
    "Checkpoints",
    "Cluster",
    "Estimate",
    "Graph",
    "Mesh",
    "Plan",
    "Precision",
    "Program",
    "Report",
    "Stage",
    "Timeline",
    "Trainer",
    "__version__",
    "advise",
    "capture",
    "capture_for_plan",
    "choose_collectives",
    "clip_grad_norm_",
    "compile",
    "errors",
    "explain",
    "export",
    "load_checkpoint",
    "optimizer",
    "parallelize",
    "plan",
    "predict_memory",
    "register_rule",
    "report",
    "save_checkpoint",
    "schedules",
    "simulate",
    "strategies",
    "tune",
    "tune_collectives",
    "verify",
]


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
