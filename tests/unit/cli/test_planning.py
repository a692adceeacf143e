"""The verbs plan, explain, simulate and advise on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import cli
from shardwise.cli import planning
from shardwise.cli.options import parse_constraints
from shardwise.cli.report import chart
from shardwise.cluster.presets import parse_cluster, preset_of_size
from shardwise.errors import ClusterError
from shardwise.formatting import Column, table
from tests.support.command_line import run, unwrapped
from tests.support.searches import unpolished

SOURCE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
        self.head = torch.nn.Linear(32, 64)

    def forward(self, ids, labels):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x).relu()
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build():
    ids = torch.randint(0, 64, (8, 16))
    return Net(), {"ids": ids, "labels": ids}


def other():
    return torch.nn.Linear(8, 3), (torch.randn(4, 8),), lambda out, batch: out.sum()
"""


@pytest.fixture(scope="module", autouse=True)
def _quick_searches() -> Iterator[None]:
    with unpolished():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planning")
    (folder / "net.py").write_text(SOURCE)
    sw.Cluster.preset("h100", devices_per_node=4).save(folder / "c.yaml")
    return folder


@pytest.fixture
def target(folder: Path) -> str:
    return f"{folder / 'net.py'}:build"


@pytest.fixture(scope="module")
def plan_file(folder: Path) -> Path:
    loaded = cli.load_target(f"{folder / 'net.py'}:build")
    graph = sw.capture(loaded.model, loaded.batch)
    path = folder / "plan.json"
    sw.plan(graph, sw.Cluster.load(folder / "c.yaml"), progress=False, pp=2, all_devices=True).save(
        path
    )
    return path


def test_plan_searches_for_a_cluster(
    capsys: pytest.CaptureFixture[str], folder: Path, target: str
) -> None:
    path = folder / "new" / "plan.json"
    code, out, err = run(
        capsys, "plan", target, "--cluster", str(folder / "c.yaml"), "-o", str(path),
        "--precision", "bf16", "--zero", "1", "--constraint", "head.weight=0", "--no-progress",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "Net on h100-4, 4 ranks"
    for words in ("samples/s", "tokens/s", "free", "runners-up", "fixed", "simulated"):
        assert words in out
    plan = sw.Plan.load(path)
    assert plan.precision.compute == "bfloat16"
    assert plan.search.fixed == {"zero": 1, "constraints": {"head.weight": "0"}}
    assert plan.num_ranks == 4
    assert {entry.zero for entry in plan.parameters.values()} == {1}


def test_a_named_strategy_uses_all_ranks_of_the_cluster(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, out, _ = run(capsys, "plan", target, "-c", "h100:2x3", "-s", "ddp", "--json")
    assert code == 0
    assert json.loads(out)["mesh"] == {"dp": 6}


def test_explain_needs_only_the_plan_file(
    capsys: pytest.CaptureFixture[str], plan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_capture", None)
    code, out, err = run(capsys, "explain", str(plan_file))
    assert (code, err) == (0, "")
    for words in ("why not", "time by cause", "memory by cause", "by layer", "what would change"):
        assert words in out
    code, out, _ = run(capsys, "explain", str(plan_file), "--json")
    data = json.loads(out)
    assert code == 0
    differences = data["runners_up"][0]["differences"]
    assert sum(differences["causes_s"].values()) == pytest.approx(
        differences["step_time_s"], rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("verb", ["explain", "simulate"])
def test_text_fits_the_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plan_file: Path,
    verb: str,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run(capsys, verb, str(plan_file))
    assert code == 0
    assert max(map(len, out.splitlines())) <= columns


def test_simulate_replays_the_search_or_simulates_again(
    capsys: pytest.CaptureFixture[str], folder: Path, target: str, plan_file: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "traces" / "t.json"
    code, out, _ = run(capsys, "simulate", str(plan_file), "--perfetto", str(trace), "--json")
    assert code == 0
    replayed = json.loads(out)
    code, out, _ = run(
        capsys, "simulate", str(plan_file), target, "-c", str(folder / "c.yaml"), "--json"
    )
    assert code == 0
    assert json.loads(out)["step_time_s"] == pytest.approx(replayed["step_time_s"], rel=0.2)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"ranks 0-1", "ranks 2-3"}
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "communication", "communication in actions", "messages"}
    sampled = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    for row in replayed["memory"]:
        assert max(row["over_time_bytes"]) == pytest.approx(row["peak_bytes"], rel=1e-3)
    assert max(sampled) == max(max(row["over_time_bytes"]) for row in replayed["memory"])
    ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    assert max(ends) == pytest.approx(replayed["step_time_s"] * 1e6, rel=1e-9)


def test_an_infeasible_plan_has_figures_and_exits_with_3(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    arguments = ("plan", target, "-c", "h100:1x2", "--memory-gib", "0.00001", "--json")
    code, out, err = run(capsys, *arguments)
    assert code == 3
    assert "too much" in err
    assert "would fit" in err
    data = json.loads(out)
    assert data["excess_bytes"] > 0
    assert {"change", "kind", "step_time_s", "peak_bytes"} <= set(data["changes"][0])


def test_advise_sorts_clusters_and_marks_the_fastest_and_cheapest(
    capsys: pytest.CaptureFixture[str], target: str
) -> None:
    code, out, _ = run(
        capsys, "advise", target, "--devices", "h100,a100-80", "--counts", "1,2", "--json"
    )
    assert code == 0
    data = json.loads(out)
    times = [row["step_time_s"] for row in data["rows"]]
    assert times == sorted(times)
    assert data["fastest"] == data["rows"][0]["cluster"]
    costs = {row["cluster"]: row["cost_per_million_rows"] for row in data["rows"]}
    assert costs[data["cheapest"]] == min(costs.values())


def test_advice_gives_the_reason_if_nothing_fits() -> None:
    graph = sw.capture(nn.Linear(64, 64), (torch.randn(4, 64),), lambda out, _: out.sum())
    advice = sw.advise(graph, ["h100"], [1], progress=False, memory_gib=1e-5)
    (row,) = advice.rows
    assert not row.feasible
    assert "too much" in row.reason
    assert advice.fastest is advice.cheapest is None
    assert "h100-1: no plan fits" in str(advice)
    with pytest.raises(ClusterError, match="nothing to compare"):
        sw.advise(graph)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-c", "h10:1x4"], 1, "did you mean 'h100'?"),
        (["-c", "h100:4y"], 1, "valid sizes of a cluster"),
        (["-c", "missing.yaml"], 1, "there is no cluster file missing.yaml"),
        (["-c", "h100", "--recompute", "ful"], 2, "did you mean 'full'?"),
        (["-c", "h100", "--schedule", "1f1"], 2, "did you mean '1f1b'?"),
        (["-c", "h100", "--offload", "optimiser"], 2, "did you mean 'optimizer'?"),
        (["-c", "h100", "--constraint", "head"], 2, "--constraint"),
        (["-c", "h100", "--per-microbatch"], 2, "--per-microbatch"),
        (["-c", "h100:4", "--ranks", "3"], 2, "h100:4 has 4"),
        (["-c", "h100", "--memory-gib", "0"], 2, "for '--memory-gib'"),
        (["--memory-gib", "3"], 2, "needs --cluster"),
        (["--tp", "2"], 2, "--cluster without --strategy"),
    ],
)
def test_wrong_options_are_reported(
    capsys: pytest.CaptureFixture[str], target: str, arguments: list[str], code: int, message: str
) -> None:
    actual_code, out, err = run(capsys, "plan", target, *arguments)
    assert (actual_code, out) == (code, "")
    assert message in unwrapped(err)
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", ["explain", "simulate"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe\x00", b'{"version": 1}'])
def test_corrupt_files_are_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str, content: bytes
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    code, out, err = run(capsys, verb, str(path))
    assert (code, out) == (1, "")
    assert err.startswith(("PlanError: ", "PlanError:\n"))  # a long path wraps to the next line
    assert "".join(str(path).split()) in "".join(err.split())


