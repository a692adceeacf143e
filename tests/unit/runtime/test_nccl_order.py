"""Pipelines end, and equal one process in float64, under the rules of NCCL.

The ranks are threads whose messages follow `tests.support.nccl_rules`.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from itertools import chain, product
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.equivalence import Certificate, check, double, ranks, run_reference
from shardwise.equivalence.check import make_trials
from shardwise.equivalence.reference import widen_graph
from shardwise.program import Pipeline, build_pipeline
from shardwise.schedules import Action, Links, Schedule, ScheduleError, make
from shardwise.schedules import check as check_schedule
from tests.support import training
from tests.support.nccl_rules import Deadlock, NcclTransport, run_under_nccl_rules


@functools.cache
def parts(name: str) -> tuple[Any, Any, Any]:
    """Return the graph of a model, its step on one process, and a batch of 7 or 8 samples."""
    model, batch = double(*(layers() if name == "layers" else training.make(name, 8)))
    return widen_graph(sw.capture(model, batch)), run_reference(model, batch), batch


class Layers(torch.nn.Module):
    """Eight small layers, the first and the last with one weight, and a connection that skips."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(8))
        self.layers[7].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = None
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            skipped = x if index == 1 else skipped
        return (x + skipped).square().mean()


def layers() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Layers(), {"x": torch.randn(8, 3)}


@functools.cache
def trials(name: str, num_microbatches: int) -> Any:
    graph, reference, batch = parts(name)
    plan = sw.strategies.pipeline(
        graph, sw.Cluster.local(2), pp=2, num_microbatches=num_microbatches
    )
    return make_trials(build_pipeline(graph, plan), reference, batch)


def pipeline_of(name: str, strategy: str, num_ranks: int, options: dict[str, Any]) -> Pipeline:
    graph = parts(name)[0]
    cluster = sw.Cluster.local(num_ranks)
    return build_pipeline(graph, getattr(sw.strategies, strategy)(graph, cluster, **options))


def run(name: str, pipeline: Pipeline, **rules: Any) -> Certificate:
    """Compare a pipeline with one process: loss, outputs, gradients, and state after AdamW."""
    _, reference, batch = parts(name)
    with pytest.MonkeyPatch.context() as patch:
        runner = functools.partial(run_under_nccl_rules, **rules)
        patch.setattr(ranks, "run_threads", runner)
        known = trials(name, pipeline.plan.num_microbatches)
        return check(pipeline, reference, batch, trials=known, timeout_s=60)


NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zb_v")
EVERYDAY = [
    ("layers", "pipeline", 2, {"schedule": "1f1b", "num_microbatches": 4}),
    ("layers", "pipeline", 2, {"schedule": "zb_v", "num_microbatches": 3}),
    ("layers", "pipeline", 4, {"schedule": "zero_bubble", "num_microbatches": 5}),
    ("layers", "hybrid", 4, {"tp": 2, "pp": 2, "num_microbatches": 3}),
]
THOROUGH = [
    ("fused_gpt", "hybrid", 4, {"tp": 2, "pp": 2, "num_microbatches": 3}),
    *(
        ("layers", "pipeline", num_ranks, {"schedule": schedule, "num_microbatches": count})
        for schedule, num_ranks, count in product(NAMES, (2, 3, 4), (1, 2, 3, 5, 8))
    ),
    *(
        ("layers", "pipeline", 8, {"schedule": schedule, "num_microbatches": count})
        for schedule, count in product(("gpipe", "1f1b", "zero_bubble"), (3, 8))
    ),
    *(
        (name, "pipeline", 2, {"schedule": schedule, "num_microbatches": 4, "recompute": again})
        for name, schedule, again in product(
            ("fused_gpt", "unet", "t5", "odd"), ("1f1b", "zero_bubble"), ("none", "full")
        )
    ),
    *(
        ("fused_gpt", "hybrid", 8, {**sizes, "zero": zero, "num_microbatches": 2})
        for sizes, zero in product(
            ({"dp": 2, "tp": 2, "pp": 2}, {"dp": 1, "tp": 4, "pp": 2}, {"dp": 4, "tp": 1, "pp": 2}),
            (0, 1, 3),
        )
    ),
    ("fused_gpt", "pipeline", 4, {"stage_ranks": (1, 2, 1), "num_microbatches": 3}),
    ("fused_gpt", "pipeline", 3, {"stage_ranks": (2, 1), "num_microbatches": 4}),
    ("t5", "pipeline", 5, {"stage_ranks": (3, 2), "num_microbatches": 2}),
]


