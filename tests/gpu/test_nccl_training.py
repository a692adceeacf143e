"""Every plan over NCCL equals one GPU in float64: losses, gradients, and three AdamW steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.equivalence.reference import KeepDouble
from shardwise.runtime.transport.process_group import ProcessGroupTransport
from tests.support import checkpoints
from tests.support.pool import Pool
from tests.support.training import (
    Run,
    assert_equal,
    check_parallel,
    device_of_rank,
    parallel,
    to_device,
    trained,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
Ranks = Callable[[int], Pool]
MODELS = ("fused_gpt", "llama", "t5", "vit", "mixtral")  # the first and the third tie weights
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zb_v")
BATCH = 8


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp", "tensor"])
def test_strategies(ranks: Ranks, strategy: str, num_ranks: int, model: str) -> None:
    check_parallel(ranks, model, strategy, num_ranks, {}, BATCH)


STAGES = {2: {"pp": 2}, 4: {"pp": 2, "dp": 2}, 8: {"pp": 2, "dp": 2, "tp": 2}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(ranks: Ranks, schedule: str, num_ranks: int, model: str) -> None:
    """Two groups of ranks, with data and tensor parallelism within them."""
    options = {**STAGES[num_ranks], "schedule": schedule, "num_microbatches": 4}
    check_parallel(ranks, model, "hybrid", num_ranks, options, BATCH)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_a_stage_per_rank(ranks: Ranks, schedule: str, num_ranks: int) -> None:
    options = {"pp": num_ranks, "schedule": schedule, "num_microbatches": 5}
    check_parallel(ranks, "unet", "pipeline", num_ranks, options, BATCH)


@pytest.mark.parametrize(
    ("model", "strategy", "num_ranks", "options"),
    [
        ("fused_gpt", "pipeline", 4, {"stage_ranks": (1, 2, 1), "num_microbatches": 3}),
        ("t5", "pipeline", 3, {"stage_ranks": (2, 1), "num_microbatches": 2}),
        ("llama", "pipeline", 2, {"pp": 2, "num_microbatches": 1}),
        ("llama", "pipeline", 2, {"pp": 2, "num_microbatches": 7}),
        ("odd", "pipeline", 2, {"pp": 2, "num_microbatches": 4, "schedule": "zero_bubble"}),
        ("llama", "hybrid", 4, {"tp": 2, "pp": 2, "num_microbatches": 3, "recompute": "full"}),
        ("t5", "hybrid", 8, {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "num_microbatches": 2}),
        ("fused_gpt", "hybrid", 8, {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "num_microbatches": 2}),
        ("fused_gpt", "ddp", 2, {"num_microbatches": 3}),
        ("vit", "fsdp", 3, {"recompute": "selective"}),
        ("fused_gpt", "zero1", 2, {"offload": ("optimizer",)}),
    ],
)
def test_options(
    ranks: Ranks, model: str, strategy: str, num_ranks: int, options: dict[str, Any]
) -> None:
    check_parallel(ranks, model, strategy, num_ranks, options, BATCH)


# ------------------------------------------------ delays and random schedules


def delayed(seed: int, arguments: tuple[Any, ...]) -> Run:
    """Train while this rank and its GPU pause at random before messages and collectives."""
    chance = random.Random(f"{seed} {dist.get_rank()}")
    names = ("exchange", "all_reduce", "all_gather", "reduce_scatter")

    def pausing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seconds = 0.01 * chance.random() ** 4
            if device_of_rank().type == "cuda" and chance.random() < 0.5:
                torch.cuda._sleep(int(1e9 * seconds))  # cycles; the host runs ahead
            else:
                time.sleep(seconds)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            original = getattr(ProcessGroupTransport, name)
            patch.setattr(ProcessGroupTransport, name, pausing(original))
        return parallel(*arguments)


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "options"),
    [
        *(
            (2, "pipeline", {"pp": 2, "schedule": schedule, "num_microbatches": 4})
            for schedule in ("1f1b", "interleaved", "zero_bubble", "zb_v")
        ),
        (4, "pipeline", {"pp": 4, "schedule": "1f1b", "num_microbatches": 6}),
        (4, "hybrid", {"tp": 2, "pp": 2, "num_microbatches": 4}),
        (8, "hybrid", {"dp": 2, "tp": 2, "pp": 2, "num_microbatches": 4}),
    ],
)
def test_delays_change_nothing(
    ranks: Ranks, num_ranks: int, strategy: str, options: dict[str, Any]
) -> None:
    """15 runs of each of these 7 plans, with the same bits."""
    arguments = ("unet" if num_ranks == 4 else "fused_gpt", strategy, num_ranks, options, BATCH)
    first = ranks(num_ranks).run(delayed, -1, arguments, timeout=300)[0]
    for seed in range(15):
        for run in ranks(num_ranks).run(delayed, seed, arguments, timeout=300):
            assert_equal(run, first, tolerance=1e-12)


def random_schedule_run(seed: int) -> tuple[Run, Run] | None:
    """Train under a random schedule, and on one device; None if the schedule is refused."""
    from shardwise.schedules import ScheduleError, check
    from tests.unit.runtime.test_nccl_order import layers, random_schedule

    schedule = random_schedule(seed)
    try:
        check(schedule)
    except ScheduleError:
        return None
    runs = []
    for parallelized in (True, False):
        model, batch = to_device(*layers(), device_of_rank())
        model, batch = model.double(), {"x": batch["x"].double()}
        groups = schedule.num_groups if parallelized else 1
        if parallelized and dist.get_rank() >= groups:
            continue
        with KeepDouble():
            graph, cluster = sw.capture(model, batch), sw.Cluster.local(groups)
            if not parallelized:
                loss = model(**batch)
                loss.backward()
                gradients = {n: p.grad.cpu() for n, p in model.named_parameters()}
                runs.append(Run(losses=[loss.item()], norms=[], gradients=gradients, state={}))
                continue
            plan = sw.strategies.pipeline(
                graph,
                cluster,
                pp=groups,
                schedule=schedule,
                num_microbatches=schedule.num_microbatches,
            )
            run = trained(sw.parallelize(model, batch, plan=plan), batch)
            runs.append(Run(losses=run.losses[:1], norms=[], gradients=run.gradients, state={}))
    return runs[0], runs[1]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_schedules(ranks: Ranks, num_ranks: int) -> None:
    from tests.unit.runtime.test_nccl_order import random_schedule

    seeds = [s for s in range(1000, 1200) if random_schedule(s).num_groups == num_ranks]
    equal = 0
    for seed in seeds:
        for pair in ranks(num_ranks).run(random_schedule_run, seed, timeout=300):
            if pair is not None:
                assert_equal(*pair)
                equal += 1
        if equal >= 7 * num_ranks:
            return
    pytest.fail(f"only {equal // num_ranks} schedules of {len(seeds)} ran")


# ------------------------------------------------ checkpoints


def test_a_checkpoint_of_3d_is_read_under_fsdp_and_on_a_cpu(ranks: Ranks, tmp_path: Path) -> None:
    """Save on 4 ranks with tensor parallelism and stages; load on 2 with fsdp, and on a CPU."""
    saved = ranks(4).run(checkpoints.save_run, "tp2xpp2", "fused_gpt", tmp_path / "a")[0]
    expected = checkpoints.continued("fused_gpt")
    for run, losses in ranks(2).run(checkpoints.load_runs, "fsdp2", "fused_gpt", [tmp_path / "a"])[
        0
    ]:
        checkpoints.assert_same_state(run, saved)
        assert losses == pytest.approx(expected[checkpoints.BEFORE :], rel=1e-9)
    ((run, losses),) = checkpoints.load_runs("one", "fused_gpt", [tmp_path / "a"])
    checkpoints.assert_same_state(run, saved)
    assert losses == pytest.approx(expected[checkpoints.BEFORE :], rel=1e-9)
