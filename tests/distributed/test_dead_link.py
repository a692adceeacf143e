"""A link of an emulated network fails during collectives: every rank names an edge of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.collectives.bench.emulation import emulated
from tests.support.dead_link import RANKS, TIMEOUT_S, line

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("tc"), reason="network namespaces need root and tc"
    ),
]


def wait_for(files: Sequence[Path], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < until, [file.name for file in files if not file.exists()]
        time.sleep(0.05)


def test_every_rank_names_an_edge_of_the_link_that_died(tmp_path: Path) -> None:
    network = line()
    with emulated(network) as hosts:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, sys.executable, "-m", "tests.support.dead_link",
                 str(tmp_path), str(rank)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
            )
            for rank, host in enumerate(hosts.hosts)
        ]  # fmt: skip
        try:
            wait_for([tmp_path / f"{rank}.ready" for rank in range(RANKS)], 60)
            for edge in range(network.num_edges):
                if {int(network.source[edge]), int(network.target[edge])} == {2, 3}:
                    for resource in network.uses[edge].tolist():
                        command = ["ip", "-n", hosts.middle, "link", "set", f"q{resource}", "down"]
                        subprocess.run(command, check=False, timeout=10)
            errors = [tmp_path / f"{rank}.error" for rank in range(RANKS)]
            wait_for(errors, 4 * TIMEOUT_S + 10)
            for text in (file.read_text() for file in errors):
                assert text.startswith("LinkError"), text
                assert "edge 2 -> 3" in text or "edge 3 -> 2" in text, text
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(10)
