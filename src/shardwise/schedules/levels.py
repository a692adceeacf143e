"""Hold a schedule as arrays that can be replayed quickly with many different durations.

The level of an action is one more than the highest level of its needs and of the preceding action
in its list. The actions of one level run side by side, so a replay takes one array operation per
level instead of one step per action. This module is apart from `replay` because importing NumPy
would slow down `shardwise --help`.
"""

from collections import OrderedDict
from functools import cached_property

import numpy as np

from shardwise.arrays import Bools, Floats, Ints
from shardwise.schedules.schedule import Action, Links, Schedule, run_in_order

KINDS = "FBIW"
CACHED = 256


class Levels:
    """A schedule as arrays over all actions, numbered group by group in list order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        actions = [action for row in schedule.actions for action in row]
        self.group = np.repeat(np.arange(schedule.num_groups), [len(r) for r in schedule.actions])
        self.kind = np.array([KINDS.index(a.kind) for a in actions])
        self.is_forward, self.is_weight = (self.kind == KINDS.index(kind) for kind in "FW")
        self.stage = np.array([a.stage for a in actions])
        self.microbatch = np.array([a.microbatch for a in actions])
        self.last = _last_backwards(actions)
        self.before = np.arange(-1, len(actions) - 1)
        self.before[np.searchsorted(self.group, np.arange(schedule.num_groups))] = -1
        self.needs = self._needs()
        self.rounds = self._rounds()

    def _needs(self) -> Ints:
        """Return the up to two actions that each one waits for, as `Links` does; -1 for none."""
        stages, count = self.schedule.num_stages, self.schedule.num_microbatches
        forward, backward = np.full((2, stages + 2, count), -1)  # a margin for both ends
        for table, kinds in ((forward, (0,)), (backward, (1, 2))):
            actions = np.flatnonzero(np.isin(self.kind, kinds))
            table[self.stage[actions] + 1, self.microbatch[actions]] = actions
        here, number = self.stage + 1, self.microbatch
        is_forward, is_weight = self.is_forward, self.is_weight
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
        """Return the start of every action if each took one unit of time."""
        unknown, nothing = -2, -1
        level = [unknown] * len(self.stage) + [nothing]  # index -1: nothing to wait for
        needs, before = self.needs.tolist(), self.before.tolist()
        starts = np.searchsorted(self.group, np.arange(self.schedule.num_groups + 1)).tolist()
        at, progress = starts[:-1], True
        while progress:
            progress = False
            for group, end in enumerate(starts[1:]):
                for action in range(at[group], end):
                    ready = [level[need] for need in needs[action]]
                    if unknown in ready:
                        break
                    level[action] = 1 + max(*ready, level[before[action]])
                    at[group], progress = action + 1, True
        if at != starts[1:] or self._lacks():
            # The lists block: the slow replay raises the error that explains why.
            run_in_order(self.schedule.actions, Links.of(self.schedule.num_stages))
        return np.array(level[:-1])

    def _lacks(self) -> bool:
        """Return whether an action needs a result that no list produces."""
        first = ~self.is_forward | (self.stage > 0)
        second = ~(self.is_forward | self.is_weight) & (self.stage < self.schedule.num_stages - 1)
        return bool(((self.needs < 0) & np.stack([first, second], axis=1)).any())

    def simulate(
        self,
        seconds: Floats,
        sends: Floats,
        begins: Floats | None = None,
        occupied: Floats | None = None,
    ) -> tuple[Floats, Floats]:
        """Return the start and end of every action.

        `seconds` has the duration of every action, `sends[stage]` that of a message from a stage to
        the next one in either direction, and `begins` the time at which each group is ready. A
        message from one group to another occupies the link for `occupied[stage]` seconds, and the
        next one between the same groups waits until then.
        """
        first = np.zeros(len(self.stage)) if begins is None else begins[self.group]
        before = np.concatenate([[0.0], np.cumsum(sends)])
        stage, needs = self.stage, self.needs
        delay = np.abs(before[stage[:, None]] - before[stage[needs]])
        across = self.group[:, None] != self.group[needs]
        delay = np.where(across, delay, 0.0)
        if occupied is not None:
            link_time = np.where(self.leaves, occupied[self.boundary], 0.0)
            # Messages queue only if one can occupy the link for longer than the next one computes.
            if link_time.max(initial=0.0) > seconds[self.leaves].min(initial=np.inf):
                _, end, sent = self._run(seconds, delay, first, (across, link_time))
                delay += np.where(across & (needs >= 0), (sent - end)[needs], 0.0)
        start, end, _ = self._run(seconds, delay, first)
        return start, end[:-1]

    def _run(
        self,
        seconds: Floats,
        delay: Floats,
        first: Floats,
        queued: tuple[Bools, Floats] | None = None,
    ) -> tuple[Floats, Floats, Floats]:
        """Return when actions start and end, and when their messages leave.

        `queued` has the needs that are messages and the time for which each action's message
        occupies a link; it waits for earlier ones between the same groups.
        """
        start, end = np.zeros(len(self.stage)), np.zeros(len(self.stage) + 1)  # -1: no need
        sent = end if queued is None else np.zeros_like(end)
        free = np.zeros(0 if queued is None else int(self.queue.max(initial=0)) + 1)
        for level in self.rounds:
            needs = self.needs[level]
            ready = end[needs] + delay[level]
            if queued is not None:
                ready = np.where(queued[0][level], sent[needs], end[needs]) + delay[level]
            ready[needs < 0] = 0.0
            start[level] = np.maximum(ready.max(axis=1), end[self.before[level]])
            start[level] = np.maximum(start[level], first[level])
            end[level] = start[level] + seconds[level]
            if queued is not None:
                queue, leaves = self.queue[level], self.leaves[level]
                sent[level] = np.maximum(end[level], free[queue])
                free[queue[leaves]] = (sent[level] + queued[1][level])[leaves]
        return start, end, sent

    @cached_property
    def boundary(self) -> Ints:
        """The stage before the boundary that an action's result crosses; arbitrary at the ends."""
        before = np.where(self.is_forward, self.stage, self.stage - 1)
        return np.asarray(np.clip(before, 0, self.schedule.num_stages - 1))

    @cached_property
    def leaves(self) -> Bools:
        """Whether an action's result is sent to another group."""
        target = self._target_stage()
        valid = (target >= 0) & (target < self.schedule.num_stages) & ~self.is_weight
        placement = np.asarray(self.schedule.placement)
        return np.asarray(valid & (placement[np.where(valid, target, 0)] != self.group))

    @cached_property
    def queue(self) -> Ints:
        """A number that identifies the pair of groups that send and receive a result."""
        placement = np.asarray(self.schedule.placement)
        target = placement[np.clip(self._target_stage(), 0, len(placement) - 1)]
        return np.asarray(self.group * self.schedule.num_groups + target)

    def _target_stage(self) -> Ints:
        """Return the stage that receives an action's result."""
        return self.stage + np.where(self.is_forward, 1, -1)


def _last_backwards(actions: list[Action]) -> Bools:
    """Return whether each action completes the gradients of its stage."""
    last = {action.stage: at for at, action in enumerate(actions) if action.kind in "BW"}
    is_last = np.zeros(len(actions), dtype=bool)
    is_last[list(last.values())] = True
    return is_last


_cache: OrderedDict[int, Levels] = OrderedDict()


def levels_of(schedule: Schedule) -> Levels:
    """Return the arrays of a schedule, cached by object."""
    # By identity, because comparing or hashing the lists takes longer than a replay. The cached
    # value keeps its schedule alive, so that an identity in the cache cannot be reused.
    levels = _cache.get(id(schedule))
    if levels is None:
        levels = _cache[id(schedule)] = Levels(schedule)
        while len(_cache) > CACHED:
            _cache.popitem(last=False)
    return levels
