from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardwise.collectives import Network, solve
from shardwise.collectives.messages import Chunk, Instruction, MessageProgram
from shardwise.collectives.messages.check import check, interpret
from shardwise.collectives.messages.drawing import svg, trees_text
from shardwise.errors import ProgramError


def program(*lists: str, window: int = 1, chunks: int = 1) -> MessageProgram:
    """An all-reduce of 4 elements from lists such as "send 0 -> 1; reduce 0 <- 1"."""
    size = 4 // chunks
    return MessageProgram(
        operation="all_reduce",
        num_ranks=len(lists),
        numel=4,
        chunks=tuple(Chunk(i * size, (i + 1) * size) for i in range(chunks)),
        instructions=tuple(
            tuple(Instruction.parse(step) for step in text.split(";") if step.strip())
            for text in lists
        ),
        window=window,
    )


def test_facts_of_a_correct_program():
    facts = check(program("send 0 -> 1; receive 0 <- 1", "reduce 0 <- 0; send 0 -> 0"))
    assert (facts.num_messages, facts.largest_message, facts.scratch_elements) == (2, 4, 4)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["", ""], "rank 0's chunk 0 lacks the contribution of rank 1"),
        (["send 0 -> 1", "reduce 0 <- 0"], "rank 0's chunk 0 lacks the contribution of rank 1"),
        (["send 0 -> 1", ""], "never received by rank 1"),
        (["receive 0 <- 1", "receive 0 <- 0"], "rank 1 sends nothing more to rank 0"),
        (
            ["reduce 0 <- 1; send 0 -> 1", "reduce 0 <- 0; send 0 -> 0"],
            "2 ranks wait for each other",
        ),
        (
            ["send 0 -> 1; send 0 -> 1", "reduce 0 <- 0; reduce 0 <- 0"],
            "contribution of rank 0 is added twice",
        ),
        (
            ["send 0 -> 1; reduce 0 <- 1", "reduce 0 <- 0; send 0 -> 0"],
            "contribution of rank 0 is added",
        ),
    ],
)
def test_incorrect_programs_raise(lists, message):
    with pytest.raises(ProgramError, match=message):
        check(program(*lists))


def test_a_small_window_blocks_ranks():
    lists = (
        "send 0 -> 1; send 1 -> 1; receive 0 <- 1; receive 1 <- 1",
        "reduce 1 <- 0; send 1 -> 0; reduce 0 <- 0; send 0 -> 0",
    )
    with pytest.raises(ProgramError, match="rank 0 sends send 0"):  # messages keep their order
        check(program(*lists, chunks=2))
    both = (
        "send 0 -> 1; send 1 -> 1; receive 0 <- 1; receive 1 <- 1",
        "send 0 -> 0; reduce 0 <- 0; reduce 1 <- 0; send 1 -> 0",
    )
    with pytest.raises(ProgramError, match="lacks"):
        check(program(*both, chunks=2))
    crossed = (
        "send 0 -> 1; send 1 -> 1; reduce 0 <- 1; reduce 1 <- 1",
        "send 0 -> 0; send 1 -> 0; reduce 0 <- 0; reduce 1 <- 0",
    )
    check(program(*crossed, chunks=2, window=2))
    with pytest.raises(ProgramError, match="window of more than 1"):
        check(program(*crossed, chunks=2, window=1))


def test_sums_in_different_orders_raise():
    # Every rank sends to every other: rank 0 adds 1 then 2, rank 2 adds 0 then 1.
    lists = [
        "send 0 -> 1; send 0 -> 2; reduce 0 <- 1; reduce 0 <- 2",
        "send 0 -> 0; send 0 -> 2; reduce 0 <- 0; reduce 0 <- 2",
        "send 0 -> 0; send 0 -> 1; reduce 0 <- 0; reduce 0 <- 1",
    ]
    with pytest.raises(ProgramError, match="different orders on ranks 0 and 2"):
        check(program(*lists))


def test_chunks_must_cover_the_data_once():
    correct = program("send 0:2 -> 1; receive 0:2 <- 1", "reduce 0:2 <- 0; send 0:2 -> 0", chunks=2)
    check(correct)
    with pytest.raises(ProgramError, match="chunks cover 3 of 4"):
        check(replace(correct, chunks=(Chunk(0, 2), Chunk(2, 3))))
    with pytest.raises(ProgramError, match="ends at element 2, the next one starts at 1"):
        check(replace(correct, chunks=(Chunk(0, 2), Chunk(1, 4))))


