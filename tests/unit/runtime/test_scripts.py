"""Lists of messages as scripts and as rounds, run by threads that exchange tensors."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.collectives import Network, solve
from shardwise.collectives.messages import Chunk, Instruction, MessageProgram
from shardwise.collectives.messages.check import interpret
from shardwise.errors import ProgramError
from shardwise.runtime.collectives.messenger import run_script
from shardwise.runtime.collectives.script import (
    message_rounds,
    run_rounds,
    write_rounds,
    write_script,
)
from shardwise.runtime.failures import Wait, follow

LIMIT_S = 20.0


class Link:
    """Messages of one edge: the n-th send is copied to the n-th receive, once both exist."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.sent: list[Tensor] = []
        self.posted: list[Tensor] = []
        self.done = 0

    def add(self, to: list[Tensor], view: Tensor, lazy: bool) -> Work:
        with self.lock:
            to.append(view)
            number = len(to)
            if not lazy:
                self.move(number)
            self.lock.notify_all()
        return Work(self, number)

    def move(self, upto: int) -> None:
        while self.done < min(upto, len(self.sent), len(self.posted)):
            self.posted[self.done].copy_(self.sent[self.done])
            self.done += 1
        self.lock.notify_all()


class Work:
    """A request that moves the data at the latest when it is waited for."""

    def __init__(self, link: Link, number: int) -> None:
        self.link, self.number = link, number

    def wait(self, _: Any = None) -> None:
        link = self.link
        with link.lock:
            there = link.lock.wait_for(
                lambda: min(len(link.sent), len(link.posted)) >= self.number, LIMIT_S
            )
            if not there:
                raise RuntimeError("time-out")
            link.move(self.number)


class FakeGroup:
    """One rank's end of the links; data move immediately or as late as possible, at random."""

    def __init__(self, rank: int, links: dict[tuple[int, int], Link], seed: int) -> None:
        self.rank, self.links, self.chance = rank, links, random.Random(seed)

    def send(self, views: list[Tensor], peer: int, tag: int) -> Work:
        link = self.links[self.rank, peer]
        return link.add(link.sent, views[0], self.chance.random() < 0.5)

    def recv(self, views: list[Tensor], peer: int, tag: int) -> Work:
        link = self.links[peer, self.rank]
        return link.add(link.posted, views[0], self.chance.random() < 0.5)

    def exchange(self, messages: Sequence[tuple[str, Tensor, int]]) -> None:
        """Exchange a batch as NCCL does: it completes only as a unit."""
        calls = {"send": self.send, "take": self.recv}
        for work in [calls[kind]([view], peer, 0) for kind, view, peer in messages]:
            work.wait()


def memory_of(program: MessageProgram, rank: int, scratch_numel: int) -> dict[str, Tensor]:
    data = (torch.arange(program.numel) % 97 + 1000 * rank).to(torch.float64)
    return {"data": data, "scratch": torch.full((scratch_numel,), -7.0).double()}


def by_script(program: MessageProgram, rank: int, group: Any) -> dict[str, Tensor]:
    script = write_script(program, rank)
    memory = memory_of(program, rank, script.scratch_numel)
    run_script(script, memory, group, rank, LIMIT_S)
    return memory


def by_rounds(program: MessageProgram, rank: int, group: FakeGroup) -> dict[str, Tensor]:
    rounds = write_rounds(program, rank)
    memory = memory_of(program, rank, rounds.scratch_numel)
    run_rounds(rounds, memory, group.exchange)
    return memory


def check(program: MessageProgram, how: Callable[..., dict[str, Tensor]], seed: int) -> None:
    count = program.num_ranks
    links = {(a, b): Link() for a in range(count) for b in range(count)}
    inputs = [memory_of(program, rank, 0)["data"].numpy() for rank in range(count)]
    if program.operation == "all_gather":
        cut = zip(inputs, program.offsets, program.counts, strict=True)
        inputs = [data[first : first + size] for data, first, size in cut]
    with ThreadPoolExecutor(count) as threads:
        ran = [
            threads.submit(how, program, rank, FakeGroup(rank, links, seed + rank))
            for rank in range(count)
        ]
        memories = [each.result(timeout=60) for each in ran]
    for rank, expected in enumerate(interpret(program, inputs)):
        result = memories[rank]["data"].numpy()
        if program.operation == "reduce_scatter":
            first = program.offsets[rank]
            result = result[first : first + program.counts[rank]]
        if program.operation != "reduce" or rank == program.root:
            np.testing.assert_array_equal(result, expected)


