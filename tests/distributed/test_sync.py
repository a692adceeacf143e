"""Every exact form of synchronization computes what one process computes."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cost.sync import step_rows, sync_messages
from shardwise.plans import ParameterEntry
from shardwise.plans.sync import applied_sync, operator_uses
from shardwise.simulation.stages import Layers
from tests.support.inexact import FORMS as INEXACT
from tests.support.sync_model import assert_equal, make_model, make_plan, reference, train

pytestmark = pytest.mark.distributed


def owners(ranks: int) -> tuple[int, ...]:
    """Return unequal weights, one of which is zero."""
    return tuple(3 * rank % 5 for rank in range(ranks))


def forms(ranks: int) -> dict[str, dict[str, Any]]:
    last = ranks - 1
    tables = sw.Sync(kind="partitioned", dim=0, owners=owners(ranks), sparse="rows")
    return {
        "owner": {"*": sw.Sync(kind="owner", owner=last)},
        "partitioned": {"*": sw.Sync(kind="partitioned", owners=owners(ranks))},
        "dims": {
            "up.*": sw.Sync(kind="partitioned", dim=0),
            "down.*": sw.Sync(kind="partitioned", dim=1, owners=owners(ranks)),
            "words.*": sw.Sync(kind="partitioned", dim=1, host=True),
        },
        "sparse gather": {
            "words.*": sw.Sync(sparse="gather"),
            "places.*": sw.Sync(sparse="gather"),
        },
        "sparse rows": {"words.*": tables, "places.*": tables},
        "sparse owner": {"words.*": sw.Sync(kind="owner", owner=0, sparse="rows")},
        "factors": {"*": sw.Sync(factors=True)},
        "buckets": {"*": sw.Sync(bucket_mib=0.0005, chunk=2)},
        "mixed": {
            "words.*": tables,
            "up.*": sw.Sync(kind="owner", owner=last, host=True),
            "down.*": sw.Sync(factors=True),
        },
    }


FORMS = list(forms(2))
QUICK = {("diloco_int8", 2), ("powersgd", 2)}


@pytest.mark.parametrize("form", FORMS)
def test_equals_one_process(pool: Any, form: str) -> None:
    for result in pool(2).run(train, forms(2)[form]):
        assert_equal(result, reference("adamw"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4, 5])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "adagrad"])
@pytest.mark.parametrize("form", FORMS)
def test_equals_one_process_everywhere(
    pool: Any, form: str, optimizer: str, ranks: int, tmp_path: Path
) -> None:
    """With clipping, micro-batches and a checkpoint in between."""
    options = {"num_microbatches": 2} if optimizer in ("sgd", "adagrad") else {}
    saved = str(tmp_path / "step") if optimizer != "sgd" else ""
    results = pool(ranks).run(
        train, forms(ranks)[form], optimizer, 0.3, saved, optimizer == "sgd", **options
    )
    for result in results:
        assert_equal(result, reference(optimizer, clip=0.3))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4])
def test_hierarchical(pool: Any, ranks: int) -> None:
    for result in pool(ranks).run(train, {"*": sw.Sync(hierarchical=2)}):
        assert_equal(result, reference("adamw"))


CAUSES = ("gradients", "update", "rounds", "parameters")


def counted_bytes(
    entries: dict[str, Any], skipped: int = 1, steps: int = 1, zero: int = 0
) -> dict[tuple[str, str], float]:
    """Return the mean bytes of some steps' messages by cause and operation, on rank 0."""
    ranks = torch.distributed.get_world_size()
    model, batch = make_model(), distinct_batch()
    plan = make_plan(sw.capture(model, batch), ranks, entries, zero=zero)
    pm = sw.parallelize(model, batch, plan, record=True)
    opt = sw.optimizer(pm, torch.optim.SGD, lr=0.1)
    for number in range(skipped + steps):  # the first step also agrees on the order of gradients
        if number == skipped:
            wait_for_messages(pm)
            pm.trace()
        pm.train_step(batch)
        opt.step()
    wait_for_messages(pm)
    trace = pm.trace()
    totals: Counter[tuple[str, str]] = Counter()
    for event in [] if trace is None else trace["traceEvents"]:
        args = event.get("args", {})
        if "bytes" in args and event["name"] in CAUSES:
            parts = 1 if args["op"] == "all_gather" else ranks  # else each rank has all of it
            totals[event["name"], args["op"]] += args["bytes"] / parts / steps
    return dict(totals)


