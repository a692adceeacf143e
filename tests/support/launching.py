"""Clusters for launch tests: local nodes that a stand-in for ssh reaches."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "a b",
    "it's",
    'say "x"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "& touch pwned",
    "$HOME",
    "${HOME}",
    "line\nbreak",
    "tab\there",
    "back\\slash",
    "*",
    "!!",
    "#x",
    "~",
    "--nnodes",
    "--",
    "",
    "-",
    "é中",
)
# Runs its last argument in a shell, as ssh does.
SSH = """#!/bin/sh
for last; do :; done
exec sh -c "$last"
"""
# Starts one plain process per node, fast: these tests are about the launcher, not torch.
TORCHRUN = """
import argparse, os, subprocess, sys
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

def main(arguments):
    parser = argparse.ArgumentParser()
    for name in ("nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--rdzv-conf")
    parser.add_argument("--no-python", action="store_true")
    parser.add_argument("-m", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    argv = [] if options.no_python else [sys.executable]
    argv += ["-m"] if options.m else []
    env = {**os.environ, "NODE": options.node_rank, "PORT": options.master_port}
    code = subprocess.run([*argv, options.script, *options.arguments], env=env).returncode
    if code:
        raise ChildFailedError(code)
"""
ERRORS = """
class Failure:
    pid = 1
    def __init__(self, code): self.exitcode = code

class ChildFailedError(Exception):
    def __init__(self, code): self.code = code
    def get_first_failure(self): return 0, Failure(self.code)
"""


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def stand_in_for_torch(parent: Path) -> str:
    """Return a PYTHONPATH with this source tree and a `torch` that has only a simple torchrun."""
    package = parent / "fake" / "torch"
    errors = "distributed/elastic/multiprocessing/errors.py"
    files = {
        "distributed/run.py": TORCHRUN,
        errors: ERRORS,
        "distributed/elastic/rendezvous/static_tcp_rendezvous.py": "TCPStore = None\n",
        "distributed/elastic/multiprocessing/api.py": "class SignalException(Exception): pass\n",
    }
    for name, text in files.items():
        write(package / name, text)
        for folder in (package / name).parents[: len(Path(name).parts)]:
            write(folder / "__init__.py", "")  # a regular package precedes the installed one
    return f"{package.parent}{os.pathsep}{ROOT / 'src'}"


def stand_in_for_ssh(folder: Path, text: str = SSH) -> Path:
    return write(folder / "fake ssh", text, 0o755)


def cluster_file(
    folder: Path,
    counts: tuple[int, ...] = (1, 1),
    *,
    addresses: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    ssh: dict[str, object] | None = None,
    with_ssh: bool = True,
    port: int = 29500,
) -> Path:
    """Write a cluster file of CPU nodes `a`, `b`, …, all local without `addresses`."""
    names = "abcdefgh"[: len(counts)]
    settings = {"program": str(folder / "fake ssh")} if ssh is None else ssh
    nodes = [
        {
            "name": name,
            "devices": {"cpu": count},
            "link": {"bandwidth_gb_per_s": 5, "latency_us": 10},
            "nic": {"bandwidth_gbit_per_s": 10},
            "address": addresses[i] if addresses else "127.0.0.1",
            **({"ssh": settings} if with_ssh else {}),
        }
        for i, (name, count) in enumerate(zip(names, counts, strict=True))
    ]
    start = {"folder": str(folder), "python": sys.executable, "environment": environment or {}}
    document = {
        "version": 2,
        "name": "test",
        "port": port,
        "start": start,
        "devices": {"cpu": {"preset": "cpu"}},
        "nodes": nodes,
    }
    return write(folder / "cluster.yaml", yaml.safe_dump(document))


def start_launch(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `shardwise launch`."""
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "launch", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def run_launch(folder: Path, *arguments: str, timeout_s: float = 60) -> tuple[int, str, str]:
    """Run `shardwise launch`; return its exit code, output and errors."""
    process = start_launch(folder, *arguments)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, out, err


def processes_with(mark: str) -> list[str]:
    """Return the command lines of other living processes that contain `mark`."""
    command_lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in words and entry.name != str(os.getpid()):
            command_lines.append(words)
    return command_lines


def wait_until_gone(mark: str, timeout_s: float = 15) -> list[str]:
    """Wait until no process contains `mark`; return those that remain after the timeout."""
    end = time.monotonic() + timeout_s
    while (remaining := processes_with(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return remaining


def wait_for(path: Path, timeout_s: float = 60) -> None:
    """Wait until a process has written the file."""
    end = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.05)
