"""Which action waits for which, and what happens when every group runs its list in order.

Enters: one list of actions per group, and which stage feeds which. Leaves: the start and end of
each action, or an error that says why the lists block each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shardwise.schedules.action import Action, ScheduleError

Lists = Sequence[Sequence[Action]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """For each stage: the stages whose output it reads, and the stages that read its output."""

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(num_stages: int, edges: Iterable[tuple[int, int]] | None = None) -> Links:
        """From (producer, consumer) pairs; without any given, each stage feeds the next one."""
        pairs = [(s, s + 1) for s in range(num_stages - 1)] if edges is None else list(edges)
        for at, (producer, consumer) in enumerate(pairs):
            if not 0 <= producer < consumer < num_stages:
                raise ScheduleError(
                    f"the edge {producer} -> {consumer} is not from an earlier to a later one of "
                    f"{num_stages} stages",
                    hint="edges=[(producer stage, consumer stage), ...]",
                )
            if (producer, consumer) in pairs[:at]:
                raise ScheduleError(f"the edge {producer} -> {consumer} is given twice")
        stages = range(num_stages)
        return Links(
            producers=tuple(tuple(sorted(p for p, c in pairs if c == s)) for s in stages),
            consumers=tuple(tuple(sorted(c for p, c in pairs if p == s)) for s in stages),
        )

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The results (see `Action.result`) that must be there before `action` starts."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return tuple(Action("F", p, microbatch) for p in self.producers[stage])
        if action.kind == "W":
            return (Action("I", stage, microbatch),)
        gradients = tuple(Action("I", c, microbatch) for c in self.consumers[stage])
        return (Action("F", stage, microbatch), *gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An action and when it ran, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


def run_in_order(
    lists: Lists,
    links: Links,
    duration: Callable[[Action], float] = lambda _: 1.0,
    transfer: float | Callable[[Action, Action], float] = 0.0,
) -> tuple[tuple[Span, ...], ...]:
    """Run every list in its order, sends being asynchronous: one tuple of spans per group.

    An action starts when its group is free and its needs have ended; a need that another group
    computed arrives `transfer` seconds later, which may depend on the need and on who waits.
    """
    wire = transfer if callable(transfer) else lambda need, action: transfer
    spans: list[list[Span]] = [[] for _ in lists]
    done: dict[Action, tuple[int, float]] = {}
    moved = True
    while moved:
        moved = False
        for group, actions in enumerate(lists):
            mine = spans[group]
            while len(mine) < len(actions):
                action = actions[len(mine)]
                needs = links.needs(action)
                if not all(need in done for need in needs):
                    break
                start = mine[-1].end if mine else 0.0
                for need in needs:
                    maker, end = done[need]
                    start = max(start, end if maker == group else end + wire(need, action))
                mine.append(Span(action=action, start=start, end=start + duration(action)))
                done[action.result] = (group, mine[-1].end)
                moved = True
    positions = [len(mine) for mine in spans]
    if any(at < len(actions) for at, actions in zip(positions, lists, strict=True)):
        raise _blocked(lists, links, positions, done.keys())
    return tuple(tuple(mine) for mine in spans)


def _blocked(
    lists: Lists, links: Links, positions: Sequence[int], done: Iterable[Action]
) -> ScheduleError:
    """The error for lists that cannot go on: where each group is and what it waits for."""
    finished = set(done)
    place = {action.result: (g, action) for g, mine in enumerate(lists) for action in mine}
    lines, waits = [], {}
    for group, (at, actions) in enumerate(zip(positions, lists, strict=True)):
        if at == len(actions):
            lines.append(f"group {group} is done")
            continue
        missing = [need for need in links.needs(actions[at]) if need not in finished]
        names = [
            f"{place[need][1]} of group {place[need][0]}"
            if need in place
            else f"{_either(need)}, which no list has"
            for need in missing
        ]
        lines.append(f"group {group} is at {actions[at]} and waits for {' and '.join(names)}")
        known = [place[need][0] for need in missing if need in place]
        if len(known) == len(missing):
            waits[group] = known[0]
    total = sum(len(actions) for actions in lists)
    text = "\n".join(f"  {line}" for line in [*lines, *_cycle(waits)])
    return ScheduleError(f"the lists block after {sum(positions)} of {total} actions\n{text}")


def _either(need: Action) -> str:
    """The names of the actions that would give a result."""
    if need.kind == "I":
        return f"{Action('B', need.stage, need.microbatch)} or {need}"
    return str(need)


def _cycle(waits: dict[int, int]) -> list[str]:
    """The groups that wait for each other in a cycle, as a line; none where there is none."""
    for first in waits:
        path = [first]
        while path[-1] in waits and path.count(path[-1]) == 1:
            path.append(waits[path[-1]])
        if path.count(path[-1]) > 1:
            cycle = path[path.index(path[-1]) :]
            return ["cycle: " + " -> ".join(f"group {group}" for group in cycle)]
    return []