def check_case(name: str, strategy: str, num_ranks: int, options: dict[str, Any]) -> None:
    options = options if "stage_ranks" in options else {"pp": num_ranks, **options}
    pipeline = pipeline_of(name, strategy, num_ranks, options)
    for seed, queues in enumerate(("communicator", "device")):
        certificate = run(name, pipeline, queues=queues, delay_s=0.003, seed=seed)
        assert certificate.ok, str(certificate)


@pytest.mark.parametrize(("name", "strategy", "num_ranks", "options"), EVERYDAY)
def test_pipelines_equal_one_process(
    name: str, strategy: str, num_ranks: int, options: dict[str, Any]
) -> None:
    check_case(name, strategy, num_ranks, options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy", "num_ranks", "options"), THOROUGH)
def test_every_schedule_equals_one_process(
    name: str, strategy: str, num_ranks: int, options: dict[str, Any]
) -> None:
    check_case(name, strategy, num_ranks, options)


# ------------------------------------------------ random schedules


def random_schedule(seed: int) -> Schedule:
    """Return a complete schedule in a random order, some of which cannot run."""
    draw = random.Random(seed)
    groups = draw.choice([2, 2, 3, 4])
    stages = draw.randint(groups, 2 * groups)
    count = draw.choice([1, 2, 4, 5])
    placement = [*range(groups), *(draw.randrange(groups) for _ in range(stages - groups))]
    links = Links.of(stages)
    todo = []
    for stage, microbatch in product(range(stages), range(count)):
        kinds = "FIW" if draw.random() < 0.5 else "FB"
        todo += [Action(kind, stage, microbatch) for kind in kinds]
    lists: list[list[Action]] = [[] for _ in range(groups)]
    done: set[Action] = set()
    weight = draw.choice([0.2, 1.0, 5.0])  # how much forwards are preferred
    while todo:
        ready = [action for action in todo if all(need in done for need in links.needs(action))]
        weights = [weight if action.kind == "F" else 1.0 for action in ready]
        action = draw.choices(ready, weights)[0]
        todo.remove(action)
        done.add(action.result)
        lists[placement[action.stage]].append(action)
    if draw.random() < 0.3:
        actions = draw.choice([actions for actions in lists if len(actions) > 1])
        at = draw.randrange(len(actions) - 1)
        actions[at], actions[at + 1] = actions[at + 1], actions[at]
    return Schedule(
        name=f"random{seed}",
        num_stages=stages,
        num_microbatches=count,
        placement=tuple(placement),
        actions=tuple(map(tuple, lists)),
    )


def outcome(seed: int) -> str:
    schedule = random_schedule(seed)
    try:
        check_schedule(schedule)
    except ScheduleError:
        return "refused"
    options = {
        "pp": schedule.num_groups,
        "schedule": schedule,
        "num_microbatches": schedule.num_microbatches,
    }
    pipeline = pipeline_of("layers", "pipeline", schedule.num_groups, options)
    queues = ("communicator", "device")[seed % 2]
    certificate = run("layers", pipeline, queues=queues, delay_s=0.002, seed=seed)
    assert certificate.ok, f"{schedule}\n{certificate}"
    return "equal"


def test_a_few_random_schedules_are_refused_or_equal_one_process() -> None:
    assert Counter(map(outcome, range(6)))["equal"] >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(25))
def test_random_schedules_are_refused_or_equal_one_process(block: int) -> None:
    counts = Counter(map(outcome, range(100 + 20 * block, 120 + 20 * block)))
    assert counts["equal"] >= 8


# ------------------------------------------------ the rules themselves


