from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.collectives import OPERATIONS, Network, Send, Solution, solve
from shardwise.collectives.messages import MessageProgram
from shardwise.collectives.messages.check import check, interpret
from shardwise.collectives.solver.classical import ring
from shardwise.collectives.solver.spec import demand_of
from shardwise.collectives.solver.trees import load_time
from shardwise.errors import ClusterError

DTYPES = ("float16", "float32", "float64", "int32", "int64", "uint8")
rates = st.sampled_from([1.0, 1.0, 2.0, 2.5, 7.0, 40.0]).map(lambda x: x * 1e8)
latencies = st.sampled_from([0.0, 1e-6, 5e-5])


@st.composite
def networks(draw: st.DrawFn, max_ranks: int = 9) -> Network:
    """Draw cards behind a trunk or a bus, or direct links of which some are missing."""
    count = draw(st.integers(2, max_ranks))
    kind = draw(st.sampled_from(["cards", "links", "trunk", "bus", "some links"]))
    names = [str(i) for i in range(count)]
    pairs = list(itertools.permutations(range(count), 2))
    if kind == "some links":
        ring_links = {(i, (i + 1) % count) for i in range(count)}
        more = draw(st.lists(st.sampled_from(pairs), max_size=2 * count))
        pairs = sorted(ring_links | set(more))
    capacities: dict[str, float] = {}
    sends = {}
    cards = [draw(rates) for _ in names]
    side = [draw(st.booleans()) for _ in names]
    for a, b in pairs:
        used = []
        if kind in ("links", "some links"):
            used = [f"link {a} {b}"]
            capacities[used[0]] = draw(rates)
        else:
            used = [f"out {a}", f"in {b}"]
            capacities |= {used[0]: cards[a], used[1]: cards[b]}
        if kind == "trunk" and side[a] != side[b]:
            used.append(f"trunk {side[a]}")
            capacities[used[-1]] = 2e8
        if kind == "bus":
            used.append("bus")
            capacities["bus"] = 3e8
        sends[names[a], names[b]] = Send(resources=tuple(used), latency_s=draw(latencies))
    return Network.of(names, capacities, sends, message_s=draw(latencies))


def expected_result(
    program: MessageProgram, inputs: list[np.ndarray], rank: int
) -> np.ndarray | None:
    operation = program.operation
    if operation in ("all_reduce", "reduce", "reduce_scatter"):
        total = sum(x.astype(np.float64) for x in inputs)
        if operation == "reduce_scatter":
            first = program.offsets[rank]
            return total[first : first + program.counts[rank]]
        return total if operation == "all_reduce" or rank == program.root else None
    if operation == "all_gather":
        return np.concatenate(inputs)
    if operation == "broadcast":
        return inputs[program.root]
    first, count = program.offsets[rank], program.counts[rank]
    return np.concatenate([x[first : first + count] for x in inputs])


def check_results(solution: Solution, dtype: str, seed: int) -> None:
    program = solution.program
    random = np.random.default_rng(seed)
    sizes = program.counts if program.operation == "all_gather" else ()
    # Small integers: every sum is exact in every dtype.
    inputs = [
        random.integers(0, 5, size=sizes[r] if sizes else program.numel).astype(dtype)
        for r in range(program.num_ranks)
    ]
    facts = check(program)
    results = interpret(program, inputs)
    for rank, result in enumerate(results):
        expected = expected_result(program, inputs, rank)
        if expected is None:
            assert result is None
        else:
            assert result is not None
            np.testing.assert_array_equal(result, expected.astype(dtype))
    assert facts.scratch_elements <= program.numel * program.num_ranks * program.window
    assert MessageProgram.from_json(program.to_json()) == program


