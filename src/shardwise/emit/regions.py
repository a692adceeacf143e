"""Recomputed parts of a function: steps that backward computes again.

Enters: a function's items. Leaves: the same with each run of steps of one group as a `Region`,
which is written as a function of its own and called through `torch.utils.checkpoint`. A block all
of whose steps are of one group needs no function: the block itself is called so.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shardwise.program import Step
from shardwise.program.recompute import keeps_products


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Neighbouring steps of one group, with what they take from outside and give to it."""

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def group(self) -> str | None:
        return self.steps[0].recompute


def recomputed(function: str, arguments: list[str], group: str | None) -> str:
    """Return a call whose backward computes it again.

    Random draws are keyed by node and step: they repeat without a saved state of a generator.
    """
    passed = ", ".join([function, *arguments])
    options = "use_reentrant=False, preserve_rng_state=False"
    if keeps_products(group):
        options += ", context_fn=rt.keep_products"
    return f"checkpoint({passed}, {options})"


def fold_regions(items: list[Any], returned: tuple[str, ...], own: Any) -> list[Any]:
    """Items with recomputed steps folded; `own` are values that the function finds in `self`."""
    folded: list[Any] = []
    runs = [(k, list(g)) for k, g in groupby(items, lambda item: getattr(item, "recompute", None))]
    after: list[set[str]] = [set(returned)]
    for _, run in reversed(runs):
        after.append(after[-1] | {name for item in run for name in _inputs(item)})
    after.reverse()
    for index, (group, run) in enumerate(runs):
        region = None if group is None else _region(run, after[index + 1], own)
        if region is None or not region.outputs or all(step.is_move for step in run):
            folded += run
        else:
            folded.append(region)
    return folded


def _inputs(item: Any) -> list[str]:
    calls = getattr(item, "calls", None) or (item,)
    return [name for call in calls for name in call.inputs]


def _region(steps: list[Step], used_after: set[str], own: Any) -> Region:
    made = {out for step in steps for out in step.outputs}
    inputs = dict.fromkeys(
        n for step in steps for n in step.inputs if n not in made and n not in own
    )
    outputs = [out for step in steps for out in step.outputs if out in used_after]
    return Region(steps=tuple(steps), inputs=tuple(inputs), outputs=tuple(outputs))
