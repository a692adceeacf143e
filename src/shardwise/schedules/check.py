"""Prove that a schedule is complete and cannot block, or report the wrong action and the reason.

The check proves, in this order: (1) every action belongs to one of the schedule's stages and
micro-batches and occurs once, in the list of its stage's group; (2) every stage has, for every
micro-batch, one F and either one B or one I and one W; (3) within a list no action precedes one
that it needs; (4) all groups finish if each runs its list in order and sends without waiting; (5)
they also finish on a backend without tags, whose sends wait for their receives, if they exchange
messages in the order of `messages`. It follows from (1) and (2) that each send has exactly one
receive, because both ends of an edge derive them from the same actions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from shardwise.schedules.messages import MessageOrder, Round, check_messages, order_messages
from shardwise.schedules.schedule import KINDS, Action, Links, Schedule, ScheduleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Properties of a schedule that passed the check.

    `alive[group]` is the maximum number of forwards (stage and micro-batch) whose B or I is
    pending, 0 for an evaluation; `alive_weights` counts until B or W. `stage_alive` and
    `stage_alive_weights` are the same per stage. `sends[group]` and `receives[group]` count the
    messages to and from other groups: one per edge and micro-batch in each direction.
    """

    alive: tuple[int, ...]
    alive_weights: tuple[int, ...]
    stage_alive: tuple[int, ...]
    stage_alive_weights: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def check(
    schedule: Schedule, edges: Iterable[tuple[int, int]] | None = None, *, backward: bool = True
) -> Facts:
    """Return the facts of a schedule, or raise an error with the action, the group and the reason.

    `edges` are (producer stage, consumer stage) pairs; by default each stage feeds the next. With
    `backward=False` the schedule must consist of all forwards and nothing else, as those of
    `forward_only` do.
    """
    links = Links.of(schedule.num_stages, edges)
    _check_known(schedule)
    _check_complete(schedule, backward)
    _check_lists(schedule, links)
    try:
        order = order_messages(schedule.actions, schedule.placement, links)
        check_messages(order, schedule.placement, links)
    except ScheduleError as error:
        raise _error(schedule, error.message) from None
    return _facts(schedule, order, backward)


def _error(schedule: Schedule, message: str) -> ScheduleError:
    return ScheduleError(message, where=f"schedule {schedule.name!r}")


def _check_known(schedule: Schedule) -> None:
    """Check that every action exists, is in its stage's group, and occurs once."""
    for group, actions in enumerate(schedule.actions):
        positions: dict[Action, int] = {}
        for at, action in enumerate(actions):
            here = f"group {group} has {action} at position {at}"
            if action.stage >= schedule.num_stages:
                raise _error(schedule, f"{here}, there are {schedule.num_stages} stages")
            if action.microbatch >= schedule.num_microbatches:
                count = schedule.num_microbatches
                raise _error(schedule, f"{here}, there are {count} micro-batches")
            if schedule.placement[action.stage] != group:
                owner = schedule.placement[action.stage]
                raise _error(schedule, f"{here}, stage {action.stage} is on group {owner}")
            if positions.setdefault(action, at) != at:
                raise _error(schedule, f"{here} and already at position {positions[action]}")


def _check_complete(schedule: Schedule, backward: bool) -> None:
    """Check that every stage and micro-batch has its forward, and a full or a split backward."""
    present = set(chain(*schedule.actions))
    stages = {action.stage for action in present}
    for stage, group in enumerate(schedule.placement):
        if stage not in stages:
            raise _error(schedule, f"group {group} has no action of its stage {stage}")
        for microbatch in range(schedule.num_microbatches):
            of = {kind: Action(kind, stage, microbatch) for kind in KINDS}
            kinds = "".join(kind for kind in KINDS if of[kind] in present)
            reason = _incomplete(kinds, of, backward)
            if reason:
                raise _error(schedule, f"group {group} has {reason}")


def _incomplete(kinds: str, of: dict[str, Action], backward: bool) -> str:
    """Describe a missing or superfluous action of a stage and micro-batch; "" if there is none."""
    if kinds in (("FB", "FIW") if backward else ("F",)):
        return ""
    if "F" not in kinds:
        return f"no {of['F']}, the forward of stage {of['F'].stage}"
    if not backward:
        return f"{of[kinds[1]]}, but only forwards are expected"
    reasons = {
        "": f"{of['F']} but no backward of it: {of['B']}, or {of['I']} and {of['W']}",
        "I": f"{of['I']} but no {of['W']}: the weight gradients are never computed",
        "W": f"{of['W']} but no {of['I']}: the weight gradients have no backward to finish",
        "BI": f"both {of['B']} and {of['I']}: the same backward twice",
        "BW": f"both {of['B']} and {of['W']}: the same weight gradients twice",
        "BIW": f"{of['B']} and also {of['I']} and {of['W']}: the same backward twice",
    }
    return reasons[kinds[1:]]


def _check_lists(schedule: Schedule, links: Links) -> None:
    """Check that within a list no action precedes one that it needs."""
    for group, actions in enumerate(schedule.actions):
        position = {action.result: at for at, action in enumerate(actions)}
        for at, action in enumerate(actions):
            for need in links.needs(action):
                if position.get(need, -1) > at:
                    later = position[need]
                    raise _error(
                        schedule,
                        f"group {group} has {action} at position {at}, before {actions[later]} at "
                        f"position {later} whose result it needs",
                    )


# ---------------------------------------------------------------- facts
def _facts(schedule: Schedule, order: MessageOrder, backward: bool) -> Facts:
    by_group = schedule.actions
    stages = range(schedule.num_stages)
    by_stage = [
        [a for a in by_group[schedule.placement[stage]] if a.stage == stage] for stage in stages
    ]
    rounds = [[item for item in items if isinstance(item, Round)] for items in order.lists]
    return Facts(
        alive=tuple(_peak(actions, "BI", backward) for actions in by_group),
        alive_weights=tuple(_peak(actions, "BW", backward) for actions in by_group),
        stage_alive=tuple(_peak(actions, "BI", backward) for actions in by_stage),
        stage_alive_weights=tuple(_peak(actions, "BW", backward) for actions in by_stage),
        sends=tuple(sum(len(r.sends) for r in own) for own in rounds),
        receives=tuple(sum(len(r.receives) for r in own) for own in rounds),
    )


def _peak(actions: Sequence[Action], ends: str, backward: bool) -> int:
    """Return the maximum number of forwards that wait for an action of the kinds `ends`."""
    alive = peak = 0
    for action in actions if backward else ():
        alive += (action.kind == "F") - (action.kind in ends)
        peak = max(peak, alive)
    return peak
