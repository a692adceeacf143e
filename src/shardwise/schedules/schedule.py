"""A pipeline schedule: for each group of ranks, the list of actions that it runs in order.

`Action` is a stage's forward or backward of one micro-batch, `Links` says which action waits for
which, and `Schedule` holds the lists. Schedules come from `builders` or from files with one line
per group, in the text form of torch.distributed.pipelining. `check` proves that one is complete and
cannot block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import PlanError
from shardwise.files import read_text, write_text

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the inputs",
    "W": "backward for the weights",
}

_TEXT = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
MAX_ACTIONS = 1 << 18  # forwards in one schedule
_EXAMPLE = "one line per group, for example: 0F0, 0F1, 0B0, 0B1"


class ScheduleError(PlanError):
    """A schedule is malformed, incomplete, or would block."""


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a group: a stage's forward or backward of one micro-batch.

    `kind` is "F" (forward), "B" (full backward), "I" (backward for the inputs only) or "W" (the
    weight gradients that "I" deferred).

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
                f"micro-batch {self.microbatch}",
                hint="use one of the kinds F B I W and numbers from 0, as in Action('F', 0, 3)",
            )

    @staticmethod
    def parse(text: str, where: str | None = None) -> Action:
        """Return the action that `str` wrote, for example "0F3"."""
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text.strip()!r} is not an action",
                where=where,
                hint="stage, then one of F B I W, then micro-batch: 0F3",
            )
        stage, kind, microbatch = match.groups()
        return Action(kind, int(stage), int(microbatch))

    @property
    def result(self) -> Action:
        """The result that other actions wait for; "B" gives the same input gradients as "I"."""
        return Action("I", self.stage, self.microbatch) if self.kind == "B" else self

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


# ---------------------------------------------------------------- schedules
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The actions of every group of ranks, in order.

    `placement[stage]` is the group that runs a stage, `actions[group]` that group's list. All
    ranks of a group run the same list.
    """

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        require_counts(self.num_stages, self.num_microbatches)
        if len(self.placement) != self.num_stages:
            raise ScheduleError(
                f"the schedule {self.name!r} has {self.num_stages} stages, its placement has "
                f"{len(self.placement)}: {self.placement}"
            )
        if set(self.placement) != set(range(self.num_groups)):
            raise ScheduleError(
                f"the schedule {self.name!r} has {self.num_groups} groups, its placement names "
                f"the groups {sorted(set(self.placement))}",
                hint="each group from 0 on runs at least one stage",
            )

    @property
    def num_groups(self) -> int:
        return len(self.actions)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into two actions, I and W."""
        return any(action.kind in "IW" for actions in self.actions for action in actions)

    # ------------------------------------------------------------ files and text
    def to_text(self) -> str:
        """Return one line per group, in the form that torch.distributed.pipelining reads."""
        return "".join(", ".join(map(str, actions)) + "\n" for actions in self.actions)

    def save(self, path: str | Path) -> None:
        """Write `to_text` to a file."""
        write_text(path, self.to_text(), ScheduleError)

    @staticmethod
    def parse_text(text: str, *, name: str = "custom", where: str = "the text") -> Schedule:
        """Parse one line per group, skipping empty lines and `#` comments.

        Each stage is placed on the group in whose line it occurs.
        """
        rows: list[tuple[int, tuple[Action, ...]]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].replace(",", " ").split()
            place = f"{where}, line {number}"
            if words:
                rows.append((number, tuple(Action.parse(word, place) for word in words)))
        if not rows:
            raise ScheduleError("the schedule has no actions", where=where, hint=_EXAMPLE)
        placement = _placement(rows, where)
        return Schedule(
            name=name,
            num_stages=len(placement),
            num_microbatches=1 + max(a.microbatch for _, actions in rows for a in actions),
            placement=placement,
            actions=tuple(actions for _, actions in rows),
        )

    @staticmethod
    def load(path: str | Path) -> Schedule:
        """Read a schedule file; its name is the file's."""
        text = read_text(path, ScheduleError, what="schedule file", hint=_EXAMPLE)
        return Schedule.parse_text(text, name=Path(path).stem, where=str(path))

    def __str__(self) -> str:
        """Draw a table: one row per group, one column per slot when every action takes one slot."""
        head = (
            f"{self.name}: {self.num_stages} stages on {self.num_groups} groups, "
            f"{self.num_microbatches} micro-batches"
        )
        rows: list[dict[int, Action]]
        try:
            spans = run_in_order(self.actions, Links.of(self.num_stages))
            rows = [{int(span.start): span.action for span in group} for group in spans]
        except (ScheduleError, IndexError):  # it blocks, or names a stage that does not exist
            head += " (as listed: it blocks)"
            rows = [dict(enumerate(actions)) for actions in self.actions]
        slots = range(max((1 + max(row) for row in rows if row), default=0))
        width = max((len(str(action)) for row in rows for action in row.values()), default=1)
        label = len(str(self.num_groups - 1))
        lines = [
            f"group {group:>{label}} "
            + " ".join(f"{row.get(slot, '.')!s:<{width}}" for slot in slots).rstrip()
            for group, row in enumerate(rows)
        ]
        return "\n".join([head, *lines])


def require_counts(stages: int, num_microbatches: int) -> None:
    """Raise unless both are positive, and few enough to build a schedule in reasonable time."""
    require_positive("num_stages", stages)
    require_positive("num_microbatches", num_microbatches)
    if stages * num_microbatches > MAX_ACTIONS:
        raise ScheduleError(
            f"{num_microbatches:,} micro-batches of {stages:,} stages are "
            f"{stages * num_microbatches:,} forwards, more than {MAX_ACTIONS:,}",
            hint=f"up to {max(1, MAX_ACTIONS // stages):,} micro-batches for {stages:,} stages",
        )


