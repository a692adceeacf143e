from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from shardwise.cluster import Cluster, Ssh, launch_commands
from shardwise.errors import ClusterError


def test_one_command_for_each_node() -> None:
    cluster = replace(Cluster.preset("h100", nodes=2), port=1234)
    commands = launch_commands(cluster, ["train.py", "--name", "it's $HOME"])
    assert [command.node for command in commands] == ["node0", "node1"]
    for index, command in enumerate(commands):
        words = list(command.argv)
        assert words[words.index("--node-rank") + 1] == str(index)
        assert words[words.index("--master-addr") + 1] == "node0"
        assert words[words.index("--master-port") + 1] == "1234"
        assert words[words.index("--nproc-per-node") + 1] == "8"
        assert words[-3:] == ["train.py", "--name", "it's $HOME"]
        assert shlex.split(str(command)) == words


def test_ssh_reaches_the_node_with_one_quoted_command() -> None:
    (node,) = Cluster.preset("h100", nodes=2).nodes
    node = replace(node, address="10.0.0.[1-2]", ssh=Ssh(user="me", key="/k", port=23))
    commands = launch_commands(Cluster(name="x", nodes=(node,)), ["a b.py", ";rm"])
    assert commands[1].argv[:6] == ("ssh", "-i", "/k", "-p", "23", "me@10.0.0.2")
    inner = shlex.split(commands[1].argv[6])
    assert inner[0] == "torchrun"
    assert inner[-2:] == ["a b.py", ";rm"]
    assert "10.0.0.1" in inner


def test_what_cannot_be_started_is_refused() -> None:
    with pytest.raises(ClusterError, match="nothing to run"):
        launch_commands(Cluster.local(2), [])
    (node,) = Cluster.local(2).nodes
    evil = replace(node, address="-oProxyCommand=x", ssh=Ssh())
    with pytest.raises(ClusterError, match="as an option"):
        launch_commands(Cluster(name="x", nodes=(evil,)), ["a"])
