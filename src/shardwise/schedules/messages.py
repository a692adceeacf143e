"""The order of all messages of a step, for backends without tags, such as NCCL.

Such a backend runs the operations of a rank in the order in which they are started, and an
operation ends when its other ends have been started too: nothing is buffered, and the k-th send to
a rank meets that rank's k-th receive. A schedule says when a group sends. It does not say when the
other group starts the receive, and a receive that is started too early or too late blocks the
messages behind it.

`MessageOrder` therefore lists, between the actions of every group, its rounds: sends and receives
that are started as one operation. `order_messages` derives it. It runs the schedule on a clock and
gives each message the time at which its result is computed. All groups exchange the messages of one
time together, in the order of time. A round thus waits only for actions and rounds of earlier
times, and no cycle of waits is possible. This holds even if one rank's collectives and messages of
all communicators run one after the other, and if starting an operation blocks until the other ranks
start it, as NCCL does when two ranks connect.

`check_messages` proves the same for any order, by running it under these rules.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from shardwise.schedules.schedule import Action, Links, ScheduleError, run_in_order

# Relative times of actions: a backward takes twice as long as a forward. Other ratios change which
# messages are exchanged together, not whether the order is correct.
_DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
_ITEM = re.compile(r"\[[^\]]*\]|[^\s\[\]]+")


@dataclass(frozen=True, slots=True)
class Message:
    """A result that a stage sends to another one: an output, or the gradient of an input.

    >>> str(Message(Action("F", 0, 3), 1))
    '0F3:1'
    """

    result: Action  # see `Action.result`
    target: int  # stage

    @staticmethod
    def parse(text: str) -> Message:
        """Return the message that `str` wrote."""
        result, _, target = text.partition(":")
        if not target.isdecimal():
            raise ScheduleError(f"{text!r} is not a message", hint="0F3:1, a result and a stage")
        return Message(Action.parse(result), int(target))

    def __str__(self) -> str:
        return f"{self.result}:{self.target}"


@dataclass(frozen=True, slots=True)
class Round:
    """The sends and receives that a group starts as one operation.

    >>> print(Round((Message(Action("F", 0, 1), 1),), (Message(Action("I", 1, 0), 0),)))
    [>0F1:1 <1I0:0]
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]

    def __str__(self) -> str:
        return f"[{' '.join([f'>{m}' for m in self.sends] + [f'<{m}' for m in self.receives])}]"


@dataclass(frozen=True, slots=True)
class MessageOrder:
    """The actions and rounds of every group, in order; all ranks of a group run the same."""

    lists: tuple[tuple[Action | Round, ...], ...]

    def to_text(self) -> str:
        """Return one line per group, such as `0F0 [>0F0:1] 0F1 [>0F1:1 <1I0:0] 0B0 0B1`."""
        return "".join(" ".join(map(str, items)) + "\n" for items in self.lists)

    @staticmethod
    def parse_text(text: str) -> MessageOrder:
        """Return the order that `to_text` wrote."""
        return MessageOrder(
            tuple(tuple(map(_parse_item, _ITEM.findall(line))) for line in text.splitlines())
        )


def _parse_item(text: str) -> Action | Round:
    if not text.startswith("["):
        return Action.parse(text)
    parts: dict[str, list[Message]] = {">": [], "<": []}
    for word in text[1:-1].split():
        if word[0] not in parts:
            raise ScheduleError(f"{word!r} is not a send or receive", hint=">0F1:1 or <1I0:0")
        parts[word[0]].append(Message.parse(word[1:]))
    return Round(tuple(parts[">"]), tuple(parts["<"]))


_Ends = tuple[list[Message], list[Message]]  # sent and received


def _ends() -> _Ends:
    return [], []


def order_messages(
    actions: Sequence[Sequence[Action]],
    placement: Sequence[int],
    links: Links,
    within: Iterable[tuple[int, int]] = (),
) -> MessageOrder:
    """Return the order of all messages between the stages of a checked schedule.

    `placement[stage]` is the group of a stage. Stages of one group need no messages, except those
    of the edges `within`, whose ranks hold different parts of a value on either side.
    """
    within = {pair for edge in within for pair in (edge, edge[::-1])}
    spans = run_in_order(actions, links, lambda action: _DURATIONS[action.kind])
    rounds = [defaultdict[float, _Ends](_ends) for _ in actions]  # by time
    for group, ran in enumerate(spans):
        for span in ran:
            for stage in _readers(span.action, links):
                target = placement[stage]
                if target == group and (span.action.stage, stage) not in within:
                    continue
                message = Message(span.action.result, stage)
                rounds[group][span.end][0].append(message)
                rounds[target][span.end][1].append(message)
    lists = []
    for group, ran in enumerate(spans):
        keyed: list[tuple[float, int, Action | Round]] = [(s.end, 0, s.action) for s in ran]
        keyed += [(end, 1, Round(*map(tuple, ends))) for end, ends in rounds[group].items()]
        keyed.sort(key=lambda item: item[:2])
        lists.append(tuple(item for _, _, item in keyed))
    return MessageOrder(tuple(lists))