def test_a_missing_instruction_is_always_detected():
    solved = solve(Network.of_cards([1e9, 2e9, 3e9, 1e9, 5e8]), "all_reduce", 1003).program
    check(solved)
    for rank, steps in enumerate(solved.instructions):
        for number in range(len(steps)):
            lists = list(solved.instructions)
            lists[rank] = steps[:number] + steps[number + 1 :]
            with pytest.raises(ProgramError):
                check(replace(solved, instructions=tuple(lists)))


def test_results_are_bitwise_equal_on_all_ranks():
    random = np.random.default_rng(0)
    for cards in ([1e9] * 7, [1e9, 3e8, 5e8, 5e8, 2e9, 1e8]):
        for numel in (5, 100_003):
            network = Network.of_cards(cards, latency_s=1e-5)
            solved = solve(network, "all_reduce", numel).program
            inputs = [random.standard_normal(numel).astype(np.float32) for _ in cards]
            results = interpret(solved, inputs)
            for result in results[1:]:
                assert result is not None
                assert results[0] is not None
                assert result.tobytes() == results[0].tobytes()


def test_files_and_text(tmp_path: Path):
    solved = solve(Network.of_cards([1e9] * 3), "all_gather", 10).program
    solved.save(tmp_path / "p.json")
    assert MessageProgram.load(tmp_path / "p.json") == solved
    assert "chunk 1: elements" in str(solved)
    assert str(Instruction("reduce", 3, 4, 6)) == "reduce 4:6 <- 3"
    data = json.loads((tmp_path / "p.json").read_text())
    data["ranks"][0][0] = "send x -> 1"
    with pytest.raises(ProgramError, match="'send x -> 1'"):
        MessageProgram.from_json(data)
    del data["ranks"]
    with pytest.raises(ProgramError, match="'ranks' is missing"):
        MessageProgram.from_json(data)
    with pytest.raises(ProgramError, match="version 9"):
        MessageProgram.from_json({"version": 9})
    with pytest.raises(ProgramError, match="there is no program"):
        MessageProgram.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "message", "place"),
    [
        ({"numel": math.inf}, "inf, must be a whole number", "p.json (numel)"),
        ({"num_ranks": "3"}, "'3', must be a whole number", "p.json (num_ranks)"),
        ({"window": True}, "True, must be a whole number", "p.json (window)"),
        ({"version": True}, "version True", "p.json"),
        ({"root": 7}, "all_reduce of 3 ranks with root 7", "p.json"),
        ({"operation": "allreduce"}, "did you mean 'all_reduce'", "p.json"),
        ({"counts": 4}, "4, must be a list", "p.json (counts)"),
        ({"windw": 3}, "unknown field 'windw'; did you mean 'window'?", "p.json"),
        ({"chunks": [[0, 10, 1]]}, "3 numbers", "p.json (chunks[0])"),
        ({"chunks": [[0, None]]}, "must be a whole number", "p.json (chunks[0][1])"),
        ({"chunks": []}, "0 chunks, 3 ranks", "p.json (rank 0, instruction 0)"),
        ({"ranks": {}}, "must be a list", "p.json (ranks)"),
        ({"ranks": [[5], [], []]}, "5, must be text", "p.json (ranks[0][0])"),
        ({"ranks": [[], ["sned 0 -> 1"], []]}, "'sned 0 -> 1'", "p.json (ranks[1][0])"),
    ],
)
def test_mistakes_in_a_file_are_reported_with_their_place(change, message, place):
    data = solve(Network.of_cards([1e9] * 3), "all_reduce", 10).program.to_json()
    with pytest.raises(ProgramError, match=re.escape(message)) as error:
        MessageProgram.from_json({**data, **change}, "p.json")
    assert place in (error.value.where or "")


def test_a_message_that_is_never_sent_is_not_a_deadlock():
    correct = solve(Network.of_cards([1e9] * 2), "broadcast", 10).program
    with pytest.raises(ProgramError, match="rank 0 sends nothing more to rank 1"):
        check(replace(correct, instructions=((), correct.instructions[1])))
    twice = correct.instructions[0] * (correct.window + 2)
    with pytest.raises(ProgramError, match="rank 1 never receives this"):
        check(replace(correct, instructions=(twice, correct.instructions[1])))


def test_pictures_show_the_trees():
    network = Network.of_cards([8e8, 8e8, 8e8, 2e8])
    solved = solve(network, "all_reduce", 1_000_000).program
    text = trees_text(solved)
    assert "sums, towards rank" in text
    assert "└<- 3" in text  # the slow rank is a leaf
    drawing = svg(solved)
    assert drawing.startswith("<svg")
    assert drawing.count("<line") >= 6
    small = solve(network, "all_reduce", 1).program
    assert trees_text(small)