@st.composite
def cases(draw: st.DrawFn) -> tuple[Network, str, int, str, int | None, list[int] | None]:
    """Draw a network, an operation, its number of elements, dtype, root and counts."""
    network, operation = draw(networks()), draw(st.sampled_from(OPERATIONS))
    numel = draw(st.sampled_from([0, 1, 2, 3, 7, 64, 1001, 40_003, 1_000_003]))
    count = network.num_ranks
    root = draw(st.integers(0, count - 1)) if operation in ("broadcast", "reduce") else None
    counts = None
    if operation in ("reduce_scatter", "all_gather") and draw(st.booleans()):
        counts = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        numel = sum(counts)
    return network, operation, numel, draw(st.sampled_from(DTYPES)), root, counts


def check_program(case: tuple, seed: int) -> None:
    network, operation, numel, dtype, root, counts = case
    item = np.dtype(dtype).itemsize
    solution = solve(network, operation, numel, item_bytes=item, root=root, counts=counts)
    check_results(solution, dtype, seed)
    assert solution.cut_bound_s <= solution.lp_bound_s * (1 + 1e-6) + 1e-15
    assert solution.lp_bound_s <= solution.bandwidth_s * (1 + 1e-6) + 1e-15
    assert solution.bandwidth_s <= solution.predicted_s * (1 + 1e-6) + 1e-15
    text = str(solution)
    if solution.gap == math.inf:
        assert 0 < numel < network.num_ranks
        assert "not proved optimal: there is no bound" in text
    elif not solution.proved:
        assert f"not proved optimal: {solution.gap:.2%} above the bound" in text
    elif solution.cut_bound_s < solution.lp_bound_s * (1 - 1e-4):
        assert "the bound by cuts is" in text


def check_rings(network: Network, operation: str) -> None:
    demand = demand_of(network, operation)
    solution = solve(network, operation, 4_000_000)
    for order in itertools.permutations(range(1, network.num_ranks)):
        trees = ring(network, demand, (0, *order))
        if trees is not None:
            time = load_time(network, trees) * solution.num_bytes
            assert solution.lp_bound_s <= time * (1 + 1e-6)
            # The ring's bytes alone; its latencies would come on top of it.
            assert solution.bandwidth_s <= time * (1 + 2e-3)


def check_cuts(network: Network, operation: str) -> None:
    solution = solve(network, operation, 1_000_000)
    assert solution.cut_bound_s == pytest.approx(solution.lp_bound_s, rel=1e-4)


tree_operations = st.sampled_from(OPERATIONS)


@settings(max_examples=25, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_programs_compute_their_operation(case, seed):
    check_program(case, seed)


@settings(max_examples=10, deadline=None)
@given(network=networks(max_ranks=6), operation=tree_operations)
def test_no_ring_is_faster_than_the_solution(network, operation):
    check_rings(network, operation)


@settings(max_examples=10, deadline=None)
@given(network=networks(max_ranks=5), operation=tree_operations)
def test_the_bound_by_all_cuts_equals_the_bound_by_trees(network, operation):
    check_cuts(network, operation)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=600, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_many_programs(case, seed):
    check_program(case, seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=200, deadline=None)
@given(networks(max_ranks=6), networks(max_ranks=5), tree_operations)
def test_many_rings_and_cuts(network, small, operation):
    check_rings(network, operation)
    check_cuts(small, operation)


@settings(max_examples=10, deadline=None)
@given(network=networks(max_ranks=6), data=st.data())
def test_unreachable_ranks_are_named(network, data):
    unreachable = data.draw(st.integers(0, network.num_ranks - 1))
    remaining = [
        (network.names[a], network.names[b])
        for a, b in zip(network.source.tolist(), network.target.tolist(), strict=True)
        if b != unreachable
    ]
    assume(remaining)
    broken = Network.of(
        list(network.names), {"link": 1e9}, {pair: Send(resources=("link",)) for pair in remaining}
    )
    with pytest.raises(ClusterError, match=f"rank {unreachable} cannot be reached from rank"):
        solve(broken, "all_reduce", 100)
