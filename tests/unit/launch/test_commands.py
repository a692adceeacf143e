from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import Cluster, ClusterNode, Ssh, Start
from shardwise.errors import ClusterError
from shardwise.launch import launch_commands
from shardwise.launch.hosts import rank_program
from tests.support.launching import HOSTILE, write

arguments = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))


def nodes(*, ssh: Ssh | None = None, start: Start | None = None) -> Cluster:
    (node,) = Cluster.preset("h100", nodes=2).nodes
    node = replace(node, address="10.0.0.[1-2]", ssh=ssh, start=start or Start())
    return Cluster(name="x", nodes=(node,))


def test_each_node_has_one_command() -> None:
    cluster = replace(Cluster.preset("h100", nodes=2), port=1234)
    commands = launch_commands(cluster, ["train.py", "--name", "it's $HOME"])
    assert [command.node for command in commands] == ["node0", "node1"]
    for index, command in enumerate(commands):
        assert shlex.split(str(command)) == list(command.argv)
        assert command.argv[0] == "ssh"
        assert command.argv[-2] == f"node{index}"
        words = shlex.split(command.argv[-1])
        assert words[words.index("--node-rank") + 1] == str(index)
        assert words[words.index("--master-addr") + 1] == "node0"
        assert words[words.index("--master-port") + 1] == "1234"
        assert words[words.index("--nproc-per-node") + 1] == "8"
        assert words[-3:] == ["train.py", "--name", "it's $HOME"]


def test_each_command_has_its_node_s_number_of_devices() -> None:
    (node,) = Cluster.preset("cpu", nodes=2, devices_per_node=2).nodes
    first, second = node.machine(0), replace(node.machine(1), devices=node.devices[:1])
    commands = launch_commands(Cluster(name="x", nodes=(first, second)), ["a.py"])
    inner = [shlex.split(command.argv[-1]) for command in commands]
    assert [words[words.index("--nproc-per-node") + 1] for words in inner] == ["2", "1"]


def test_ssh_options_come_from_the_cluster_file() -> None:
    ssh = Ssh(user="me", key="/k", port=23, program="/opt/ssh", options=("Compression=yes",))
    start = Start(folder="/my work", python="~/my env/bin/python", environment=(("A", "x y"),))
    command = launch_commands(nodes(ssh=ssh, start=start), ["a.py"])[1]
    assert command.argv[:4] == ("/opt/ssh", "-T", "-o", "Compression=yes")
    assert {"BatchMode=yes", "ConnectTimeout=10", "IdentitiesOnly=yes"} <= set(command.argv)
    assert command.argv[-6:-1] == ("-o", "IdentitiesOnly=yes", "-p", "23", "me@10.0.0.2")
    assert command.argv[-1].startswith("env PYTHONUNBUFFERED=1 'A=x y' ~/'my env/bin/python' -m")
    assert "--folder '/my work'" in command.argv[-1]


def test_a_node_overrides_the_start_settings_of_the_cluster() -> None:
    base = Start(folder="/all", environment=(("A", "1"), ("B", "2")))
    own = Start(python="/py", environment=(("B", "3"),))
    merged = Start(folder="/all", python="/py", environment=(("A", "1"), ("B", "3")))
    assert own.over(base) == merged
    cluster = replace(nodes(start=own), start=base)
    assert "A=1 B=3 /py -m" in str(launch_commands(cluster, ["a.py"])[0])


@pytest.mark.parametrize(
    ("name", "address", "is_local"),
    [
        ("local", "", True),
        ("localhost", "", True),
        ("x", "127.0.0.1", True),
        ("x", "::1", True),
        ("x", os.uname().nodename, True),
        ("x", "192.0.2.1", False),
        ("x", "", False),
    ],
)
def test_this_machine_needs_no_ssh(name: str, address: str, is_local: bool) -> None:
    (cpu,) = Cluster.preset("cpu", nodes=1, devices_per_node=1).nodes
    nic = Cluster.preset("cpu", nodes=2, devices_per_node=1).nodes[0].nic
    other = ClusterNode(name="other", address="192.0.2.9", devices=cpu.devices, nic=nic)
    node = ClusterNode(name=name, address=address, devices=cpu.devices, nic=nic)
    command = launch_commands(Cluster(name="c", nodes=(other, node)), ["a.py"])[1]
    assert (command.argv[0] == "env") is is_local
    only = launch_commands(Cluster(name="c", nodes=(node,)), ["a.py"])[0]
    assert only.argv[0] == "env"
    assert "--master-addr localhost" in str(only)


