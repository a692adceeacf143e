"""The known pipeline schedules.

Enters: numbers of stages, micro-batches and groups. Leaves: a `Schedule`; `check` proves each one.

All but `zero_bubble_v` are one pattern (`_alternate`): some forwards to warm up, then one forward
and one backward in turn, then the remaining backwards. They differ in how many warm up, in the
order of a group's stages, and in whether weight gradients come later. `zero_bubble_v` is planned
slot by slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from shardwise.errors import did_you_mean
from shardwise.schedules.action import Action, ScheduleError
from shardwise.schedules.schedule import Schedule, require_size, whole

NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zb_h1", "zb_v")


def make(
    name: str, *, num_groups: int, num_microbatches: int, num_stages: int | None = None
) -> Schedule:
    """The schedule of a name in `NAMES`.

    Without `num_stages` there is one stage per group, two for "interleaved" and "zb_v".
    "zero_bubble" is "zb_h1" for one stage per group and "zb_v" for two.
    """
    if name not in NAMES:
        raise ScheduleError(
            f"there is no schedule {name!r}{did_you_mean(name, NAMES)}",
            hint=f"one of {', '.join(NAMES)}, or a file: Schedule.load(path)",
        )
    whole("num_groups", num_groups)
    if num_stages is None:
        num_stages = 2 * num_groups if name in ("interleaved", "zb_v") else num_groups
    if name == "interleaved":
        return interleaved(num_stages, num_microbatches, num_groups)
    per_group = {"zb_v": (2,), "zero_bubble": (1, 2)}.get(name, (1,))
    if num_stages not in [count * num_groups for count in per_group]:
        wanted = " or ".join(str(count * num_groups) for count in per_group)
        raise ScheduleError(
            f"{name} on {num_groups} groups needs {wanted} stages, not {num_stages}",
            hint=f"make('interleaved', num_groups={num_groups}, num_stages={num_stages}, "
            f"num_microbatches={num_microbatches})"
            if num_groups <= num_stages
            else f"num_groups={num_stages}",
        )
    by_name: dict[str, Callable[[int, int], Schedule]] = {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb_h1": zero_bubble_h1,
        "zb_v": zero_bubble_v,
        "zero_bubble": zero_bubble_h1 if num_stages == num_groups else zero_bubble_v,
    }
    return by_name[name](num_stages, num_microbatches)


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of a schedule in their order, for evaluation."""
    forwards = (tuple(a for a in mine if a.kind == "F") for mine in schedule.actions)
    return replace(schedule, name=f"{schedule.name} forward", actions=tuple(forwards))


# ---------------------------------------------------------------- one stage per group


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe)."""
    return _one_stage_each(
        "gpipe", num_stages, num_microbatches, warm_up=lambda _: num_microbatches
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn (1F1B): group g holds at most stages - g micro-batches."""
    return _one_stage_each(
        "1f1b", num_stages, num_microbatches, warm_up=lambda g: num_stages - 1 - g
    )