def wait_for_messages(pm: Any) -> None:
    """Complete messages that later steps would wait for: they are recorded when they end."""
    state = pm.store.reducer.state
    for pending in (*(sent.mean for sent in state.sent.values()), *chain(*state.late.values())):
        pending.wait()


def distinct_batch() -> dict[str, torch.Tensor]:
    return {"x": torch.arange(16).view(8, 2) + 3, "y": torch.arange(16).view(8, 2) % 7}


def predicted_bytes(
    graph: sw.Graph, ranks: int, entries: dict[str, Any]
) -> Counter[tuple[str, str]]:
    """Return the bytes of a step's messages by cause and operation, as the plan predicts them."""
    rows, uses, plan = step_rows(graph), operator_uses(graph), make_plan(graph, ranks, entries)
    predicted: Counter[tuple[str, str]] = Counter()
    for parameter in graph.parameters:
        form = applied_sync(graph, parameter, plan.entry(parameter.name).sync, uses)
        shape, used = graph.values[parameter.value].shape, rows.get(parameter.value, 0)
        for m in sync_messages(form, shape, 8, 8, used, ranks):
            cause = "gradients" if m.purpose == "reduce" else "update"
            cause = "rounds" if form.every > 1 else cause
            nodes = ranks // m.level if m.level > 0 and m.op == "all_gather" else 1
            predicted[cause, m.op] += m.num_bytes * nodes / m.steps
    return predicted


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_counted_bytes_equal_the_prediction(pool: Any, ranks: int) -> None:
    graph = sw.capture(make_model(), distinct_batch())
    every = forms(ranks) | ({"hierarchical": {"*": sw.Sync(hierarchical=2)}} if ranks == 4 else {})
    for name, entries in every.items():
        if name == "sparse gather":
            entries = {"words.*": entries["words.*"]}  # places occur several times
        if name == "sparse rows":
            entries = {"words.*": entries["words.*"]}
        predicted = predicted_bytes(graph, ranks, entries)
        counted = pool(ranks).run(counted_bytes, entries)[0]
        assert counted == pytest.approx({k: v for k, v in predicted.items() if v}), name


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        pytest.param(form, ranks, marks=[] if (form, ranks) in QUICK else pytest.mark.slow)
        for form in INEXACT
        for ranks in (2, 3)
    ],
)
def test_counted_bytes_of_inexact_forms(pool: Any, form: str, ranks: int) -> None:
    """The mean of a full round, after the sums that are not compressed."""
    sync, graph = INEXACT[form], sw.capture(make_model(), distinct_batch())
    predicted = predicted_bytes(graph, ranks, {"*": sync})
    warmup = 1 if sync.compression is None else 1 + sync.compression.warmup
    counted = pool(ranks).run(counted_bytes, {"*": sync}, warmup * sync.every, sync.every)[0]
    assert counted == pytest.approx(dict(predicted))


PLAIN: dict[str, tuple[dict[str, Any], int]] = {
    "bfloat16": ({"*": sw.Sync(dtype="bfloat16"), "up.*": sw.Sync(hierarchical=2)}, 0),
    "zero 1": ({}, 1),
    "zero 2": ({"*": sw.Sync(dtype="float32")}, 2),
    "zero 3": ({}, 3),
    "sharded": ({"up.*": {"zero": 3}, "words.*": {"zero": 2}, "down.*": {"zero": 1}}, 0),
}
PURPOSES = {"reduce": "gradients", "root": "parameters", "gather": "parameters"}