def posted_ahead(schedule: Schedule) -> list[list[tuple[str, int, float]]]:
    """Return sends and receives with their peers and values, receives one action ahead.

    Pipelines started messages in this order before they had rounds. On an H200, `1f1b` and
    `zero_bubble` hung on 2 and 4 ranks, `interleaved` ran on 2.
    """
    links, placement = Links.of(schedule.num_stages), schedule.placement
    numbers = {a.result: float(n) for n, a in enumerate(chain(*schedule.actions))}
    lists = []
    for group, actions in enumerate(schedule.actions):
        items: list[tuple[str, int, float]] = []
        posted: set[tuple[Action, Action]] = set()
        for at, action in enumerate(actions):
            for ahead in actions[at : at + 2]:
                for need in links.needs(ahead) if ahead.kind != "W" else ():
                    if placement[need.stage] != group and (need, ahead) not in posted:
                        posted.add((need, ahead))
                        items.append(("receive", placement[need.stage], numbers[need]))
            readers = links.consumers if action.kind == "F" else links.producers
            for stage in readers[action.stage] if action.kind != "W" else ():
                if placement[stage] != group:
                    items.append(("send", placement[stage], numbers[action.result]))
        lists.append(items)
    return lists


def hangs(schedule: Schedule) -> bool:
    """Return whether single sends and receives in that order hang or mix up messages."""
    lists = posted_ahead(schedule)

    def work(rank: int, transport: NcclTransport) -> None:
        started: list[tuple[Any, float]] = []
        for kind, peer, value in lists[rank]:
            flat = torch.tensor([value if kind == "send" else -1.0])
            started.append((transport.single(kind, flat, peer), value))
        for pending, value in started:
            assert pending.wait().item() == value

    try:
        run_under_nccl_rules(schedule.num_groups, work, timeout_s=20)
    except (Deadlock, AssertionError):
        return True
    return False


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble"])
def test_receives_one_action_ahead_hang_as_on_a_gpu(name: str, num_ranks: int) -> None:
    for count in (2, 3, 4, 8):
        assert hangs(make(name, num_groups=num_ranks, num_microbatches=count))
    assert not hangs(make("interleaved", num_groups=2, num_microbatches=3))


def test_a_send_blocks_its_queue_until_it_is_received() -> None:
    """Two ranks that first send and then receive hang in one queue, but not in one batch."""

    def apart(rank: int, transport: NcclTransport) -> None:
        flat = torch.ones(1)
        sent = transport.exchange([(flat, 1 - rank)], [])[0]
        received = transport.exchange([], [(torch.empty(1), 1 - rank)])[1]
        for pending in (*sent, *received):
            pending.wait()

    def together(rank: int, transport: NcclTransport) -> float:
        value = torch.full((1,), float(rank))
        _, (received,) = transport.exchange([(value, 1 - rank)], [(torch.empty(1), 1 - rank)])
        return received.wait().item()

    with pytest.raises(Deadlock, match=r"rank 0 at send of 1 \[1\]; rank 1 at send of 1 \[0\]"):
        run_under_nccl_rules(2, apart)
    assert run_under_nccl_rules(2, together) == [1.0, 0.0]


def test_collectives_of_other_groups_share_the_queue_of_a_device() -> None:
    """Two ranks that reduce and send in different orders hang only if a GPU runs one at a time."""

    def work(rank: int, transport: NcclTransport) -> None:
        group = ranks.rt.ProcessMesh({"dp": 2}, rank, transport).axis("dp")
        flat = torch.ones(1)

        def exchange() -> Any:
            message = [(flat, 1 - rank)]
            return transport.exchange(*((message, []) if rank else ([], message)))

        first = group.all_reduce(torch.ones(2), "sum") if rank else exchange()
        second = exchange() if rank else group.all_reduce(torch.ones(2), "sum")
        reduced, (sent, received) = (first, second) if rank else (second, first)
        for pending in (reduced, *sent, *received):
            pending.wait()

    with pytest.raises(Deadlock):
        run_under_nccl_rules(2, work, queues="device")