def test_corrupt_figures_are_reported(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    for field, value in (("best", {}), ("runners_up", 3), ("memory", []), ("step", [{}])):
        data = json.loads(plan_file.read_text())
        data["search"][field] = value
        path.write_text(json.dumps(data))
        code, _, err = run(capsys, "simulate", str(path))
        assert code == 1
        code, _, err = run(capsys, "explain", str(path))
        assert "Traceback" not in err
        assert code == (0 if field == "memory" else 1)


def test_plans_for_another_model_or_cluster_are_refused(
    capsys: pytest.CaptureFixture[str], target: str, plan_file: Path, tmp_path: Path
) -> None:
    code, _, err = run(capsys, "simulate", str(plan_file), target, "-c", "h100:8")
    assert code == 1
    assert "is for 4 ranks, h100-8 has 8" in err
    other_target = target.replace(":build", ":other")
    code, _, err = run(capsys, "simulate", str(plan_file), other_target, "-c", "h100:4")
    assert code == 1
    assert "PlanMismatch" in err
    named = tmp_path / "ddp.json"
    run(capsys, "plan", target, "-s", "ddp", "-o", str(named))
    for verb in ("explain", "simulate"):
        code, _, err = run(capsys, verb, str(named))
        assert code == 1
        assert "was not searched for" in err
        assert "--cluster c.yaml" in err


@pytest.mark.parametrize(
    ("text", "ranks", "nodes"),
    [("h100", 8, 1), ("h100:8x8", 64, 8), ("a100-80:2x4", 8, 2), ("h100:16", 16, 2),
     ("h100:12", 12, 2), ("cpu:3", 3, 1), ("gb200:6", 6, 2)],
)  # fmt: skip
def test_presets_of_clusters_are_parsed(text: str, ranks: int, nodes: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.num_ranks, cluster.num_nodes) == (ranks, nodes)


def test_presets_have_at_most_8_devices_per_node() -> None:
    for count in (1, 2, 7, 8, 24, 30):
        cluster = preset_of_size("h100", count)
        assert cluster.num_ranks == count
        assert cluster.num_ranks // cluster.num_nodes <= 8


def test_constraints_may_name_an_axis() -> None:
    assert parse_constraints(["a.*=0", "b=tp:0:3x[4]x16", "c=0:[4]x16"]) == {
        "a.*": "0", "b": {"tp": "0:3x[4]x16"}, "c": "0:[4]x16",
    }  # fmt: skip


@pytest.mark.parametrize("width", [40, 57, 100])
def test_tables_fit_their_width(width: int) -> None:
    columns = [Column("one"), Column("two", 1), Column("three", 2), Column("four", 3)]
    rows = [("123.4 ms", "1,234,567", "80.0 GiB", "12.3 MiB", "word " * 30)] * 2
    lines = table(columns, "text", rows, width)
    assert max(map(len, lines)) <= width
    assert sum(line.count("word") for line in lines) == 60
    assert "123.4 ms" in lines[1]


def test_bars_of_a_chart_grow_with_the_values() -> None:
    lines = chart([1.0, 2.0, 3.0], 3.0, 30)
    assert [line.count("#") for line in lines[:-1]] == sorted(
        line.count("#") for line in lines[:-1]
    )
    assert chart([], 1.0, 30) == []
