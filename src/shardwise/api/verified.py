"""Verify a plan before training with it, once for each program.

The result is kept in a file, under a fingerprint of the captured graph, the emitted code, the plan
and the versions of torch and Shardwise: a training that is resumed, or started again with the same
program, does not check it again.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.api.compile import capture_for_plan, compile
from shardwise.api.verify import verify
from shardwise.errors import ShardwiseError, VerifyError
from shardwise.files import read_json, write_text
from shardwise.frontend.objective import LossFn, Model
from shardwise.plans import Plan
from shardwise.runtime.rendezvous import starting
from shardwise.version import __version__

FILE = "verified.json"
LONGEST_S = 3600.0  # that other ranks wait for the check


def verify_first(
    model: Model,
    batch: Any,
    plan: Plan,
    loss_fn: LossFn | None = None,
    *,
    folder: Path | None = None,
) -> None:
    """Raise a `VerifyError` unless the plan's program equals the model.

    Rank 0 checks, the others wait for it; all raise if it fails. With a `folder`, a program that
    passed before is known from the file there.
    """
    with starting(LONGEST_S) as agree:
        if not dist.is_initialized() or dist.get_rank() == 0:
            _verify_once(model, batch, plan, loss_fn, folder)
        agree("verified")


def _verify_once(
    model: Model, batch: Any, plan: Plan, loss_fn: LossFn | None, folder: Path | None
) -> None:
    file = None if folder is None else folder / FILE
    key = fingerprint(model, batch, plan, loss_fn)
    passed = _passed(file)
    if key in passed:
        return
    certificate = verify(model, batch, plan, loss_fn)
    if not certificate.ok:
        raise VerifyError(
            str(certificate),
            hint="another plan, or an issue with this text; verify: false trains unchecked",
        )
    if file is not None:
        passed[key] = {"at": time.strftime("%Y-%m-%dT%H:%M:%S"), "certificate": str(certificate)}
        write_text(file, json.dumps(passed, indent=2) + "\n", VerifyError)


def fingerprint(model: Model, batch: Any, plan: Plan, loss_fn: LossFn | None = None) -> str:
    """Return a text that differs where a check could end otherwise."""
    graph = capture_for_plan(model, batch, plan, loss_fn)
    program = compile(graph, plan).fingerprint
    parts = (__version__, torch.__version__, graph.fingerprint, program)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:24]


def _passed(file: Path | None) -> dict[str, Any]:
    if file is None or not file.exists():
        return {}
    try:
        found = read_json(file, VerifyError)
    except ShardwiseError:
        return {}  # damaged: check again and write it anew
    return dict(found) if isinstance(found, dict) else {}
