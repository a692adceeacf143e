"""A pipeline schedule: for each group of ranks the list of actions it runs, in order.

Enters: what `generate` makes, or a file with one line per group. Leaves: `Schedule`. Whether it
is complete and cannot block is for `check` to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardwise.files import read_text, write_text
from shardwise.schedules.action import Action, ScheduleError
from shardwise.schedules.order import Links, run_in_order

MAX_ACTIONS = 1 << 18  # forwards in one schedule
_EXAMPLE = "one line per group, for example: 0F0, 0F1, 0B0, 0B1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Who runs what, in which order.

    `placement[stage]` is the group that runs a stage, `actions[group]` that group's list. All
    ranks of a group run the same list.
    """

    name: str
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        whole("num_stages", self.num_stages)
        whole("num_microbatches", self.num_microbatches)
        require_size(self.num_stages, self.num_microbatches)
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
        """Whether some backward is done in two parts, I and W."""
        return any(action.kind in "IW" for mine in self.actions for action in mine)

    def stages_of(self, group: int) -> tuple[int, ...]:
        """The stages that a group runs."""
        return tuple(s for s, where in enumerate(self.placement) if where == group)

    # ------------------------------------------------------------ files and text

    def to_text(self) -> str:
        """One line per group; torch.distributed.pipelining reads the same form."""
        return "".join(", ".join(str(action) for action in mine) + "\n" for mine in self.actions)

    def save(self, path: str | Path) -> None:
        """Write `to_text` to a file."""
        write_text(path, self.to_text(), ScheduleError)

    @staticmethod
    def parse_text(text: str, *, name: str = "custom", where: str = "the text") -> Schedule:
        """The schedule in a text: one line per group, without empty lines and `#` comments.

        A stage is placed on the group whose line it is in; the counts are the largest seen.
        """
        rows: list[tuple[int, tuple[Action, ...]]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].replace(",", " ").split()
            place = f"{where}, line {number}"
            if words:
                rows.append((number, tuple(Action.parse(word, place) for word in words)))
        if not rows:
            raise ScheduleError("there is no action", where=where, hint=_EXAMPLE)
        placement = _placement(rows, where)
        return Schedule(
            name=name,
            num_stages=len(placement),
            num_microbatches=1 + max(a.microbatch for _, mine in rows for a in mine),
            placement=placement,
            actions=tuple(mine for _, mine in rows),
        )

    @staticmethod
    def load(path: str | Path) -> Schedule:
        """Read a schedule file; its name is the file's."""
        text = read_text(path, ScheduleError, what="schedule file", hint=_EXAMPLE)
        return Schedule.parse_text(text, name=Path(path).stem, where=str(path))

    def __str__(self) -> str:
        """A table: one row per group, one column per slot when every action takes one slot."""
        head = (
            f"{self.name}: {self.num_stages} stages on {self.num_groups} groups, "
            f"{self.num_microbatches} micro-batches"
        )
        rows: list[dict[int, Action]]
        try:
            spans = run_in_order(self.actions, Links.of(self.num_stages))
            rows = [{int(span.start): span.action for span in mine} for mine in spans]
        except (ScheduleError, IndexError):  # blocked, or a stage that it does not have
            head += " (as listed: it does not run through)"
            rows = [dict(enumerate(mine)) for mine in self.actions]
        slots = range(max((1 + max(row) for row in rows if row), default=0))
        width = max((len(str(action)) for row in rows for action in row.values()), default=1)
        label = len(str(self.num_groups - 1))
        lines = [
            f"group {group:>{label}} "
            + " ".join(f"{row.get(slot, '.')!s:<{width}}" for slot in slots).rstrip()
            for group, row in enumerate(rows)
        ]
        return "\n".join([head, *lines])


def require_size(stages: int, num_microbatches: int) -> None:
    """Refuse schedules so long that listing them takes minutes and gigabytes."""
    if stages * num_microbatches > MAX_ACTIONS:
        raise ScheduleError(
            f"{num_microbatches:,} micro-batches of {stages:,} stages are "
            f"{stages * num_microbatches:,} forwards, more than {MAX_ACTIONS:,}",
            hint=f"up to {max(1, MAX_ACTIONS // stages):,} micro-batches for {stages:,} stages",
        )


def whole(name: str, value: object) -> None:
    """Raise unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{name} is {value!r}, needs a whole number of at least 1")


def _placement(rows: Iterable[tuple[int, tuple[Action, ...]]], where: str) -> tuple[int, ...]:
    """Stage -> group, from the line that each stage's actions are in."""
    seen: dict[int, tuple[int, int, Action]] = {}
    for group, (number, mine) in enumerate(rows):
        for action in mine:
            first = seen.setdefault(action.stage, (group, number, action))
            if first[0] != group:
                raise ScheduleError(
                    f"stage {action.stage} is in two lines: {first[2]} in line {first[1]}, "
                    f"{action} in line {number}",
                    where=where,
                    hint="all actions of a stage in the line of one group",
                )
    for expected, stage in enumerate(sorted(seen)):
        if stage != expected:
            raise ScheduleError(
                f"stage {expected} has no action, stage {stage} has",
                where=where,
                hint="number the stages from 0 without gaps",
            )
    return tuple(seen[stage][0] for stage in range(len(seen)))
