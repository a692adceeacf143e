"""Proves that a schedule is complete and runs through, or says which action is wrong and why.

Enters: a schedule and which stage feeds which. Leaves: `Facts`, or a `ScheduleError`.

Shown, in this order: (1) every action is one of the schedule's stages and micro-batches, in the
list of its stage's group, once; (2) every stage has, for every microbatch, one F and either one B
or one I and one W; (3) inside a list nothing comes before what it needs; (4) the groups, each
running its list in order and sending without waiting, all come to the end. From (1) and (2)
follows that each send has exactly one receive: both are made by the two ends of one edge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from shardwise.schedules.schedule import KINDS, Action, Links, Schedule, ScheduleError, run_in_order

Message = tuple[Action, int]  # a result, and the stage that it is for


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What holds for a schedule that passed the check.

    `alive[group]` is the largest number of forwards (stage and microbatch) whose B or I is still
    to come, 0 for an evaluation; `alive_weights` counts until B or W. `stage_alive` and
    `stage_alive_weights` are the same per stage. `sends[group]` and `receives[group]` count the
    messages to and from other groups: one per edge and microbatch in each direction.
    """

    alive: tuple[int, ...]
    alive_weights: tuple[int, ...]
    stage_alive: tuple[int, ...]
    stage_alive_weights: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def check(
    schedule: Schedule,
    edges: Iterable[tuple[int, int]] | None = None,
    *,
    backward: bool = True,
) -> Facts:
    """Return the facts of a schedule, or an error that names the action, the group and the reason.

    `edges` are (producer stage, consumer stage) pairs, by default the chain. `backward=False` is
    for what `forward_only` gives: every forward and nothing else.
    """
    links = Links.of(schedule.num_stages, edges)
    _check_known(schedule)
    _check_complete(schedule, backward)
    _check_lists(schedule, links)
    try:
        run_in_order(schedule.actions, links)
    except ScheduleError as error:
        raise _error(schedule, error.message) from None
    return _facts(schedule, links, backward)


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, where=f"schedule {schedule.name!r}")


def _check_known(schedule: Schedule) -> None:
    """Every action exists, is in its stage's group, and is there once."""
    for group, mine in enumerate(schedule.actions):
        seen: dict[Action, int] = {}
        for at, action in enumerate(mine):
            here = f"group {group} has {action} at position {at}"
            if action.stage >= schedule.num_stages:
                raise _error(schedule, f"{here}, there are {schedule.num_stages} stages")
            if action.microbatch >= schedule.num_microbatches:
                count = schedule.num_microbatches
                raise _error(schedule, f"{here}, there are {count} micro-batches")
            if schedule.placement[action.stage] != group:
                right = schedule.placement[action.stage]
                raise _error(schedule, f"{here}, stage {action.stage} is on group {right}")
            if seen.setdefault(action, at) != at:
                raise _error(schedule, f"{here} and already at position {seen[action]}")


def _check_complete(schedule: Schedule, backward: bool) -> None:
    """Every stage and microbatch has its forward, and its backward whole or in two parts."""
    present = {action for mine in schedule.actions for action in mine}
    stages = {action.stage for action in present}
    for stage, group in enumerate(schedule.placement):
        if stage not in stages:
            raise _error(schedule, f"group {group} has no action of its stage {stage}")
        for microbatch in range(schedule.num_microbatches):
            of = {kind: Action(kind, stage, microbatch) for kind in KINDS}
            kinds = "".join(kind for kind in KINDS if of[kind] in present)
            reason = _incomplete(kinds, of) if backward else _not_forward_only(kinds, of)
            if reason:
                raise _error(schedule, f"group {group} has {reason}")


def _incomplete(kinds: str, of: dict[str, Action]) -> str:
    """What is wrong with the kinds that a stage and microbatch has; empty where nothing is."""
    if kinds in ("FB", "FIW"):
        return ""
    if "F" not in kinds:
        return f"no {of['F']}, the forward of stage {of['F'].stage}"
    reasons = {
        "": f"{of['F']} but no backward of it: {of['B']}, or {of['I']} and {of['W']}",
        "I": f"{of['I']} but no {of['W']}: the weight gradients are never computed",
        "W": f"{of['W']} but no {of['I']}: the weight gradients have no backward to finish",
        "BI": f"both {of['B']} and {of['I']}: the same backward twice",
        "BW": f"both {of['B']} and {of['W']}: the same weight gradients twice",
        "BIW": f"{of['B']} and also {of['I']} and {of['W']}: the same backward twice",
    }
    return reasons[kinds[1:]]


def _not_forward_only(kinds: str, of: dict[str, Action]) -> str:
    if "F" not in kinds:
        return f"no {of['F']}, the forward of stage {of['F'].stage}"
    return f"{of[kinds[1]]}, but only forwards are expected" if kinds != "F" else ""


def _check_lists(schedule: Schedule, links: Links) -> None:
    """Inside one list, nothing comes before what it needs."""
    for group, mine in enumerate(schedule.actions):
        position = {action.result: at for at, action in enumerate(mine)}
        for at, action in enumerate(mine):
            for need in links.needs(action):
                if position.get(need, -1) > at:
                    later = position[need]
                    raise _error(
                        schedule,
                        f"group {group} has {action} at position {at}, before {mine[later]} at "
                        f"position {later} whose result it needs",
                    )


# ---------------------------------------------------------------- facts


def _facts(schedule: Schedule, links: Links, backward: bool) -> Facts:
    by_group = schedule.actions
    stages = range(schedule.num_stages)
    by_stage = [
        [a for a in by_group[schedule.placement[stage]] if a.stage == stage] for stage in stages
    ]
    sent, received = _messages(schedule, links)
    assert Counter(chain(*sent)) == Counter(chain(*received)), "each send has one receive"
    return Facts(
        alive=tuple(_peak(mine, "BI", backward) for mine in by_group),
        alive_weights=tuple(_peak(mine, "BW", backward) for mine in by_group),
        stage_alive=tuple(_peak(mine, "BI", backward) for mine in by_stage),
        stage_alive_weights=tuple(_peak(mine, "BW", backward) for mine in by_stage),
        sends=tuple(len(mine) for mine in sent),
        receives=tuple(len(mine) for mine in received),
    )


def _peak(actions: Sequence[Action], ends: str, backward: bool) -> int:
    """Return the most forwards at once for which none of the kinds `ends` was run yet."""
    alive = most = 0
    for action in actions if backward else ():
        alive += (action.kind == "F") - (action.kind in ends)
        most = max(most, alive)
    return most


def _messages(schedule: Schedule, links: Links) -> tuple[list[list[Message]], list[list[Message]]]:
    """Per group what it sends and what it receives."""
    place = schedule.placement
    sent: list[list[Message]] = [[] for _ in schedule.actions]
    received: list[list[Message]] = [[] for _ in schedule.actions]
    for group, mine in enumerate(schedule.actions):
        for action in mine:
            if action.kind == "W":
                continue
            readers = links.consumers if action.kind == "F" else links.producers
            for stage in readers[action.stage]:
                if place[stage] != group:
                    sent[group].append((action.result, stage))
            for need in links.needs(action):
                if place[need.stage] != group:
                    received[group].append((need, action.stage))
    return sent, received
