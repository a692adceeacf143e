"""Counts of outcomes by feature, kind of model and strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.differential.running import Outcome

VERDICTS = ("equal", "refused", "misplaced", "wrong", "crash", "hang")


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table of counts."""
    lines = ["| scripts with | " + " | ".join(VERDICTS) + " |", "|---|" + "---:|" * len(VERDICTS)]
    groups: list[tuple[str, list[Outcome]]] = [("all", list(outcomes))]
    for label, members in (
        ("strategy", lambda o: (o.script.strategy,)),
        ("model", lambda o: (o.script.kind,)),
        ("", lambda o: o.script.features),
    ):
        names = sorted({name for o in outcomes for name in members(o)})
        groups += [
            (f"{label} {n}".strip(), [o for o in outcomes if n in members(o)]) for n in names
        ]
    lines += [_row(name, members) for name, members in groups]
    return "\n".join(lines)


def _row(name: str, outcomes: Iterable[Outcome]) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    return f"| {name} | " + " | ".join(str(counts[v] or "") for v in VERDICTS) + " |"


def failures(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each script that neither agreed nor was refused in the right place."""
    failed = sorted((o for o in outcomes if not o.ok), key=lambda o: o.script.seed)
    return "\n".join(
        f"{o.verdict.upper():9} {o.script}\n          {o.detail[:400]}" for o in failed
    )


def document(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return everything as data for a JSON file."""
    return {
        "scripts": len(outcomes),
        "seconds": round(seconds, 1),
        "counts": dict(Counter(outcome.verdict for outcome in outcomes)),
        "outcomes": [
            {
                "seed": o.script.seed,
                "kind": o.script.kind,
                "strategy": o.script.strategy,
                "ranks": o.script.ranks,
                "features": list(o.script.features),
                "verdict": o.verdict,
                "detail": o.detail,
            }
            for o in sorted(outcomes, key=lambda o: o.script.seed)
        ],
    }
