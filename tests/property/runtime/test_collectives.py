"""Every redistribution equals the dense oracle, forward and backward, on threads."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.splits import Of, full_length
from shardwise.runtime.transport.threads import ThreadTransport, run_threads
from tests.support.redistribution import FORWARD, Case, check
from tests.support.tiers import thinned

segment = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 2))
cut: st.SearchStrategy[Of] = st.integers(1, 7) | st.lists(segment, min_size=1, max_size=2).map(
    tuple
)


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    dim, to_dim = draw(st.sampled_from([(0, 1), (1, 0), (2, 0), (0, 2), (1, 1)]))
    if name != "all_to_all" or dim != to_dim:
        of, to_of = draw(cut), draw(cut)
    else:
        outer, size, inner = draw(segment)
        of, to_of = ((outer, size, inner),), outer * size * inner
        if draw(st.booleans()):
            of, to_of = to_of, of
    shape = [2, 3, 2]
    shape[to_dim] = full_length(to_of)
    shape[dim] = full_length(of)
    return Case(name=name, shape=tuple(shape), dim=dim, of=of, to_dim=to_dim, to_of=to_of)


GRID = [(name, size) for name in FORWARD for size in (2, 3, 5)]


@pytest.mark.parametrize(("name", "size"), thinned(GRID, lambda i, _: i % 3 == i // 3 % 3))
def test_redistribution_equals_the_dense_oracle(name: str, size: int) -> None:
    @settings(max_examples=25, deadline=None)
    @given(cases(name))
    def run(case: Case) -> None:
        def on_rank(rank: int, transport: ThreadTransport) -> None:
            check(case, ProcessMesh({"tp": size}, rank, transport).axis("tp"))

        run_threads(size, on_rank, timeout_s=20)

    run()