@pytest.mark.slow
@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("ranks", [2, 4])
def test_counted_bytes_of_buckets_and_zero(
    pool: Any, monkeypatch: pytest.MonkeyPatch, form: str, ranks: int
) -> None:
    """The simulator's messages are those that ranks send."""
    (entries, zero), graph = PLAIN[form], sw.capture(make_model(), distinct_batch())
    if ranks == 2:
        entries = {glob: entry for glob, entry in entries.items() if glob != "up.*"}
    predicted: Counter[tuple[str, str]] = Counter()

    def recorded(layers: Any, *stage: Any) -> Any:
        predicted.clear()
        for kind in (traffic := sent(layers, *stage)):
            nodes = ranks // kind.level if kind.level > 0 and kind.op == "all_gather" else 1
            cause = PURPOSES.get(kind.purpose, kind.purpose)
            predicted[cause, kind.op] += float(kind.num_bytes.sum()) * nodes
        return traffic

    sent = Layers.sent
    monkeypatch.setattr(Layers, "sent", recorded)
    sw.simulate(graph, make_plan(graph, ranks, entries, zero=zero), sw.Cluster.local(ranks))
    counted = pool(ranks).run(counted_bytes, entries, zero=zero)[0]
    assert counted == pytest.approx({k: v for k, v in predicted.items() if v})


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(101, 6, sparse=True), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.table(x).mean(1)), y)


class Bags(Table):
    """Bags of several lengths, the second of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(101, 6, sparse=True)  # type: ignore[assignment]

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.cross_entropy(self.out(self.table(x, offsets)), y)


def train_rows(strategy: str, ranges: bool = False) -> tuple[float, int]:
    """Train with SparseAdam next to one process; return the difference and the rows of a rank."""
    torch.manual_seed(0)
    kind = Bags if ranges else Table
    model, single = kind().double(), kind().double()
    single.load_state_dict(model.state_dict())
    batch = {"x": torch.randint(0, 101, (12, 3)), "y": torch.randint(0, 4, (12,))}
    if ranges:
        offsets = torch.tensor([0, 2, 2, 7, 9, 10, 16])
        batch = {"x": batch["x"].view(-1), "y": batch["y"][:7], "offsets": offsets}
    graph, cluster = sw.capture(model, batch), sw.Cluster.local(torch.distributed.get_world_size())
    entry = ParameterEntry(layout={"tp": "0"}, sync=sw.Sync(sparse="gather"))
    if strategy == "parallax":
        plan = sw.strategies.parallax(graph, cluster)
    else:
        plan = sw.strategies.tensor(graph, cluster, constraints={"table.weight": entry})
    pm = sw.parallelize(model, batch, plan)
    optimizers = [
        sw.optimizer(pm, torch.optim.SparseAdam, params="table.*", lr=0.1),
        sw.optimizer(pm, torch.optim.SGD, params="out.*", lr=0.1),
        torch.optim.SparseAdam(list(single.table.parameters()), lr=0.1),
        torch.optim.SGD(single.out.parameters(), lr=0.1),
    ]
    for _ in range(3):
        pm.train_step(batch)
        single(**batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = pm.gather_state_dict()
    apart = max(float((state[n] - v).abs().max()) for n, v in single.state_dict().items())
    return apart, len(pm.store.entry("table.weight").piece)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parallax", "tensor"])
@pytest.mark.parametrize("ranges", [False, True])
def test_rows_of_tables_with_sparse_adam(pool: Any, strategy: str, ranges: bool) -> None:
    for apart, rows in pool(3).run(train_rows, strategy, ranges):
        assert apart < 1e-12
        assert rows in (33, 34)


class RowAdagrad(torch.optim.Optimizer):
    """Adagrad with one number of state for each row of a table, as DLRM trains with."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.coalesce() if p.grad.is_sparse else p.grad.to_sparse(1)
                at, rows = grad.indices()[0], grad.values()
                sums = self.state[p].setdefault("sum", p.new_zeros(len(p)))
                sums[at] += rows.square().mean(1)
                p[at] -= group["lr"] * rows / (sums[at].sqrt() + 1e-8).unsqueeze(1)


