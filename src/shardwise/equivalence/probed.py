"""A run of a program that records every value and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise import runtime as rt
from shardwise.equivalence.subject import Subject
from shardwise.equivalence.trial import Trial


@dataclass(frozen=True, slots=True)
class Probed:
    """What each rank recorded, and why it stopped early, if it did."""

    records: tuple[rt.Records, ...]
    raised: Exception | None


def run_probed(subject: Subject, trial: Trial, timeout_s: float) -> Probed:
    """Run the program of a subject with a probe after every statement."""
    records = tuple(rt.Records() for _ in range(subject.num_ranks))
    raised: Exception | None = None
    try:
        sources = subject.sources(probe=True)
        state = trial.reference.state
        subject.run(sources, state, trial.inputs, timeout_s=timeout_s, records=records)
    except Exception as error:
        raised = error
    return Probed(records, raised)
