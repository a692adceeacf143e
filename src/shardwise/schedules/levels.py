"""Schedules as arrays, so that one NumPy operation replays a whole level of independent actions.

The planner replays thousands of schedules. This module is apart from `replay` because importing
NumPy would slow down `shardwise --help`.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardwise.arrays import Floats, Ints
from shardwise.schedules.schedule import Action, Links, Schedule, run_in_order

KINDS = "FBIW"
CACHED = 256


class Levels:
    """The actions of all groups, numbered group by group in list order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        actions = [action for mine in schedule.actions for action in mine]
        self.group = np.repeat(np.arange(schedule.num_groups), [len(m) for m in schedule.actions])
        self.kind = np.array([KINDS.index(a.kind) for a in actions])
        self.stage = np.array([a.stage for a in actions])
        self.microbatch = np.array([a.microbatch for a in actions])
        self.last = _last_backwards(actions)
        self.before = np.arange(-1, len(actions) - 1)
        self.before[np.searchsorted(self.group, np.arange(schedule.num_groups))] = -1
        self.needs = self._needs()
        self.rounds = self._rounds()

    def _needs(self) -> Ints:
        """Return the actions that each one waits for, -1 for none: as `Links` says, for all at
        once.
        """
        stages, count = self.schedule.num_stages, self.schedule.num_microbatches
        forward, backward = np.full((2, stages + 2, count), -1)  # stage + 1: there are edges
        for table, kinds in ((forward, (0,)), (backward, (1, 2))):
            mine = np.flatnonzero(np.isin(self.kind, kinds))
            table[self.stage[mine] + 1, self.microbatch[mine]] = mine
        here, number = self.stage + 1, self.microbatch
        is_forward, is_weight = (self.kind == KINDS.index(kind) for kind in "FW")
        first = np.where(is_forward, forward[here - 1, number], forward[here, number])
        first = np.where(is_weight, backward[here, number], first)
        second = np.where(is_forward | is_weight, -1, backward[here + 1, number])
        return np.stack([first, second], axis=1)

    def _rounds(self) -> list[Ints]:
        """Return the actions of every level."""
        level = self._level()
        order = np.argsort(level, kind="stable")
        ends = np.flatnonzero(np.diff(level[order])) + 1
        return list(np.split(order, ends))

    def _level(self) -> Ints:
        """When every action would start if each took one unit of time."""
        unknown, nothing = -2, -1
        level = [unknown] * len(self.stage) + [nothing]  # the last one: nothing to wait for
        needs, before = self.needs.tolist(), self.before.tolist()
        starts = np.searchsorted(self.group, np.arange(self.schedule.num_groups + 1)).tolist()
        at, moved = starts[:-1], True
        while moved:
            moved = False
            for group, end in enumerate(starts[1:]):
                for action in range(at[group], end):
                    ready = [level[need] for need in needs[action]]
                    if unknown in ready:
                        break
                    level[action] = 1 + max(*ready, level[before[action]])
                    at[group], moved = action + 1, True
        if at != starts[1:] or self._lacks():
            run_in_order(self.schedule.actions, Links.of(self.schedule.num_stages))  # says why
        return np.array(level[:-1])

    def _lacks(self) -> bool:
        """Return whether an action needs a result that no list has."""
        is_forward, is_weight = (self.kind == KINDS.index(kind) for kind in "FW")
        first = ~is_forward | (self.stage > 0)
        second = ~(is_forward | is_weight) & (self.stage < self.schedule.num_stages - 1)
        return bool(((self.needs < 0) & np.stack([first, second], axis=1)).any())

    def play(
        self,
        seconds: Floats,
        sends: Floats,
        begins: Floats | None = None,
        occupied: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Start and end of every action.

        `seconds` are those of every action; `sends[stage]` those of a message from a stage to the
        next one, in either direction; `begins` says when each group is ready. A message of a group
        to another one leaves when the one before has left, `occupied[stage]` seconds after it.
        """
        first = np.zeros(len(self.stage)) if begins is None else begins[self.group]
        before = np.concatenate([[0.0], np.cumsum(sends)])
        stage, needs = self.stage, self.needs
        here, there = stage[:, None], stage[needs]
        wire = np.abs(before[here] - before[there])
        wire = np.where(self.group[:, None] == self.group[needs], 0.0, wire)
        missing = needs < 0
        end = np.zeros(len(stage) + 1)  # the last one stands for nothing to wait for
        start = np.zeros(len(stage))
        if occupied is not None:
            held = np.where(self.leaves, occupied[self.boundary], 0.0)
            if held.max(initial=0.0) > seconds[self.leaves].min(initial=np.inf):
                wire += self._queued(seconds, wire, first, held)
        for mine in self.rounds:
            ready = end[needs[mine]] + wire[mine]
            ready[missing[mine]] = 0.0
            start[mine] = np.maximum(ready.max(axis=1), end[self.before[mine]])
            start[mine] = np.maximum(start[mine], first[mine])
            end[mine] = start[mine] + seconds[mine]
        return start, end[:-1]

    def _queued(self, seconds: Floats, wire: Floats, first: Floats, held: Floats) -> Floats:
        """How long every need's message waits for those before it, on their way to one group."""
        across = self.group[:, None] != self.group[self.needs]
        missing = self.needs < 0
        end, left = np.zeros((2, len(self.stage) + 1))
        free = np.zeros(int(self.queue.max(initial=0)) + 1)
        for mine in self.rounds:
            needs = self.needs[mine]
            ready = np.where(across[mine], left[needs], end[needs]) + wire[mine]
            ready[missing[mine]] = 0.0
            start = np.maximum(ready.max(axis=1), end[self.before[mine]])
            end[mine] = np.maximum(start, first[mine]) + seconds[mine]
            queue, sent = self.queue[mine], self.leaves[mine]
            left[mine] = np.maximum(end[mine], free[queue])
            free[queue[sent]] = (left[mine] + held[mine])[sent]
        return np.where(across & ~missing, (left - end)[self.needs], 0.0)

    @cached_property
    def boundary(self) -> Ints:
        """The stage before the boundary that an action's result crosses, at the edges any."""
        to = np.where(self.kind == KINDS.index("F"), self.stage, self.stage - 1)
        found: Ints = np.clip(to, 0, self.schedule.num_stages - 1)
        return found

    @cached_property
    def leaves(self) -> NDArray[np.bool_]:
        """Whether an action's result goes to another group."""
        there = self._there()
        inside = (there >= 0) & (there < self.schedule.num_stages) & (self.kind != KINDS.index("W"))
        placement = np.asarray(self.schedule.placement)
        found: NDArray[np.bool_] = inside & (placement[np.where(inside, there, 0)] != self.group)
        return found

    @cached_property
    def queue(self) -> Ints:
        """A number for every pair of groups, of the one that sends and the one that receives."""
        placement = np.asarray(self.schedule.placement)
        to = placement[np.clip(self._there(), 0, len(placement) - 1)]
        found: Ints = self.group * self.schedule.num_groups + to
        return found

    def _there(self) -> Ints:
        """Return the stage that an action's result is for."""
        return self.stage + np.where(self.kind == KINDS.index("F"), 1, -1)

    def waiting(self, group: int) -> tuple[Ints, Ints]:
        """For each action of a group, the micro-batches of each of its stages that wait then.

        Rows are the group's actions, columns its stages in ascending order; counted is what was
        there before the action.
        """
        mine = self.group == group
        stages = np.unique(self.stage[mine])
        change = np.zeros((int(mine.sum()), len(stages)), dtype=np.int64)
        column = np.searchsorted(stages, self.stage[mine])
        step = np.array([1, -1, 0, -1])[self.kind[mine]]
        change[np.arange(len(column)), column] = step
        return np.cumsum(change, axis=0) - change, stages


def _last_backwards(actions: list[Action]) -> NDArray[np.bool_]:
    """Return whether an action completes the gradients of its stage."""
    last: dict[int, int] = {}
    for at, action in enumerate(actions):
        if action.kind in "BW":
            last[action.stage] = at
    found = np.zeros(len(actions), dtype=bool)
    found[list(last.values())] = True
    return found


_known: OrderedDict[int, Levels] = OrderedDict()


def levels_of(schedule: Schedule) -> Levels:
    """Return the arrays of a schedule, once per object: comparing lists takes longer
    than a replay.
    """
    found = _known.get(id(schedule))
    if found is None or found.schedule is not schedule:
        found = _known[id(schedule)] = Levels(schedule)
        while len(_known) > CACHED:
            _known.popitem(last=False)
    return found
