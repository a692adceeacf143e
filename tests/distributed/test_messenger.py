"""Solved programs on gloo processes compute their operations, and errors name a lost edge."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardwise.collectives import Network, solve
from shardwise.collectives.messages import MessageProgram
from shardwise.errors import LinkError, ProgramError, RankError
from shardwise.runtime.collectives.messenger import Messenger
from shardwise.runtime.collectives.script import batches, run_rounds, write_rounds
from tests.support.pool import Pool
from tests.support.tiers import thinned

pytestmark = pytest.mark.distributed

TO_3 = {(2, 3): 1e9, (3, 2): 1e9}
CARDS = {"slow": [8e8, 8e8, 8e8, 2e8], "three": [8e8, 3e8, 5e8]}


def programs(cards: list[float], sizes: tuple[int, ...]) -> list[MessageProgram]:
    network = Network.of_cards(cards, latency_s=1e-5, message_s=5e-6)
    programs = []
    for numel in sizes:
        for operation in ("all_reduce", "reduce_scatter", "all_gather"):
            programs.append(solve(network, operation, numel).program)
        programs += [solve(network, op, numel, root=1).program for op in ("broadcast", "reduce")]
    return programs


def input_of(program: MessageProgram, rank: int) -> torch.Tensor:
    return (torch.arange(program.numel) % 97 + 1000 * rank).to(torch.float64)


def true_result(program: MessageProgram, rank: int) -> torch.Tensor:
    inputs = [input_of(program, r) for r in range(program.num_ranks)]
    if program.operation == "broadcast":
        return inputs[program.root]
    if program.operation == "all_gather":
        cut = zip(inputs, program.offsets, program.counts, strict=True)
        return torch.cat([x[first : first + count] for x, first, count in cut])
    total = torch.stack(inputs).sum(0)
    if program.operation in ("all_reduce", "reduce"):
        return total
    first, stop = program.offsets[rank], program.offsets[rank] + program.counts[rank]
    return total[first:stop]


def run_all(name: str, sizes: tuple[int, ...]) -> list[str]:
    """The programs whose result is wrong on this rank."""
    rank = dist.get_rank()
    messenger = Messenger(timeout_s=30)
    wrong = []
    started = []
    for program in programs(CARDS[name], sizes):
        data = input_of(program, rank)
        started.append((program, data, messenger.start(program, data)))
    for program, data, handle in started:
        handle.wait()
        expected = true_result(program, rank)
        result = data
        if program.operation == "reduce_scatter":
            result = data[program.offsets[rank] :][: program.counts[rank]]
        if program.operation == "reduce" and rank != program.root:
            continue
        if not torch.equal(expected, result):
            wrong.append(f"{program.operation} of {program.numel}")
    messenger.close()
    return wrong


@pytest.mark.parametrize("name", thinned(CARDS, lambda _, name: name == "slow"))
def test_all_operations_are_correct(pool: Callable[[int], Pool], name):
    sizes = (0, 3, 1001, 200_003)
    for wrong in pool(len(CARDS[name])).run(f"{__name__}:run_all", name, sizes, timeout=60):
        assert not wrong


def bits(numel: int) -> bytes:
    network = Network.of_cards(CARDS["slow"], latency_s=1e-5)
    data = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    messenger = Messenger()
    messenger.run(solve(network, "all_reduce", numel).program, data)
    messenger.close()
    return data.numpy().tobytes()


def test_sums_have_the_same_bits_on_all_ranks(pool: Callable[[int], Pool]):
    for numel in (5, 100_001):
        results = pool(4).run(f"{__name__}:bits", numel, timeout=60)
        assert len(set(results)) == 1


def in_rounds(name: str, numel: int) -> list[str]:
    """Run all programs in the batches that NCCL would get."""
    rank, group, wrong = dist.get_rank(), dist.group.WORLD, []
    for program in programs(CARDS[name], (numel,)):
        rounds = write_rounds(program, rank)
        data = input_of(program, rank)
        memory = {"data": data, "scratch": data.new_empty(rounds.scratch_numel)}
        run_rounds(rounds, memory, batches(group))
        is_full = program.operation in ("all_reduce", "broadcast", "all_gather")
        if is_full and not torch.equal(data, true_result(program, rank)):
            wrong.append(program.operation)
    return wrong


def test_rounds_as_batches_are_correct(pool: Callable[[int], Pool]):
    for wrong in pool(4).run(f"{__name__}:in_rounds", "slow", 20_001, timeout=60):
        assert not wrong


def odd_tensors() -> list[str]:
    """Dtypes, shapes and orders other than those of a flat buffer; return the wrong ones."""
    rank, count, wrong = dist.get_rank(), dist.get_world_size(), []
    program = solve(Network.of_cards(CARDS["slow"]), "all_reduce", 600).program
    messenger = Messenger(timeout_s=30)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.bool):
        matrix = torch.zeros(30, 40, dtype=dtype)
        part = matrix.t()[::2]
        part += (torch.arange(600).view(20, 30) % 7 == rank).to(dtype)
        messenger.run(program, part)
        expected = (torch.arange(600).view(20, 30) % 7 < count).to(dtype)
        if not torch.equal(part, expected) or matrix[:, 1::2].any():
            wrong.append(str(dtype))
    handles = [messenger.start(program, torch.ones(600)) for _ in range(5)]
    del messenger  # what was started is done nevertheless
    for handle in handles:
        handle.wait()
    return wrong


def test_dtypes_shapes_and_concurrent_programs(pool: Callable[[int], Pool]):
    for wrong in pool(4).run(f"{__name__}:odd_tensors", timeout=60):
        assert not wrong


def refused() -> str:
    messenger = Messenger(timeout_s=30)
    program = solve(Network.of_cards(CARDS["slow"]), "all_reduce", 5).program
    messages = []
    for data in (torch.ones(4), torch.ones(5, device="meta"), torch.ones(5).to(torch.float8_e5m2)):
        try:
            messenger.run(program, data)
        except ProgramError as error:
            messages.append(str(error))
    return "\n".join(messages)


def test_wrong_tensors_are_refused(pool: Callable[[int], Pool]):
    for messages in pool(4).run(f"{__name__}:refused", timeout=60):
        assert "program of 5 elements" in messages
        assert "data on meta over gloo" in messages
        assert "float8" in messages


def test_other_backends_are_refused():
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(RankError, match="'fake'"):
            Messenger()
    finally:
        dist.destroy_process_group()


def stopped() -> tuple[float, str, str]:
    """Return the waiting time and both errors of the other ranks when rank 3 stops."""
    network = Network.of_links({(0, 1): 1e9, (1, 0): 1e9, (1, 2): 1e9, (2, 1): 1e9} | TO_3)
    program = solve(network, "all_reduce", 100_000).program
    messenger = Messenger()
    messenger.run(program, torch.ones(100_000))  # also rank 3
    messenger.timeout_s = 2.0
    dist.barrier()  # so that a slow start is not taken for a rank that stopped
    began = time.monotonic()
    messages = []
    for _ in range(2 if dist.get_rank() != 3 else 0):
        try:
            messenger.run(program, torch.ones(100_000))
        except LinkError as error:
            messages.append(str(error))
    took = time.monotonic() - began
    dist.barrier()  # rank 3 keeps its connections open until the others have given up
    return took, *(messages or ("", ""))


@pytest.mark.slow
def test_a_stopped_rank_causes_a_timeout_that_names_the_edge(pool: Callable[[int], Pool]):
    for took, first, second in pool(4).run(f"{__name__}:stopped", timeout=60)[:3]:
        assert took < 20
        assert "edge 3 -> 2" in first or "edge 2 -> 3" in first
        assert second == first