def require_positive(name: str, value: object) -> None:
    """Raise unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{name} is {value!r}, must be an integer of at least 1")


def _placement(rows: Iterable[tuple[int, tuple[Action, ...]]], where: str) -> tuple[int, ...]:
    """Map each stage to the group in whose line its actions are."""
    owners: dict[int, tuple[int, int, Action]] = {}
    for group, (number, actions) in enumerate(rows):
        for action in actions:
            first = owners.setdefault(action.stage, (group, number, action))
            if first[0] != group:
                raise ScheduleError(
                    f"stage {action.stage} is in two lines: {first[2]} in line {first[1]}, "
                    f"{action} in line {number}",
                    where=where,
                    hint="put all actions of a stage on the line of one group",
                )
    for expected, stage in enumerate(sorted(owners)):
        if stage != expected:
            raise ScheduleError(
                f"stage {expected} has no actions, but stage {stage} does",
                where=where,
                hint="number the stages from 0 without gaps",
            )
    return tuple(owners[stage][0] for stage in range(len(owners)))


# ---------------------------------------------------------------- running the lists
@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The producers and consumers of each stage: whose output it reads, and who reads its own."""

    producers: tuple[tuple[int, ...], ...]
    consumers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(num_stages: int, edges: Iterable[tuple[int, int]] | None = None) -> Links:
        """Build links from (producer, consumer) pairs; by default each stage feeds the next."""
        pairs = [(s, s + 1) for s in range(num_stages - 1)] if edges is None else list(edges)
        for at, (producer, consumer) in enumerate(pairs):
            if not 0 <= producer < consumer < num_stages:
                raise ScheduleError(
                    f"the edge {producer} -> {consumer} does not lead to a later stage (there are "
                    f"{num_stages} stages)",
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
        """Return the results (see `Action.result`) that must exist before `action` starts."""
        stage, microbatch = action.stage, action.microbatch
        if action.kind == "F":
            return tuple(Action("F", p, microbatch) for p in self.producers[stage])
        if action.kind == "W":
            return (Action("I", stage, microbatch),)
        gradients = tuple(Action("I", c, microbatch) for c in self.consumers[stage])
        return (Action("F", stage, microbatch), *gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The start and end of an action, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


def run_in_order(
    lists: Sequence[Sequence[Action]],
    links: Links,
    duration: Callable[[Action], float] = lambda _: 1.0,
    transfer: float = 0.0,
) -> tuple[tuple[Span, ...], ...]:
    """Run every list in order with asynchronous sends; return one tuple of spans per group.

    An action starts when its group is free and its needs have ended; a need that another group
    computes arrives `transfer` seconds later.
    """
    spans: list[list[Span]] = [[] for _ in lists]
    done: dict[Action, tuple[int, float]] = {}
    progress = True
    while progress:
        progress = False
        for group, actions in enumerate(lists):
            ran = spans[group]
            while len(ran) < len(actions):
                action = actions[len(ran)]
                needs = links.needs(action)
                if not all(need in done for need in needs):
                    break
                start = ran[-1].end if ran else 0.0
                for need in needs:
                    producer, end = done[need]
                    start = max(start, end if producer == group else end + transfer)
                ran.append(Span(action=action, start=start, end=start + duration(action)))
                done[action.result] = (group, ran[-1].end)
                progress = True
    positions = [len(ran) for ran in spans]
    if any(at < len(actions) for at, actions in zip(positions, lists, strict=True)):
        raise _blocked(lists, links, positions, done.keys())
    return tuple(tuple(ran) for ran in spans)


def _blocked(
    lists: Sequence[Sequence[Action]],
    links: Links,
    positions: Sequence[int],
    done: Collection[Action],
) -> ScheduleError:
    """Return the error for blocked lists, with the position and the missing need of each group."""
    place = {action.result: (g, action) for g, actions in enumerate(lists) for action in actions}
    lines, waits = [], {}
    for group, (at, actions) in enumerate(zip(positions, lists, strict=True)):
        if at == len(actions):
            lines.append(f"group {group} is done")
            continue
        missing = [need for need in links.needs(actions[at]) if need not in done]
        names = [
            f"{place[need][1]} of group {place[need][0]}"
            if need in place
            else f"{_either(need)}, which is in no list"
            for need in missing
        ]
        lines.append(f"group {group} is at {actions[at]} and waits for {' and '.join(names)}")
        owners = [place[need][0] for need in missing if need in place]
        if len(owners) == len(missing):
            waits[group] = owners[0]
    total = sum(len(actions) for actions in lists)
    text = "\n".join(f"  {line}" for line in [*lines, *_cycle(waits)])
    return ScheduleError(f"the lists block after {sum(positions)} of {total} actions\n{text}")


def _either(need: Action) -> str:
    """Name the actions that would produce a result."""
    if need.kind == "I":
        return f"{Action('B', need.stage, need.microbatch)} or {need}"
    return str(need)


def _cycle(waits: dict[int, int]) -> list[str]:
    """Describe groups that wait for each other in a cycle, in one line or none."""
    for first in waits:
        path = [first]
        while path[-1] in waits and path.count(path[-1]) == 1:
            path.append(waits[path[-1]])
        if path.count(path[-1]) > 1:
            cycle = path[path.index(path[-1]) :]
            return ["cycle: " + " -> ".join(f"group {group}" for group in cycle)]
    return []