def _readers(action: Action, links: Links) -> tuple[int, ...]:
    """Return the stages that read the result of an action."""
    if action.kind == "W":
        return ()
    return (links.consumers if action.kind == "F" else links.producers)[action.stage]


# ---------------------------------------------------------------- proof
def check_messages(order: MessageOrder, placement: Sequence[int], links: Links) -> None:
    """Prove that every group finishes its list under the rules of a backend without tags.

    Otherwise the error has the position of every group, and the messages that it waits for.
    """
    _check_pairs(order, placement)
    run = _Run(order, placement, links)
    progress = True
    while progress:
        progress = False
        for group in range(len(order.lists)):
            while run.advance(group):
                progress = True
    if any(at < len(items) for at, items in zip(run.positions, order.lists, strict=True)):
        raise run.blocked()


def _check_pairs(order: MessageOrder, placement: Sequence[int]) -> None:
    """Check that the k-th send from one group to another is the message of the k-th receive."""
    messages = defaultdict[tuple[int, int], _Ends](_ends)  # by sending and receiving group
    for group, items in enumerate(order.lists):
        for item in items:
            if isinstance(item, Round):
                for message in item.sends:
                    messages[group, placement[message.target]][0].append(message)
                for message in item.receives:
                    messages[placement[message.result.stage], group][1].append(message)
    for (source, target), (sent, received) in sorted(messages.items(), key=lambda item: item[0]):
        for at, (message, other) in enumerate(zip_longest(sent, received)):
            if message != other:
                raise ScheduleError(
                    f"message {at} from group {source} to group {target} is "
                    f"{message or 'not sent'} for its sender, {other or 'not received'} for its "
                    "receiver",
                    hint="without tags, both groups list their messages in the same order",
                )


class _Run:
    """The progress of every group under the rules."""

    def __init__(self, order: MessageOrder, placement: Sequence[int], links: Links) -> None:
        self.order, self.placement, self.links = order, placement, links
        self.positions = [0] * len(order.lists)
        self.results: list[set[Action]] = [set() for _ in order.lists]
        # The parts of each group's current round that have not met their other ends.
        self.waiting: list[set[tuple[str, Message]] | None] = [None] * len(order.lists)

    def advance(self, group: int) -> bool:
        """Run the next item of a group; return whether it has ended."""
        if self.positions[group] == len(self.order.lists[group]):
            return False
        item = self.order.lists[group][self.positions[group]]
        if isinstance(item, Action):
            self._require(group, item, self.links.needs(item))
            self.results[group].add(item.result)
        else:
            if self.waiting[group] is None:
                self._start(group, item)
            if self.waiting[group]:
                return False
            self.waiting[group] = None
        self.positions[group] += 1
        return True

    def _start(self, group: int, messages: Round) -> None:
        own = self.waiting[group] = {("<", message) for message in messages.receives}
        for message in messages.sends:
            self._require(group, message, (message.result,))
            own.add((">", message))
        for side, message in tuple(own):
            other = self.placement[message.target if side == ">" else message.result.stage]
            counterpart = ("<" if side == ">" else ">", message)
            remote = self.waiting[other]
            if remote is not None and counterpart in remote:
                remote.discard(counterpart)
                own.discard((side, message))
                self.results[self.placement[message.target]].add(message.result)

    def _require(self, group: int, item: Action | Message, needs: Iterable[Action]) -> None:
        for need in needs:
            if need not in self.results[group]:
                raise ScheduleError(
                    f"group {group} has {item} at position {self.positions[group]}, before it has "
                    f"{need}"
                )

    def blocked(self) -> ScheduleError:
        """Return the error for groups that wait for each other."""
        lines = []
        for group, items in enumerate(self.order.lists):
            at, waiting = self.positions[group], self.waiting[group]
            names = sorted(side + str(message) for side, message in waiting or ())
            state = f"is at {items[at]}, position {at}" if at < len(items) else "is done"
            lines.append(f"  group {group} {state}" + f" and waits for {names}" * bool(names))
        return ScheduleError(
            "without tags, the messages block:\n" + "\n".join(lines),
            hint="order_messages derives an order that cannot block",
        )
