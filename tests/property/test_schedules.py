"""Built schedules pass the check, and the check agrees with an independent dependency graph."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedules import (
    Action,
    Schedule,
    ScheduleError,
    check,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    replay,
    zero_bubble_h1,
    zero_bubble_v,
)

counts = st.integers(1, 13)
schedules = st.one_of(
    st.builds(gpipe, st.integers(1, 9), counts),
    st.builds(one_f_one_b, st.integers(1, 9), counts),
    st.builds(zero_bubble_h1, st.integers(1, 9), counts),
    st.builds(lambda half, m: zero_bubble_v(2 * half, m), st.integers(1, 5), counts),
    st.builds(
        lambda groups, more, m: interleaved(groups + more, m, groups),
        st.integers(1, 6),
        st.integers(0, 14),
        counts,
    ),
)
Edges = list[tuple[int, int]]


def is_right(schedule: Schedule, edges: Edges) -> bool:
    """Return whether a schedule is complete and cannot block, by sorting a dependency graph."""
    all_actions = [a for actions in schedule.actions for a in actions]
    for stage, microbatch in product(range(schedule.num_stages), range(schedule.num_microbatches)):
        kinds = sorted(
            a.kind for a in all_actions if a.stage == stage and a.microbatch == microbatch
        )
        if kinds not in (["B", "F"], ["F", "I", "W"]):
            return False
    place = {
        a: (g, at) for g, actions in enumerate(schedule.actions) for at, a in enumerate(actions)
    }
    if any(place[a][0] != schedule.placement[a.stage] for a in all_actions):
        return False
    graph: dict[Action, list[Action]] = {a: [] for a in all_actions}
    for actions in schedule.actions:
        for before, after in pairwise(actions):
            graph[after].append(before)
    backward = {(a.stage, a.microbatch): a for a in all_actions if a.kind in "BI"}
    for (stage, microbatch), action in backward.items():
        graph[action].append(Action("F", stage, microbatch))
        if action.kind == "I":
            graph[Action("W", stage, microbatch)].append(action)
        for consumer in [c for p, c in edges if p == stage]:
            graph[action].append(backward[consumer, microbatch])
            graph[Action("F", consumer, microbatch)].append(Action("F", stage, microbatch))
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


def passes(schedule: Schedule, edges: Edges | None = None) -> bool:
    try:
        check(schedule, edges)
    except ScheduleError:
        return False
    return True


def chain(schedule: Schedule) -> Edges:
    return [(s, s + 1) for s in range(schedule.num_stages - 1)]


def with_lists(schedule: Schedule, lists: Iterable[Iterable[Action]]) -> Schedule:
    return replace(schedule, actions=tuple(tuple(actions) for actions in lists))


def any_position(data: st.DataObject, schedule: Schedule) -> tuple[int, int]:
    group = data.draw(st.integers(0, schedule.num_groups - 1))
    return group, data.draw(st.integers(0, len(schedule.actions[group]) - 1))


@given(schedules)
def test_built_schedules_pass(schedule: Schedule) -> None:
    facts = check(schedule)
    assert is_right(schedule, chain(schedule))
    assert sum(facts.sends) == sum(facts.receives)
    check(forward_only(schedule), backward=False)


def test_interleaved_passes_for_all_small_shapes() -> None:
    for groups, num_microbatches in product(range(1, 6), range(1, 14)):
        for stages in range(groups, 3 * groups + 2):
            check(interleaved(stages, num_microbatches, groups))


@given(schedules)
def test_text_round_trip(schedule: Schedule) -> None:
    assert Schedule.parse_text(schedule.to_text(), name=schedule.name) == schedule


@given(schedules, st.data())
def test_additional_forward_edges_never_block(schedule: Schedule, data: st.DataObject) -> None:
    stages = range(schedule.num_stages)
    skips = [(p, c) for p in stages for c in stages if c > p + 1]
    chosen = data.draw(st.lists(st.sampled_from(skips), unique=True, max_size=4)) if skips else []
    more, plain = check(schedule, chain(schedule) + chosen), check(schedule)
    assert more.alive == plain.alive
    across = [1 for p, c in chosen if schedule.placement[p] != schedule.placement[c]]
    assert sum(more.sends) == sum(plain.sends) + 2 * len(across) * schedule.num_microbatches


@given(schedules, st.data())
def test_a_removed_or_repeated_action_is_reported(schedule: Schedule, data: st.DataObject) -> None:
    group, at = any_position(data, schedule)
    action = schedule.actions[group][at]
    removed, repeated = ([list(actions) for actions in schedule.actions] for _ in range(2))
    del removed[group][at]
    repeated[group].insert(data.draw(st.integers(0, len(repeated[group]))), action)
    for lists in (removed, repeated):
        with pytest.raises(ScheduleError, match=f"group {group} has") as caught:
            check(with_lists(schedule, lists))
        assert str(action) in caught.value.message


@settings(max_examples=300)
@given(schedules, st.data())
def test_a_moved_action_is_rejected_exactly_if_the_graph_has_a_cycle(
    schedule: Schedule, data: st.DataObject
) -> None:
    (group, at), (target, to) = any_position(data, schedule), any_position(data, schedule)
    if data.draw(st.booleans()):
        target = group
    lists = [list(actions) for actions in schedule.actions]
    lists[target].insert(to, lists[group].pop(at))
    moved = with_lists(schedule, lists)
    assert passes(moved) == is_right(moved, chain(moved))


@settings(max_examples=200)
@given(schedules, st.data())
def test_swapped_neighbours_and_random_edges_agree_with_the_graph(
    schedule: Schedule, data: st.DataObject
) -> None:
    lists = [list(actions) for actions in schedule.actions]
    for _ in range(data.draw(st.integers(0, 4))):
        group, at = any_position(data, schedule)
        if at:
            lists[group][at - 1 : at + 1] = reversed(lists[group][at - 1 : at + 1])
    stages = range(schedule.num_stages)
    pairs = [(p, c) for p in stages for c in stages if p < c]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    shuffled = with_lists(schedule, lists)
    assert passes(shuffled, edges) == is_right(shuffled, edges)


@given(schedules, st.data())
def test_an_action_of_the_wrong_kind_is_rejected(schedule: Schedule, data: st.DataObject) -> None:
    group, at = any_position(data, schedule)
    kind = data.draw(st.sampled_from("FBIW"))
    lists = [list(actions) for actions in schedule.actions]
    lists[group][at] = replace(lists[group][at], kind=kind)
    changed = with_lists(schedule, lists)
    assert passes(changed) == (changed == schedule)


@given(schedules, st.floats(0, 3), st.integers(0, 2**16))
def test_a_replay_respects_every_dependency(schedule: Schedule, transfer: float, seed: int) -> None:
    def seconds(action: Action) -> float:
        return 1 + (7 * action.stage + 3 * action.microbatch + ord(action.kind) + seed) % 5

    timeline = replay(schedule, seconds, transfer=transfer)
    spans = {span.action: span for actions in timeline.spans for span in actions}
    ran = tuple(tuple(span.action for span in row) for row in timeline.spans)
    assert ran == schedule.actions
    backward = {(a.stage, a.microbatch): a for a in spans if a.kind in "BI"}
    for producer, consumer in chain(schedule):
        wait = transfer if schedule.placement[producer] != schedule.placement[consumer] else 0.0
        for m in range(schedule.num_microbatches):
            first, second = spans[Action("F", producer, m)], spans[Action("F", consumer, m)]
            assert first.end + wait <= second.start
            later, earlier = spans[backward[producer, m]], spans[backward[consumer, m]]
            assert earlier.end + wait <= later.start
    for actions in timeline.spans:
        for before, after in pairwise(actions):
            assert before.end <= after.start
    groups = range(schedule.num_groups)
    busy = sum(timeline.busy(group) for group in groups)
    assert timeline.step_time == max(span.end for actions in timeline.spans for span in actions)
    assert timeline.bubble_fraction == pytest.approx(1 - busy / (len(groups) * timeline.step_time))
