"""Runs a script both ways and judges the outcome.

`train` is what every rank of a pool executes; `judge` compares what the ranks did with plain
PyTorch. Both exchange `Record`s: all that a run left behind, or how it failed.
"""

from __future__ import annotations

import importlib.util
import math
import re
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.differential.scripts import Script
from tests.support.pool import Pool, RankDied, RankTimeout, RemoteError

TOLERANCE = 1e-7  # relative to the largest element of each tensor, in float64
NEGLIGIBLE = 1e-4  # of the largest gradient: smaller gradients are measured against this
TIMEOUT_S = 180.0
PASSED = ("equal", "refused")


@dataclass(slots=True, kw_only=True)
class Failure:
    """An exception that ended a run."""

    kind: str  # the class of the exception
    text: str
    ours: bool  # a ShardwiseError
    lines: tuple[int, ...]  # lines of the script, in the traceback and in the text
    trace: str


@dataclass(slots=True, kw_only=True)
class Record:
    """What a run left behind; scripts call its methods."""

    losses: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    grads: dict[int, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    failure: Failure | None = None

    def loss(self, loss: Any) -> None:
        self.losses.append(float(loss))

    def value(self, name: str, value: Any) -> None:
        import torch

        self.values[name] = torch.as_tensor(value).double().flatten().tolist()

    def gradients(self, step: int, gradients: Mapping[str, Any]) -> None:
        self.grads[step] = {n: None if g is None else g.clone() for n, g in gradients.items()}

    def state(self, name: str, state: Mapping[str, Any]) -> None:
        self.states[name] = {n: t.detach().clone() for n, t in state.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a script ended: equal, refused, misplaced, wrong, crash or hang."""

    script: Script
    verdict: str
    detail: str
    trace: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict in PASSED


def run(script: Script, pool: Pool, folder: Path) -> Outcome:
    """Write the script to `folder`, run it in both ways and compare."""
    path = folder / f"script_{script.seed}.py"
    path.write_text(script.source)
    try:
        answers = pool.run(train, str(path), timeout=TIMEOUT_S)
    except RankTimeout as error:
        return Outcome(script=script, verdict="hang", detail=str(error)[:2000])
    except (RankDied, RemoteError) as error:
        return Outcome(script=script, verdict="crash", detail=f"{type(error).__name__}: {error}")
    outcome = judge(script, answers[0][0], [record for _, record in answers])
    if outcome.verdict != "equal":
        pool.close()  # a failed step may leave messages in the group's connections
    return outcome


def train(path: str) -> tuple[Record | None, Record]:
    """Run the script on this rank; rank 0 also runs it in plain PyTorch."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    plain = _recorded(path, "plain", rank) if rank == 0 else None
    return plain, _recorded(path, "parallel", rank)


def _recorded(path: str, side: str, rank: int) -> Record:
    record = Record()
    try:
        getattr(_load(path, side), side)(record, rank)
    except Exception as error:
        record.failure = _failure(error, path)
    return record


def _load(path: str, side: str) -> ModuleType:
    """Import the script afresh: the two runs share no globals."""
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_{side}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _failure(error: Exception, path: str) -> Failure:
    from shardwise.errors import ShardwiseError

    name = re.escape(Path(path).name)
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)]
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    lines = [line or 0 for line, file in zip(frames, files, strict=True) if file == path]
    lines += [int(line) for line in re.findall(rf"{name}:(\d+)", str(error))]
    return Failure(
        kind=type(error).__name__,
        text=str(error),
        ours=isinstance(error, ShardwiseError),
        lines=tuple(lines),
        trace="".join(traceback.format_exception(error)),
    )


def judge(script: Script, plain: Record | None, ranks: Sequence[Record]) -> Outcome:
    """Decide how the script ended."""
    assert plain is not None
    failures = [record.failure for record in ranks if record.failure is not None]
    if not failures:
        if plain.failure is not None:
            detail = f"plain PyTorch raises {plain.failure.kind}: {_first_line(plain.failure)}"
            return Outcome(script=script, verdict="wrong", detail=detail)
        difference = next(
            (d for rank, r in enumerate(ranks) if (d := _difference(r, plain, rank))), ""
        )
        verdict = "wrong" if difference else "equal"
        return Outcome(script=script, verdict=verdict, detail=difference)
    foreign = [failure for failure in failures if not failure.ours]
    own = [f for f in failures if f.ours and f.kind != "RankError"]
    first = (foreign or own or failures)[0]
    detail = f"{first.kind}: {' | '.join(first.text.splitlines())}"
    if foreign:
        verdict = "crash"
    elif len(failures) < len(ranks):
        verdict, detail = "crash", f"only {len(failures)} of {len(ranks)} ranks raised: {detail}"
    else:
        verdict = "refused" if _placed(script, first) else "misplaced"
    return Outcome(script=script, verdict=verdict, detail=detail, trace=first.trace)


def _placed(script: Script, failure: Failure) -> bool:
    """Return whether a refusal names a line, parameter or input of a feature of the script."""
    if script.lines() & set(failure.lines):
        return True
    return any(re.search(rf"(?<!\w){re.escape(p)}(?!\w)", failure.text) for p in script.places)


def _first_line(failure: Failure) -> str:
    return failure.text.partition("\n")[0]


def _difference(record: Record, expected: Record, rank: int) -> str:
    """Describe the first difference between a rank's run and plain PyTorch, if there is one."""
    pairs: list[tuple[str, Any, Any, float]] = [("losses", record.losses, expected.losses, 0.0)]
    for name, value in expected.values.items():
        pairs.append((name, record.values.get(name), value, 0.0))
    for step, gradients in expected.grads.items():
        floor = NEGLIGIBLE * max((_size(g) for g in gradients.values()), default=0.0)
        local = record.grads.get(step, {})
        if local.keys() != gradients.keys():
            return f"rank {rank}: gradients of {sorted(local.keys() ^ gradients.keys())}"
        for name, gradient in gradients.items():
            pairs.append((f"gradient of {name} at step {step}", local[name], gradient, floor))
    for label, state in expected.states.items():
        local = record.states.get(label, {})
        if local.keys() != state.keys():
            return f"rank {rank}: keys of the {label}: {sorted(local.keys() ^ state.keys())}"
        for name, tensor in state.items():
            pairs.append((f"{name} of the {label} at the end", local[name], tensor, 1e-3))
    for what, value, reference, floor in pairs:
        error = _error(value, reference, floor)
        if not error <= TOLERANCE:
            return f"rank {rank}: {what}: relative error {error:.1e}"
    return ""


def _size(value: Any) -> float:
    if value is None or not value.numel():
        return 0.0
    return float(value.abs().max())


def _error(value: Any, reference: Any, floor: float) -> float:
    """Return the largest difference relative to the largest expected element, or to `floor`.

    A missing gradient equals a zero gradient; the state shows if the optimizer treats them equally.
    """
    import torch

    if reference is None or value is None:
        present = value if value is not None else reference
        return 0.0 if present is None or _size(present) == 0.0 else math.inf
    a, b = torch.as_tensor(value), torch.as_tensor(reference)
    if a.shape != b.shape:
        return math.inf
    a, b = a.double().cpu(), b.double().cpu()
    if not a.numel() or torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
        return 0.0
    return float((a - b).abs().max()) / max(_size(b), floor, 1e-30)