def row_plan(graph: sw.Graph, form: str, ranks: int) -> sw.Plan:
    """Return a plan in which the state of rows is replicated, partitioned, or of replicas."""
    cluster = sw.Cluster.local(ranks)
    if form == "tensor":
        entry = ParameterEntry(layout={"tp": "0"}, sync=sw.Sync(sparse="gather"))
        return sw.strategies.tensor(graph, cluster, constraints={"table.*": entry})
    syncs = {
        "rows": sw.Sync(
            kind="partitioned", dim=0, sparse="rows", owners=owners(ranks) if ranks > 1 else ()
        ),
        "dense": sw.Sync(kind="partitioned", dim=0),
        "owner": sw.Sync(kind="owner", owner=ranks - 1, sparse="rows"),
        "gather": sw.Sync(sparse="gather"),
        "local": sw.Sync(every=3),
    }
    return sw.strategies.ddp(graph, cluster, constraints={"table.*": syncs[form]})


def train_by_row(folder: str, form: str, steps: range) -> tuple[Any, Any, Any]:
    """Train, from a checkpoint unless at the first step; return weights, state and replica."""
    torch.manual_seed(0)
    model, ranks = Bags().double(), torch.distributed.get_world_size()
    batches = [
        {"x": torch.randint(0, 101, (12, 3)), "y": torch.randint(0, 4, (12,))} for _ in range(6)
    ]
    pm = sw.parallelize(model, batches[0], row_plan(sw.capture(model, batches[0]), form, ranks))
    opt = sw.optimizer(pm, RowAdagrad, params="table.*", rowwise=True, lr=0.1)
    if steps.start:
        sw.load_checkpoint(folder, pm, opt)
    for step in steps:
        pm.train_step(batches[step])
        opt.step()
        pm.zero_grad()
    if not steps.start:
        sw.save_checkpoint(folder, pm, opt, step=steps.stop)
    entry = pm.store.entry("table.weight")
    state = opt.state_dict()["state"]["table.weight"]["sum"]
    return pm.gather_state_dict(), state, (entry.piece.detach(), opt.state[entry.piece]["sum"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "dense", "owner", "gather", "tensor"])
def test_state_of_rows_is_sharded_like_the_rows(pool: Any, tmp_path: Path, form: str) -> None:
    """It continues on other ranks and under other plans."""
    folder = str(tmp_path / "c")
    expected = pool(1).run(train_by_row, str(tmp_path / "one"), "gather", range(6))[0]
    for _, state, (piece, own) in pool(3).run(train_by_row, folder, form, range(3)):
        assert state.shape == (101,)
        assert own.shape == piece.shape[:1]
        assert form in ("gather", "owner") or len(piece) < 101
    for ranks, other in ((3, form), (2, "tensor"), (4, "rows"), (2, "gather")):
        for weights, state, _ in pool(ranks).run(train_by_row, folder, other, range(3, 6)):
            torch.testing.assert_close(weights, expected[0])
            torch.testing.assert_close(state, expected[1])


@pytest.mark.slow
def test_state_of_rows_of_replicas_continues(pool: Any, tmp_path: Path) -> None:
    straight = pool(3).run(train_by_row, str(tmp_path / "straight"), "local", range(6))
    pool(3).run(train_by_row, str(tmp_path / "c"), "local", range(2))
    continued = pool(3).run(train_by_row, str(tmp_path / "c"), "local", range(2, 6))
    for (_, _, expected), (_, _, actual) in zip(straight, continued, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
