"""The simulator predicts as many messages of parameters and gradients as the runtime sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.api.memory import SingleRank
from shardwise.runtime.grad_sync import Reduction
from shardwise.runtime.parameters import FlatGroup
from shardwise.simulation import Evaluator
from shardwise.simulation.estimate import execution_of, workloads_of
from tests.support.tiers import thinned

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(y) * self.gate(x).sigmoid()


class Tower(nn.Module):
    """Parameters above and below every size limit, in blocks and outside of them."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)), y)


def tower(layers: int, width: int, words: int) -> sw.Graph:
    batch = {name: torch.zeros(8, dtype=torch.long) for name in "xy"}
    return sw.capture(Tower(layers, width, words), batch)


def simulated(graph: sw.Graph, plan: sw.Plan, cluster: sw.Cluster) -> Counter[str]:
    """Count the messages of a step's last backward and of its optimizer, by purpose."""
    fold, workloads = workloads_of(graph, plan)
    execution = execution_of(plan, fold)
    layers = Evaluator(fold, cluster).group_layers(workloads, execution, 0)[0]
    counts: Counter[str] = Counter()
    for traffic in layers.sent(0, fold.size, execution):
        counts[traffic.purpose] += round(float(traffic.messages.sum()))
    return counts


def sent(graph: sw.Graph, plan: sw.Plan, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the messages of rank 0's second step, by purpose."""
    counts: Counter[str] = Counter()
    gather, launch = FlatGroup.gather, Reduction.launch

    def counted_gather(group: FlatGroup) -> object:
        counts["gather" if group.zero == 3 else "update"] += 1
        return gather(group)

    def counted_launch(reduction: Reduction) -> None:
        counts["reduce"] += reduction.axis.size > 1
        launch(reduction)

    patch.setattr(FlatGroup, "gather", counted_gather)
    patch.setattr(Reduction, "launch", counted_launch)
    single_rank = SingleRank(sw.compile(graph, plan), 0, torch.device("cpu"))
    batch = {
        name: torch.zeros(kind.shape, dtype=kind.dtype)
        for name, kind in single_rank.batch_types().items()
    }
    optimizer = sw.optimizer(single_rank.module, torch.optim.SGD, lr=0.0)
    for _ in range(2):
        counts.clear()
        single_rank.module.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
    return counts


SIZES = [
    (3, 256, 300),  # all small: one matrix of a block is 1 MiB
    (5, 528, 2100),  # matrices of 1.06 and 4.3 MiB, and a head of 4.2 that comes first
]
GRID = [(*sizes, zero) for sizes in SIZES for zero in range(4)]


@pytest.mark.parametrize(
    ("layers", "width", "words", "zero"), thinned(GRID, lambda i, case: i in (1, 3, 4, 6))
)
def test_message_counts_match_the_runtime(
    zero: int, layers: int, width: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, cluster = tower(layers, width, words), sw.Cluster.local(2)
    plan = getattr(sw.strategies, STRATEGIES[zero])(graph, cluster)
    assert {parameter.zero for parameter in plan.parameters.values()} == {zero}
    predicted, actual = simulated(graph, plan, cluster), sent(graph, plan, monkeypatch)
    assert predicted["reduce"] == actual["reduce"]
    assert predicted["update"] == actual["update"]
    assert 2 * predicted["gather"] + predicted["root"] == actual["gather"]  # again in backward


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_the_size_of_messages_suits_the_links(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model sends fewer, larger messages over links with a larger latency per byte."""
    graph, counts = tower(3, 256, 2100), []
    for gbit_per_s, latency_us, size in ((1, 50, 1), (200, 1000, 32)):
        cluster = sw.Cluster.preset(
            "cpu",
            nodes=2,
            devices_per_node=1,
            nic_gbit_per_s=gbit_per_s,
            network_latency_us=latency_us,
        )
        plan = getattr(sw.strategies, STRATEGIES[zero])(graph, cluster)
        assert plan.bucket_mib == size
        predicted, actual = simulated(graph, plan, cluster), sent(graph, plan, monkeypatch)
        monkeypatch.undo()
        assert predicted["reduce"] == actual["reduce"]
        assert 2 * predicted["gather"] + predicted["root"] == actual["gather"]
        counts.append(actual)
    small, large = counts
    assert large["reduce"] == (4 if zero == 3 else 1) < small["reduce"]
    if zero == 3:  # each block in one message forward and one backward, the rest in one
        assert large["gather"] == 2 * 3 + 1 < small["gather"]


def test_the_size_of_messages_is_in_the_plan_and_in_the_code(tmp_path: Path) -> None:
    graph = tower(1, 64, 50)
    plan = sw.strategies.ddp(graph, sw.Cluster.local(2)).with_(bucket_mib=16)
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded.bucket_mib == 16
    program = sw.compile(graph, loaded)
    assert "\nBUCKET_BYTES = 16 << 20" in program.source(0)
    store = SingleRank(program, 0, torch.device("cpu")).store
    assert {entry.spec.bucket for entry in store.entries} == {16 << 20}
    assert sw.strategies.tensor(graph, sw.Cluster.local(2)).bucket_mib == 0  # no gradient is summed
    with pytest.raises(sw.errors.PlanError, match="bucket_mib"):
        sw.Plan.from_json({**plan.to_json(), "bucket_mib": -1})


class Mixed(nn.Module):
    """Parameters of two dtypes, and a block without parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        kinds = (torch.bfloat16, torch.float64)
        self.blocks = nn.ModuleList(
            [nn.Linear(width, width, dtype=kinds[0]), nn.Softplus(), nn.Softplus()]
        )
        self.head = nn.Linear(width, 3 * width, dtype=kinds[1])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.double()).square().mean()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_count_with_the_size_of_their_own_dtype(zero: int) -> None:
    model, cluster = Mixed(64), sw.Cluster.local(2)
    graph = sw.capture(model, {"x": torch.zeros(8, 64, dtype=torch.bfloat16)})
    plan = getattr(sw.strategies, STRATEGIES[zero])(graph, cluster)
    fold, workloads = workloads_of(graph, plan)
    execution = execution_of(plan, fold)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    use = sw.simulate(graph, plan, cluster).memory[0]
    assert use.parts["optimizer"] == 2 * parameter_bytes / (2 if zero else 1)
    for config in (execution, replace(execution, whole_units=True)):
        layers = Evaluator(fold, cluster).group_layers(workloads, config, 0)[0]
        sent = [s for s in layers.sent(0, fold.size, config) if s.purpose != "update"]
        assert sum(float(s.num_bytes.sum()) for s in sent) == parameter_bytes * (
            2 if zero == 3 else 1
        )
