"""Static checks of the Dockerfile and of the example cluster file."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from pathlib import Path

from shardwise.cluster import Cluster
from shardwise.launch import launch_commands

ROOT = Path(__file__).parents[3]


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions, with continued lines joined and comments removed."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    words = [line.strip().partition(" ") for line in lines if line.strip()]
    return [(name, arguments.strip()) for name, _, arguments in words]


def test_the_dockerfile_is_well_formed() -> None:
    steps = instructions()
    names = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}
    assert {name for name, _ in steps} == names
    assert [arguments for name, arguments in steps if name == "USER"] == ["train"]
    assert steps[-1][0] == "CMD"
    assert json.loads(steps[-1][1]) == ["shardwise", "doctor"]
    declared = {arguments.partition("=")[0] for name, arguments in steps if name == "ARG"}
    used = set(re.findall(r"\$\{(\w+)", " ".join(arguments for _, arguments in steps)))
    assert used <= declared


def test_every_copied_file_exists_and_is_in_the_build_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    context = {line[1:] for line in lines if line.startswith("!")}
    copied = set()
    for name, arguments in instructions():
        if name == "COPY":
            words = [word for word in shlex.split(arguments) if not word.startswith("--")]
            copied.update(words[:-1])
    assert all((ROOT / path).exists() for path in copied)
    assert copied == context
    assert any(fnmatch.fnmatch("README.md", line) for line in lines if line == "*")


def test_the_two_node_example_starts_both_nodes() -> None:
    cluster = Cluster.load(ROOT / "examples/two_nodes.yaml")
    assert cluster.num_ranks == 6
    new, old = launch_commands(cluster, ["examples/01_quickstart.py"])
    assert new.argv[-2] == "train@10.0.0.1"
    assert "--nproc-per-node 4 --node-rank 0 --master-addr 10.0.0.1" in new.argv[-1]
    assert "--nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1" in old.argv[-1]
    assert "~/shardwise/.venv/bin/python" in new.argv[-1]
    assert "/opt/venv/bin/python" in old.argv[-1]
