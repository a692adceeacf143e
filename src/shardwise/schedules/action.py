"""One step of a pipeline: a stage's forward or backward of one microbatch.

The text form is the one of torch.distributed.pipelining's files: stage, kind, microbatch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import PlanError

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the inputs",
    "W": "backward for the weights",
}

_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class ScheduleError(PlanError):
    """A schedule is malformed, incomplete, or would block."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a group does at one point of its list.

    `kind` is "F" (forward), "B" (whole backward), "I" (backward for the inputs only) or "W" (the
    weight gradients that "I" left for later).

    >>> str(Action("F", 0, 3))
    '0F3'
    """

    kind: str
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.stage < 0 or self.microbatch < 0:
            raise ScheduleError(
                f"there is no action of kind {self.kind!r} for stage {self.stage} and "
                f"microbatch {self.microbatch}",
                hint="a kind of F B I W, and numbers from 0: Action('F', 0, 3)",
            )

    @staticmethod
    def parse(text: str, where: str | None = None) -> Action:
        """The action that `str` wrote, for example "0F3"."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text.strip()!r} is not an action",
                where=where,
                hint="stage, then one of F B I W, then microbatch: 0F3",
            )
        stage, kind, microbatch = match.groups()
        return Action(kind, int(stage), int(microbatch))

    @property
    def result(self) -> Action:
        """What others wait for: a whole backward gives the input gradients as "I" does."""
        return Action("I", self.stage, self.microbatch) if self.kind == "B" else self

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"