def zero_bubble_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose group g computes weight gradients g micro-batches late (ZB-H1).

    At most `num_stages` micro-batches wait for their weight gradients, as many as 1F1B's group 0
    holds. With equal times for F, I and W a step takes 3 * num_microbatches + stages - 1 of them,
    1F1B's takes 3 * (num_microbatches + stages - 1).
    """
    return _one_stage_each(
        "zb_h1",
        num_stages,
        num_microbatches,
        warm_up=lambda g: num_stages - 1 - g,
        late=lambda g: g,
    )


def _one_stage_each(
    name: str,
    num_stages: int,
    num_microbatches: int,
    warm_up: Callable[[int], int],
    late: Callable[[int], int | None] = lambda _: None,
) -> Schedule:
    whole("num_stages", num_stages)
    whole("num_microbatches", num_microbatches)
    require_size(num_stages, num_microbatches)
    work = [[(stage, m) for m in range(num_microbatches)] for stage in range(num_stages)]
    return Schedule(
        name=name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(range(num_stages)),
        actions=tuple(_alternate(mine, mine, warm_up(g), late(g)) for g, mine in enumerate(work)),
    )


def _alternate(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    warm_up: int,
    late: int | None = None,
) -> tuple[Action, ...]:
    """`warm_up` forwards, then a forward and a backward in turn while there are forwards.

    With `late`, backwards are I, and each is followed by the W of the one `late` before it.
    """
    actions = [Action("F", *item) for item in forwards[:warm_up]]
    for at, item in enumerate(backwards):
        actions += [Action("F", *new) for new in forwards[warm_up + at : warm_up + at + 1]]
        actions.append(Action("B" if late is None else "I", *item))
        if late is not None and at >= late:
            actions.append(Action("W", *backwards[at - late]))
    if late is not None:
        actions += [Action("W", *item) for item in backwards[max(0, len(backwards) - late) :]]
    return tuple(actions)


# ---------------------------------------------------------------- several stages per group


def interleaved(num_stages: int, num_microbatches: int, num_groups: int) -> Schedule:
    """1F1B over several stages per group, stage s on group s % groups (Megatron's interleaving).

    Microbatches go in rounds of about as many as there are groups, each round through all of a
    group's stages. Stages that are no multiple of the groups are filled up to one, and the
    actions of the added last stages are left out: that only takes waits away.
    """
    whole("num_stages", num_stages)
    whole("num_microbatches", num_microbatches)
    require_size(num_stages, num_microbatches)
    whole("num_groups", num_groups)
    if num_stages < num_groups:
        raise ScheduleError(
            f"{num_stages} stages on {num_groups} groups: {num_groups - num_stages} groups have no "
            "stage",
            hint=f"num_groups={num_stages}, or num_stages={2 * num_groups}",
        )
    if num_stages == num_groups:
        return replace(one_f_one_b(num_stages, num_microbatches), name="interleaved")
    filled = -(-num_stages // num_groups) * num_groups
    rounds = _rounds(num_microbatches, num_groups)
    actions = []
    for group in range(num_groups):
        mine = range(group, filled, num_groups)
        forwards = [(stage, m) for turn in rounds for stage in mine for m in turn]
        backwards = [(stage, m) for turn in rounds for stage in reversed(mine) for m in turn]
        warm_up = (len(mine) - 1) * len(rounds[0]) + 2 * (num_groups - 1 - group)
        listed = _alternate(forwards, backwards, warm_up)
        actions.append(tuple(action for action in listed if action.stage < num_stages))
    return Schedule(
        name="interleaved",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(stage % num_groups for stage in range(num_stages)),
        actions=tuple(actions),
    )


def _rounds(num_microbatches: int, num_groups: int) -> list[range]:
    """The micro-batches in even rounds, the larger ones first, each of at least `num_groups`."""
    count = max(1, num_microbatches // num_groups)
    size, larger = divmod(num_microbatches, count)
    starts = [at * size + min(at, larger) for at in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


# ---------------------------------------------------------------- slot by slot


def zero_bubble_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Two stages per group, the first half placed forth and the second half back (ZB-V).

    No group holds more than `num_stages` forwards (of half a 1F1B stage each) that wait for their
    weight gradients: 1F1B's memory. With equal times for F, I and W, a group waits little more
    than for its first input.
    """
    whole("num_stages", num_stages)
    whole("num_microbatches", num_microbatches)
    require_size(num_stages, num_microbatches)
    if num_stages % 2:
        raise ScheduleError(
            f"zero_bubble_v has two stages per group, {num_stages} is odd",
            hint=f"num_stages={num_stages + 1}",
        )
    plans = [_slot_by_slot(num_stages, num_microbatches, reserve) for reserve in (0, 1)]
    _, actions = min((plan for plan in plans if plan), key=lambda plan: plan[0])
    return Schedule(
        name="zb_v",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages)),
        actions=actions,
    )


def _slot_by_slot(
    num_stages: int, num_microbatches: int, reserve: int
) -> tuple[int, tuple[tuple[Action, ...], ...]] | None:
    """Plan the V greedily, F, I and W taking one slot each: the number of slots and the lists.

    In each slot each group takes what is ready: I before F before W, then the oldest microbatch,
    then the later stage. A forward needs room among the `num_stages` held; one of the first half
    leaves `reserve` places free, so that with one place micro-batches under way always reach their
    backward. None where all wait for room.
    """
    lists: list[list[Action]] = [[] for _ in range(num_stages // 2)]
    held = [0] * len(lists)
    counts = {kind: [0] * num_stages for kind in "FIW"}
    slot, left = 0, 3 * num_stages * num_microbatches
    while left:
        before = {kind: tuple(mine) for kind, mine in counts.items()}
        for group, mine in enumerate(lists):
            ready = [
                ("IFW".index(kind), before[kind][stage], -stage, kind)
                for stage in (group, num_stages - 1 - group)
                for kind in "IFW"
                if before[kind][stage] < _available(kind, stage, before, num_microbatches)
                and (kind != "F" or held[group] < num_stages - (reserve if stage == group else 0))
            ]
            if ready:
                _, microbatch, minus_stage, kind = min(ready)
                mine.append(Action(kind, -minus_stage, microbatch))
                counts[kind][-minus_stage] += 1
                held[group] += (kind == "F") - (kind == "W")
                left -= 1
        if before == {kind: tuple(mine) for kind, mine in counts.items()}:
            return None
        slot += 1
    return slot, tuple(tuple(mine) for mine in lists)


def _available(
    kind: str, stage: int, counts: dict[str, tuple[int, ...]], num_microbatches: int
) -> int:
    """For how many micro-batches a stage could have run `kind` by now, by what others gave it."""
    if kind == "W":
        return counts["I"][stage]
    if kind == "F":
        return counts["F"][stage - 1] if stage else num_microbatches
    later = counts["I"][stage + 1] if stage + 1 < len(counts["I"]) else num_microbatches
    return min(counts["F"][stage], later)