@st.composite
def programs(draw: st.DrawFn) -> MessageProgram:
    count = draw(st.integers(2, 5))
    cards = [draw(st.sampled_from([1e8, 3e8, 8e8])) for _ in range(count)]
    operation = draw(
        st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
    )
    root = {"root": draw(st.integers(0, count - 1))} if operation in ("broadcast", "reduce") else {}
    numel = draw(st.sampled_from([0, 1, 7, 1000, 100_003]))
    if draw(st.booleans()):
        network = Network.of_cards(cards, latency_s=1e-5, message_s=5e-6)
    else:
        speeds = {
            (a, b): draw(st.sampled_from([1e7, 1e8, 1e9]))
            for a in range(count)
            for b in range(count)
            if a != b
        }
        network = Network.of_links(speeds)
    return solve(network, operation, numel, **root).program


@given(programs(), st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_scripts_and_rounds_equal_the_interpreter(program, seed):
    check(program, by_script, seed)
    check(program, by_rounds, seed)


@given(programs())
@settings(max_examples=15, deadline=None)
def test_both_ends_of_a_message_are_in_the_same_round(program):
    rounds = message_rounds(program)
    edges: dict[tuple[int, int, int], list[int]] = {}
    for rank, steps in enumerate(program.instructions):
        for number, step in enumerate(steps):
            ends = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
            edges.setdefault((*ends, rank), []).append(rounds[rank, number])
    for (sender, receiver, rank), numbers in edges.items():
        assert numbers == edges[sender, receiver, receiver if rank == sender else sender]
        assert numbers == sorted(numbers)
        assert max(numbers.count(number) for number in set(numbers)) <= program.window


def swap(kind: str) -> MessageProgram:
    """Two ranks that send to each other first, and then receive."""
    lists = [(Instruction("send", 1 - r, 0, 1), Instruction(kind, 1 - r, 0, 1)) for r in (0, 1)]
    return MessageProgram(
        operation="all_reduce",
        num_ranks=2,
        numel=4,
        chunks=(Chunk(0, 4),),
        instructions=tuple(lists),
    )


def test_ranks_that_exchange_and_add_need_one_round():
    assert set(message_rounds(swap("reduce")).values()) == {0}
    check(swap("reduce"), by_rounds, 0)
    check(swap("reduce"), by_script, 0)


def test_circular_messages_are_refused():
    with pytest.raises(ProgramError, match="wait for each other"):
        message_rounds(swap("receive"))


def waits(**edges: tuple[int, int]) -> dict[int, Wait]:
    """Waits for the first message of an edge, by ranks that have begun nothing themselves."""
    return {int(r[1:]): Wait(edge=edge, sent={}, posted={}) for r, edge in edges.items()}


@pytest.mark.parametrize(
    ("waits_by_rank", "cause"),
    [
        (waits(r0=(1, 0)), (1, 0)),
        (waits(r0=(1, 0), r1=(3, 1)), (3, 1)),
        (waits(r0=(0, 1), r1=(1, 3), r2=(0, 2)), (1, 3)),
        (waits(r0=(2, 0), r1=(1, 2), r2=(1, 2)), (1, 2)),
    ],
)
def test_the_stalled_edge_is_followed_from_rank_to_rank(waits_by_rank, cause):
    assert follow(waits_by_rank, 0) == cause


def test_in_a_circle_the_edge_of_the_sent_message_is_dead():
    waits_by_rank = waits(r0=(3, 0), r1=(0, 1), r2=(0, 2), r3=(2, 3))
    waits_by_rank[2] = Wait(edge=(0, 2), sent={3: 1}, posted={})
    assert {follow(waits_by_rank, rank) for rank in range(4)} == {(2, 3)}
    assert Wait.from_json(json.dumps(asdict(waits_by_rank[2]))) == waits_by_rank[2]
