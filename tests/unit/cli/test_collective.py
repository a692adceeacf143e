"""`shardwise collective`: results, files and error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

import shardwise as sw
from shardwise.cli.collective import parse_bytes, parse_ranks
from shardwise.cluster import Mesh
from shardwise.errors import ProgramError
from shardwise.plans import Plan
from tests.support import command_line

CLUSTER = """
version: 2
name: slow
devices: {cpu: {preset: cpu}}
nodes:
  - {name: "fast[0-2]", devices: {cpu: 1}, nic: {bandwidth_gbit_per_s: 0.8}}
  - {name: slow, devices: {cpu: 1}, nic: {bandwidth_gbit_per_s: 0.2}}
network: {latency_us: 50}
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return command_line.run(capsys, "collective", *arguments)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


def test_solve_prints_time_and_bounds_and_writes_the_program(capsys, cluster, tmp_path):
    file = str(tmp_path / "p.json")
    code, out, _ = run(capsys, "solve", cluster, "--op", "all_reduce", "--bytes", "4MB", "-o", file)
    assert code == 0
    assert "cuts' bound    160.000 ms" in out
    assert "proved: no algorithm" in out
    assert "limited by nic slow.0" in out
    code, out, _ = run(capsys, "show", file, "--svg", str(tmp_path / "p.svg"))
    assert code == 0
    assert "sums, towards rank" in out
    assert "checked: every rank" in out
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    code, out, _ = run(capsys, "show", file, "--rank", "3")
    assert code == 0
    assert "rank 3:\n  send" in out


def test_solve_prints_json(capsys, cluster):
    code, out, _ = run(capsys, "solve", cluster, "--op", "all_gather", "--bytes", "400", "--json")
    assert code == 0
    assert json.loads(out)["program"]["counts"] == [25, 25, 25, 25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "all_reduc"], "did you mean 'all_reduce'"),
        (["--bytes", "64 parsec"], "--bytes"),
        (["--bytes", "7"], "not a multiple of 4"),
        (["--bytes", "1.5"], "is 1.5 bytes"),
        (["--bytes", "99999999999GB"], "is more than 1 EiB"),
        (["--members", "0-99999999999"], "rank 99999999999 does not exist"),
        (["-o", "/dev/null/p.json"], "cannot write /dev/null/p.json"),
        (["--dtype", "float23"], "--dtype 'float23'"),
        (["--members", "0-9"], "rank 4 is outside a cluster of 4 ranks"),
        (["--members", "a"], "list of ranks"),
        (["--members", "3-1"], "3-1 is empty; use 1-3"),
        (["--members", "1,1"], "ranks [1, 1]"),
        (["--op", "reduce", "--root", "9"], "root 9 is outside"),
    ],
)
def test_wrong_arguments_of_solve_are_reported(capsys, cluster, arguments, message):
    try:
        code, _, err = run(capsys, "solve", cluster, *arguments)
    except typer.BadParameter as error:
        code, err = 2, str(error)
    assert code in (1, 2)
    assert message.replace(" ", "") in err.replace("\n", "").replace("│", "").replace(" ", "")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--timeout-s", "0", "above 0"),
        ("--timeout-s", "-3", "above 0"),
        ("--timeout-s", "nan", "above 0"),
        ("--timeout-s", "inf", "at most 1,000,000"),
        ("--bytes", "0", "must be positive"),
        ("--bytes", "-4KB", "--bytes"),
        ("--rounds", "0", "--rounds"),
    ],
)
def test_wrong_options_of_tune_are_reported_before_the_rendezvous(capsys, option, value, message):
    code, _, err = run(capsys, "tune", "plan.json", f"{option}={value}")
    assert code == 2
    assert message in err


@pytest.mark.parametrize("wrong", [{"num_bytes": 0}, {"rounds": 0}, {"timeout_s": float("nan")}])
def test_the_python_function_refuses_wrong_options_too(wrong):
    plan = Plan(name="x", model="x", fingerprint="", mesh=Mesh.of(dp=2), roles={"dp": "batch"})
    with pytest.raises(ProgramError, match=r"rounds and .* s"):
        sw.collectives.tune(plan, **wrong)


NODES = "version: 2\nname: x\ndevices: {cpu: {preset: cpu}}\nnodes:\n"
HOST = "devices: {cpu: 1}, nic: {bandwidth_gbit_per_s: 1}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('  - {name: "h[0-1]", devices: {cpu: 1}, nic: {bandwidth_gbit_per_s: 0}}', "above 0"),
        ('  - {name: "h[0-1]", devices: {cpu: 1}, nic: {bandwidth_gbit_per_s: -2}}', "is '-2'"),
        (f"  - {{name: h, {HOST}}}\n  - {{name: h, {HOST}}}", "2 nodes are named 'h'"),
        (f"  - {{name: a, {HOST}}}\n  - {{name: b, devices: {{cpu: 1}}}}", "has no nic"),
        ('  - {name: "h[0-1]", devices: {cpu: 1}, nic: {bandwidth_gbit_per_s: }}', "is empty"),
        (
            f'  - {{name: "h[0-1]", {HOST}}}\nnetwork: {{switches: [{{name: s, nodes: "h[0-1]", '
            "oversubscription: .inf}]}",
            "oversubscription is '.inf', must be a finite number above 0",
        ),
        (
            f'  - {{name: "h[0-1]", {HOST}}}\nnetwork: {{latency_us: 1.0e+999999999}}',
            "latency_us is '1.0e+999999999', not between",
        ),
        (
            f'  - {{name: "h[0-1]", {HOST}}}\nnetwork: {{trunks: [{{name: t, between: [h0, h7], '
            "bandwidth_gbit_per_s: 1}]}",
            "no node 'h7'",
        ),
    ],
)
def test_wrong_links_are_reported(capsys, tmp_path, text, message):
    path = tmp_path / "cluster.yaml"
    path.write_text(NODES + text)
    code, _, err = run(capsys, "solve", str(path))
    assert code == 1
    assert message in err
    assert "try:" in err or "did you mean" in err
    assert err.count("cluster.yaml") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--members", "2"], "at least 2 ranks, got 1"),
        (["--bytes", "16MB,8"], "less than one float32 per rank"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_wrong_arguments_of_bench_are_reported(capsys, cluster, arguments, message):
    try:
        code, _, err = run(capsys, "bench", cluster, *arguments)
    except typer.BadParameter as error:
        code, err = 2, str(error)
    assert code in (1, 2)
    assert message in err


def test_an_invalid_program_is_refused_in_every_format(capsys, cluster, tmp_path):
    file, picture = tmp_path / "p.json", tmp_path / "p.svg"
    assert run(capsys, "solve", cluster, "--bytes", "4KB", "-o", str(file))[0] == 0
    data = json.loads(file.read_text())
    data["ranks"][0].pop()
    file.write_text(json.dumps(data))
    for options in ([], ["--json"], ["--svg", str(picture)], ["--rank", "0"]):
        code, out, err = run(capsys, "show", str(file), *options)
        assert (code, out) == (1, "")
        assert str(file) in err.replace("\n      ", "")
    assert not picture.exists()


def test_lines_fit_a_narrow_terminal(capsys, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    for verb in ("solve", "show"):
        code, out, _ = run(capsys, verb, cluster, "--bytes", "40KB")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 50


def test_sizes_and_ranks_are_parsed():
    assert parse_bytes("0.000001TB") == 1_000_000
    assert parse_bytes("64MB") == 64_000_000
    assert parse_bytes("16 MiB") == 2**24
    assert parse_ranks("0-2,5") == [0, 1, 2, 5]
