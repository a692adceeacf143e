"""Full disks, folders in use, and signals to all processes at once."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.errors import CheckpointError, TrainingError
from shardwise.runtime.rendezvous import host_store
from shardwise.training.logs import JsonlLog
from shardwise.training.processes import EXIT_STOPPED
from shardwise.training.run_files import locked_folder
from tests.support import trainer as support
from tests.support.forked import in_child

ROOT = Path(__file__).parents[3]


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Limit the size of files, which looks like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_log_that_cannot_be_written_warns_once_and_training_continues(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    log = JsonlLog(tmp_path / "metrics.jsonl", 0)
    log.write(1, {"loss": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    small_files(size + 5)
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl: File too large"):
        log.write(2, {"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.write(3, {"loss": 1.0})
    small_files(resource.RLIM_INFINITY)
    log.write(6, {"loss": float("nan")})
    log.close()
    rows = []
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            assert line in '{"step": 2, "loss": 1.0}'  # written only in part
    assert [row["step"] for row in rows] == [1, 6]


class Fill(sw.Callback):
    """Limit the size of files from the first step on."""

    def __init__(self, limit: Callable[[int], None], num_bytes: int) -> None:
        self.limit, self.num_bytes = limit, num_bytes

    def on_step(self, trainer: sw.Trainer, metrics: object) -> None:
        self.limit(self.num_bytes)


def test_a_full_disk_is_reported_and_recorded_in_the_run_file(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    with pytest.raises(CheckpointError, match="no space"):
        support.fit(folder=str(tmp_path), steps=4, callbacks=[Fill(small_files, 5000)])
    small_files(resource.RLIM_INFINITY)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["state"] == "failed"
    assert "no space" in run["error"]


@pytest.mark.slow
def test_a_training_in_a_full_file_system(tmp_path: Path) -> None:
    """Logs, `run.json` and checkpoints share some kilobytes; only the last figures are lost."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        (tmp_path / "run").mkdir()
        (tmp_path / "filler").write_bytes(b"x" * (60 << 10))
        with pytest.raises(CheckpointError, match=r"no space.*free"):
            support.fit(folder=str(tmp_path / "run"), steps=60, data={"evaluation": None})
        assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "failed"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_holds_one_training_at_a_time(tmp_path: Path) -> None:
    with locked_folder(tmp_path):
        with pytest.raises(TrainingError, match=f"process {os.getpid()} on"):
            support.fit(folder=str(tmp_path), steps=1)
        message = in_child(lambda: locked_folder(tmp_path).__enter__())
    assert re.match(
        rf"TrainingError: .* in use: process {os.getpid()} on \S+ trains .* since", message
    )
    assert message.count("another folder") == 1
    assert in_child(lambda: locked_folder(tmp_path).__enter__()) == "None"
    assert support.fit(folder=str(tmp_path), steps=1).steps == 1


def test_a_killed_training_releases_its_folder_at_once(tmp_path: Path) -> None:
    """Also while a process that it forked is still running."""
    pid = os.fork()
    if pid == 0:
        lock = locked_folder(tmp_path)
        lock.__enter__()
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        (tmp_path / "ready").touch()
        time.sleep(60)
        os._exit(0)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with locked_folder(tmp_path):
        pass


def listening_at(port: int) -> list[str]:
    """Return the local addresses, in hexadecimal, of all sockets that listen at a port."""
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.partition(":")[2], 16) == port:
                addresses.append(address.partition(":")[0])
    return addresses


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F")]
)
def test_the_store_listens_on_its_address_only(host: str, address: str) -> None:
    store = host_store(host)
    store.set("key", "value")
    assert listening_at(store.port) == [address]


def test_a_corrupt_training_state_is_refused(tmp_path: Path) -> None:
    from shardwise.checkpoint.manifest import MANIFEST, _checksum, _dumps

    support.fit(folder=str(tmp_path), steps=1)
    (path,) = (tmp_path / "checkpoints").glob(f"*/{MANIFEST}")
    body = json.loads(path.read_text())
    body.pop("crc32")
    for change in (
        {"random": {"python": [3, [1], None], "numpy": [], "torch": "zz"}},
        {"data": 5},
        {"step": "many"},
        {"schedule": 7},
        {"data": {**body["extra"]["data"], "state": {"$dict": 3}}},
    ):
        corrupt = {**body, "extra": {**body["extra"], **change}}
        path.write_text(_dumps({**corrupt, "crc32": _checksum(corrupt)}))
        with pytest.raises(CheckpointError, match=r"training state in .* is corrupt"):
            support.fit(folder=str(tmp_path), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_saves_and_stops(tmp_path: Path, number: int) -> None:
    """As scancel and systemd do: loading processes receive the signal, too."""
    command = [sys.executable, "-m", "tests.support.group_training", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    training = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
    log = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(training.pid, number)
    assert training.wait(60) == EXIT_STOPPED
    assert list((tmp_path / "checkpoints").glob("step-*"))
    assert json.loads((tmp_path / "run.json").read_text())["state"] == "signal"


@pytest.mark.slow
def test_the_agent_of_a_launch_listens_on_its_address_only(tmp_path: Path) -> None:
    """torchrun hosts the store of a launch."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, pathlib\n"
        "import torch.distributed as dist\n"
        "from tests.unit.training.test_faults import listening_at\n"
        "dist.init_process_group('gloo')\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        f"file = pathlib.Path({str(tmp_path)!r}, os.environ['RANK'])\n"
        "file.write_text(repr(listening_at(port)))\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.3", 0))
        port = probe.getsockname()[1]
    sizes = ["--nnodes", "1", "--nproc-per-node", "2", "--node-rank", "0"]
    rendezvous = ["--master-addr", "127.0.0.3", "--master-port", str(port)]
    command = [sys.executable, "-m", "shardwise.launch.torchrun", *sizes, *rendezvous, str(script)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=200)
    assert {(tmp_path / rank).read_text() for rank in "01"} == {"['0300007F']"}