def test_invalid_programs_and_options_are_refused() -> None:
    for words in ([], ["-m"], ["python"]):
        with pytest.raises(ClusterError, match="nothing to run"):
            launch_commands(Cluster.local(2), words)
    with pytest.raises(ClusterError, match="zero byte"):
        launch_commands(Cluster.local(2), ["a.py", "\0"])
    with pytest.raises(ClusterError, match="starts torchrun itself"):
        launch_commands(Cluster.local(2), ["torchrun", "a.py"])
    with pytest.raises(ClusterError, match="'--lr' is not a program"):
        launch_commands(Cluster.local(2), ["--lr", "1"])
    (node,) = Cluster.local(2).nodes
    for ssh in (Ssh(), Ssh(user="-oProxyCommand=x")):
        bad = replace(node, address="-oProxyCommand=x" if not ssh.user else "h", ssh=ssh)
        with pytest.raises(ClusterError, match="as an option"):
            launch_commands(Cluster(name="x", nodes=(bad,)), ["a.py"])
    with pytest.raises(ClusterError, match="A B"):
        Start(environment=(("A B", "x"),))


def test_the_first_node_needs_an_address_that_the_others_can_reach() -> None:
    cluster = Cluster.preset("cpu", nodes=2, devices_per_node=1)
    (node,) = cluster.nodes
    local, remote = replace(node.machine(0), name="local", address=""), node.machine(1)
    with pytest.raises(ClusterError, match="cannot reach the first one as 'localhost'"):
        launch_commands(Cluster(name="x", nodes=(local, remote)), ["a.py"])
    reachable = replace(local, address="192.0.2.1")
    assert len(launch_commands(Cluster(name="x", nodes=(reachable, remote)), ["a.py"])) == 2


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_hostile_argument_arrives_unchanged(tmp_path: Path, shell: str) -> None:
    """The node's shell runs the stub with the same arguments, and nothing else."""
    stub = "#!/bin/sh\nexec " + sys.executable + " -c 'import json,sys;print(json.dumps("
    write(tmp_path / "st ub's", stub + 'sys.argv[1:]))\' "$@"\n', 0o755)
    start = Start(folder="a $(touch pwned)", python=str(tmp_path / "st ub's"))
    start = replace(start, environment=(("A", "$(touch pwned)"),))
    command = launch_commands(nodes(ssh=Ssh(), start=start), ["train.py", *HOSTILE])[0]
    done = subprocess.run(
        [shell, "-c", command.argv[-1]], cwd=tmp_path, capture_output=True, timeout=30, check=True
    )
    words = json.loads(done.stdout)
    assert words[-len(HOSTILE) :] == list(HOSTILE)
    assert words[words.index("--folder") + 1] == "a $(touch pwned)"
    assert [path.name for path in tmp_path.iterdir()] == ["st ub's"]


@given(arguments)
def test_arguments_survive_both_levels_of_quoting(words: list[str]) -> None:
    command = launch_commands(nodes(ssh=Ssh()), ["a.py", *words])[0]
    assert shlex.split(shlex.split(str(command))[-1])[-len(words) - 1 :] == ["a.py", *words]


@settings(max_examples=30, deadline=None)
@given(arguments)
def test_torchrun_passes_all_arguments_to_the_program(words: list[str]) -> None:
    from torch.distributed.run import parse_args

    for argv in (["a.py", *words], ["-x.py", *words], ["-m", "mod", *words], ["prog", *words]):
        options = parse_args(["--nnodes", "2", *rank_program(argv)])
        assert options.training_script == argv[argv[0] == "-m"]
        assert options.training_script_args == words
        assert options.module == (argv[0] == "-m")
        assert options.no_python == (argv[0] == "prog")


def test_each_node_uses_its_own_python() -> None:
    assert rank_program(["python3", "a.py"]) == ("--", "a.py")
    assert rank_program(["/usr/bin/python", "-m", "mod"]) == ("-m", "--", "mod")
