from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.cluster import Cluster
from shardwise.collectives import Network, Send
from shardwise.collectives.bench import benchmark
from shardwise.collectives.bench import emulation as hosts
from shardwise.collectives.bench.benchmark import Bench, chosen, on_emulated_hosts, table
from shardwise.collectives.bench.emulation import layout, paths_from
from shardwise.errors import ClusterError, LaunchError
from shardwise.launch.node import descendants
from shardwise.processes import is_abandoned, owned
from tests.support.clusters import uneven

MBIT = 125e3
ROOT = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
emulates = pytest.mark.skipif(not ROOT, reason="namespaces need root and iproute2")


def star() -> Network:
    return Network.of_cards([80 * MBIT] * 3 + [20 * MBIT])


# ------------------------------------------------------------ the input of ip and tc


def test_a_send_crosses_its_resources_in_order():
    network = star()
    for a in range(4):
        for b, path in paths_from(network, a).items():
            assert [network.resources[r] for r in path] == [f"nic {a} out", f"nic {b} in"]


def test_ranks_without_a_link_are_routed_over_other_ranks():
    network = Network.of_links({(i, (i + 1) % 4): 1e6 for i in range(4)})
    paths = paths_from(network, 1)
    assert [network.resources[r] for r in paths[0]] == ["link 1->2", "link 2->3", "link 3->0"]


def test_resources_too_fast_to_emulate_have_no_queue():
    sends = {("a", "b"): Send(resources=("bus", "link")), ("b", "a"): Send(resources=("bus",))}
    network = Network.of(["a", "b"], {"bus": 1e11, "link": 1e6}, sends)
    assert paths_from(network, 0) == {1: (1,)}
    assert paths_from(network, 1) == {0: ()}
    plan = layout(network, "x")
    assert len(plan.tc) == 1
    assert not any("q0" in line for line in plan.ip["x-m"])


def test_bursts_and_queues_are_large_enough():
    for line, rate in zip(layout(star(), "x").tc, [80, 80, 80, 20] * 2, strict=True):
        words = line.split()
        burst = int(words[words.index("burst") + 1])
        assert burst >= max(128_000, rate * MBIT * 0.004)
        assert int(words[words.index("limit") + 1]) > burst
        rate_bits = int(words[words.index("rate") + 1].removesuffix("bit"))
        assert rate * 1e6 < rate_bits < rate * 1.05e6  # headers take the remainder


def test_too_many_or_too_few_ranks():
    for count in (1, 65):
        with pytest.raises(ClusterError, match=f"{count} ranks cannot be emulated"):
            layout(Network.of_cards([1e6] * count), "x")
    with pytest.raises(ClusterError, match="at least 2 ranks, got 1"):
        Bench(network=Network.of_cards([1e6]), operation="all_reduce", sizes=[4])


def test_missing_tools_and_privileges_raise(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(LaunchError, match="apt-get install iproute2"):
        hosts.check_tools()
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match="only root"):
        hosts.check_tools()


# ------------------------------------------------------------ namespaces


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=9).stdout


@emulates
def test_namespaces_are_removed_after_a_failure():
    made: list[str] = []

    def fail() -> None:
        with hosts.emulated(star()) as plan:
            made.extend(name for name in plan.names if name in namespaces())
            commands = [["sleep", "60"]] * 4
            commands[1] = ["sh", "-c", "exit 3"]
            hosts.run_on_hosts(plan, commands, timeout_s=30, environment={})

    with pytest.raises(LaunchError, match="rank 1 of the emulated network ended with 3"):
        fail()
    assert len(made) == 5
    assert not any(name in namespaces() for name in made)


@emulates
def test_a_rank_that_hangs_times_out():
    began = time.monotonic()
    message = r"ranks \[0, 1, 2, 3\] .* did not finish within 0 s"
    with hosts.emulated(star()) as plan, pytest.raises(LaunchError, match=message):
        hosts.run_on_hosts(plan, [["sleep", "60"]] * 4, timeout_s=0.3, environment={})
    assert time.monotonic() - began < 20


EMULATE = """
import sys, time
from shardwise.collectives import Network
from shardwise.collectives.bench.emulation import emulated
with emulated(Network.of_cards([1e6, 1e6])) as plan:
    print(plan.middle, flush=True)
    time.sleep(60)
"""


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("name", ["terminate", "kill"])
def test_namespaces_are_removed_when_their_process_ends(name):
    process = subprocess.Popen([sys.executable, "-c", EMULATE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    made = process.stdout.readline().strip()
    assert made in namespaces()
    getattr(process, name)()
    process.wait(20)
    if name == "kill":  # the next run removes them
        with hosts.emulated(Network.of_cards([1e6, 1e6])):
            pass
    assert made not in namespaces()


@emulates
@pytest.mark.slow
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather"])
def test_emulated_hosts_have_the_rates_of_the_network(operation, tmp_path: Path):
    task = Bench(network=star(), operation=operation, sizes=[1_600_000], rounds=2, timeout_s=100)
    rows = on_emulated_hosts(task)
    assert rows[0].of_bound > 0.8  # a burst of each queue is free
    assert rows[0].library_s > 0.8 * rows[0].bound_s
    assert f"{rows[0].num_bytes:,}" in table(rows)[1]


BENCH = """
import sys
from shardwise.collectives import Network
from shardwise.collectives.bench.benchmark import Bench, on_this_machine
network = Network.of_cards([1e9, 1e9])
on_this_machine(Bench(network=network, operation="all_reduce", sizes=[4_000_000], rounds=100_000))
"""


def until(done: Callable[[], object]) -> None:
    limit = time.monotonic() + 90
    while not done():
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_processes_and_folders_are_removed_when_their_parent_ends(how, tmp_path: Path, monkeypatch):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", BENCH], env=environment)
    until(lambda: list(tmp_path.glob("*/rendezvous")))  # created by its ranks
    ranks = descendants(parent.pid)
    assert len(ranks) == 2
    parent.send_signal(how)
    parent.wait(30)
    until(lambda: not any(os.path.exists(f"/proc/{rank}") for rank in ranks))
    if how is signal.SIGKILL:  # the next run removes its folder
        assert len(list(tmp_path.iterdir())) == 1
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        benchmark._remove_abandoned()
    assert not list(tmp_path.iterdir())


def test_files_of_a_running_process_are_not_abandoned():
    ended = subprocess.Popen(["true"])
    ended.wait(10)
    assert not is_abandoned(owned("x-") + "abc", "x-")
    assert is_abandoned(f"x-{ended.pid}-abc", "x-")
    assert not is_abandoned(f"y-{ended.pid}-abc", "x-")
    assert not is_abandoned("x-abc", "x-")


def test_dtypes_that_the_library_does_not_support_raise():
    with pytest.raises(ClusterError, match="does not support collectives of int16"):
        Bench(network=star(), operation="all_reduce", sizes=[8], item_bytes=2, dtype="int16")


def test_the_implementation_of_a_plan_is_timed():
    uniform = Cluster.preset("cpu", nodes=4, devices_per_node=1)
    assert chosen(uniform, "all_reduce", range(4))(64_000_000) == "library"
    assert chosen(uniform, "broadcast", range(4))(64_000_000) == "solved"
    uses = chosen(uneven(4), "all_reduce", range(4))
    assert (uses(64), uses(64_000_000)) == ("library", "solved")
