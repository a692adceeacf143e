"""The Dockerfile and the example of a cluster file, as far as they can be checked here."""

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
    """The Dockerfile's instructions, lines joined and without comments."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.strip().partition(" ") for line in lines if line.strip()]
    return [(name, rest.strip()) for name, _, rest in found]


def test_the_dockerfile_is_well_formed() -> None:
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}
    found = instructions()
    assert {name for name, _ in found} == known
    assert [rest for name, rest in found if name == "USER"] == ["train"]
    assert found[-1][0] == "CMD"
    assert json.loads(found[-1][1]) == ["shardwise", "doctor"]
    given = {rest.partition("=")[0] for name, rest in found if name == "ARG"}
    used = set(re.findall(r"\$\{(\w+)", " ".join(rest for _, rest in found)))
    assert used <= given


def test_every_copied_file_exists_and_is_sent() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = set()
    for name, rest in instructions():
        if name == "COPY":
            words = [word for word in shlex.split(rest) if not word.startswith("--")]
            copied.update(words[:-1])
    assert all((ROOT / path).exists() for path in copied)
    assert copied == sent
    assert any(fnmatch.fnmatch("README.md", line) for line in lines if line == "*")


def test_the_example_of_two_nodes_starts_both() -> None:
    cluster = Cluster.load(ROOT / "examples/two_nodes.yaml")
    assert cluster.num_ranks == 6
    new, old = launch_commands(cluster, ["examples/01_quickstart.py"])
    assert new.argv[-2] == "train@10.0.0.1"
    assert "--nproc-per-node 4 --node-rank 0 --master-addr 10.0.0.1" in new.argv[-1]
    assert "--nproc-per-node 2 --node-rank 1 --master-addr 10.0.0.1" in old.argv[-1]
    assert "~/shardwise/.venv/bin/python" in new.argv[-1]
    assert "/opt/venv/bin/python" in old.argv[-1]
