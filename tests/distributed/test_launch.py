"""Two nodes train together through `shardwise launch`: network namespaces and local sshd."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launching import (
    cluster_file,
    run_launch,
    start_launch,
    wait_for,
    wait_until_gone,
    write,
)

pytestmark = pytest.mark.timeout(300)
IP = shutil.which("ip") or "/usr/sbin/ip"
SSHD = shutil.which("sshd") or "/usr/sbin/sshd"

# Every rank has a share of the batch and gradients are summed; a single rank has all of it.
TRAIN = """
import json, os, pathlib, sys, torch
import torch.distributed as dist
if "RANK" in os.environ:
    dist.init_process_group("gloo")
rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
torch.manual_seed(0)
model = torch.nn.Linear(6, 3, dtype=torch.float64)
data = torch.randn(5, 12, 6, dtype=torch.float64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(5):
    loss = model(data[step].chunk(size)[rank]).square().sum() / 12
    optimizer.zero_grad(); loss.backward()
    for value in (loss.detach(), *(p.grad for p in model.parameters())):
        dist.all_reduce(value) if size > 1 else None
        if value.dim() == 0: losses.append(value.item())
    optimizer.step()
if rank == 0:
    pathlib.Path(sys.argv[1]).write_text(json.dumps([size, losses]))
print("rank", rank, "of", size, "local", os.environ.get("LOCAL_RANK", 0), flush=True)
"""
STUCK = """
import os, pathlib, sys, time, torch.distributed as dist
dist.init_process_group("gloo")
pathlib.Path("rank-" + os.environ["RANK"]).write_text(str(os.getpid()))
if dist.get_rank() == 2 and sys.argv[1] == "exit":
    os._exit(3)
dist.barrier() if dist.get_rank() != 2 else time.sleep(100)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a single process: this one."""
    folder = tmp_path_factory.mktemp("reference")
    write(folder / "train.py", TRAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.setattr(sys, "argv", ["train.py", str(folder / "out")])
        runpy.run_path(str(folder / "train.py"))
    size, losses = json.loads((folder / "out").read_text())
    assert size == 1
    return list(losses)


def check_losses(path: Path, size: int, reference: list[float]) -> None:
    num_ranks, losses = json.loads(path.read_text())
    assert num_ranks == size
    assert losses == pytest.approx(reference, rel=1e-12)


def ip(*words: str, check: bool = True) -> bool:
    done = subprocess.run([IP, *words], capture_output=True, timeout=20, check=check)
    return done.returncode == 0


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Create two network namespaces on a bridge: 10.231.77.1 and .2, each on `eth0`."""
    if os.geteuid() != 0 or not Path(IP).exists():
        pytest.skip("network namespaces need root and ip")
    tag = f"sw{os.getpid() % 100000}"
    names = (f"{tag}a", f"{tag}b")
    try:
        if not ip("link", "add", f"{tag}br", "type", "bridge", check=False):
            pytest.skip("this machine cannot create bridges")
        ip("link", "set", f"{tag}br", "up")
        for number, name in enumerate(names, 1):
            ip("netns", "add", name)
            ip("link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{name}v", "master", f"{tag}br", "up")
            ip("-n", name, "addr", "add", f"10.231.77.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
        ip("link", "del", f"{tag}br", check=False)


def namespace_cluster(
    folder: Path, names: tuple[str, str], counts: tuple[int, int] = (2, 1)
) -> None:
    """Write a cluster file whose ssh enters the namespace of an address."""
    cases = "".join(f"10.231.77.{i}) node={name};;\n" for i, name in enumerate(names, 1))
    script = f"""#!/bin/bash
target=${{@: -2:1}}
case $target in
{cases}*) echo "ssh: connect to host $target port 22: No route to host" >&2; exit 255;;
esac
exec {IP} netns exec $node sh -c "${{@: -1}}"
"""
    write(folder / "fake ssh", script, 0o755)
    environment = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    cluster_file(folder, counts, addresses=("10.231.77.1", "10.231.77.2"), environment=environment)


@pytest.mark.slow
def test_two_namespaces_train_together(
    tmp_path: Path, namespaces: tuple[str, str], reference: list[float]
) -> None:
    """Two ranks on one node and one on the other have the losses of a single process."""
    write(tmp_path / "train.py", TRAIN)
    namespace_cluster(tmp_path, namespaces)
    code, out, err = run_launch(tmp_path, "--", "train.py", "out $(x)", timeout_s=120)
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "[a] rank 0 of 3 local 0",
        "[a] rank 1 of 3 local 1",
        "[b] rank 2 of 3 local 0",
    ]
    check_losses(tmp_path / "out $(x)", 3, reference)


@pytest.mark.slow
@pytest.mark.parametrize(("event", "expected"), [("exit", 3), ("kill", 137), ("interrupt", 130)])
def test_a_lost_rank_or_an_interrupt_stops_both_namespaces(
    tmp_path: Path, namespaces: tuple[str, str], event: str, expected: int
) -> None:
    write(tmp_path / "train.py", STUCK)
    namespace_cluster(tmp_path, namespaces)
    mark = f"mark-{tmp_path}"
    process = start_launch(tmp_path, "--", "train.py", event, mark)
    for rank in range(3):
        wait_for(tmp_path / f"rank-{rank}", 120)
    began = time.monotonic()
    if event == "kill":
        time.sleep(1)
        os.kill(int((tmp_path / "rank-2").read_text()), signal.SIGKILL)
    if event == "interrupt":
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == expected, err
    assert time.monotonic() - began < 30
    assert event == "interrupt" or f"node b failed with exit code {expected}" in err
    assert wait_until_gone(mark) == []


def test_a_busy_port_is_reported_for_its_namespace(
    tmp_path: Path, namespaces: tuple[str, str]
) -> None:
    """The port is checked on the first node; ports in use elsewhere do not matter."""
    write(tmp_path / "train.py", "")
    namespace_cluster(tmp_path, namespaces)
    listen = "import socket,time; s = socket.create_server(('', 29500)); print(1, flush=True)"
    server = subprocess.Popen(
        [IP, "netns", "exec", namespaces[0], sys.executable, "-c", f"{listen}; time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        code, _, err = run_launch(tmp_path, "--", "train.py")
        assert code == 1
        assert "port 29500 is in use\n  at: node a (10.231.77.1)" in err
    finally:
        server.kill()
        server.communicate(timeout=10)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int]]]:
    """Start two sshd on loopback with a throw-away key; `known` has their host key."""
    if not Path(SSHD).exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd here")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd changes its root there before a login
    folder = tmp_path_factory.mktemp("sshd")
    folder.chmod(0o700)
    for name in ("host", "key", "other"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(make, check=True, timeout=30)
    write(folder / "authorized", (folder / "key.pub").read_text(), 0o600)
    ports, running = [], []
    try:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            options = {
                "Port": port,
                "ListenAddress": "127.0.0.1",
                "HostKey": folder / "host",
                "AuthorizedKeysFile": folder / "authorized",
                "StrictModes": "no",
                "UsePAM": "no",
                "PidFile": "none",
                "PermitRootLogin": "prohibit-password",
                "PasswordAuthentication": "no",
            }
            words = [w for name, value in options.items() for w in ("-o", f"{name}={value}")]
            running.append(
                subprocess.Popen([SSHD, "-D", "-e", "-f", "/dev/null", *words], stderr=-3)
            )
            ports.append(port)
        host = (folder / "host.pub").read_text()
        known = "".join(f"[127.0.0.1]:{port} {host}" for port in ports)
        write(folder / "known", known)
        _wait_for_ports(ports)
        yield folder, ports
    finally:
        for server in running:
            server.terminate()
            server.wait(10)


def _wait_for_ports(ports: list[int]) -> None:
    end = time.monotonic() + 20
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < end, "sshd does not start"
                time.sleep(0.1)


def ssh_cluster(folder: Path, servers: tuple[Path, list[int]], *, key: str, known: str) -> None:
    """Write a cluster file of nodes `a` and `b` behind the two servers."""
    home, ports = servers
    settings = [
        {
            "key": str(home / key),
            "port": port,
            "options": [f"UserKnownHostsFile={home / known}", "StrictHostKeyChecking=yes"],
        }
        for port in ports
    ]
    path = cluster_file(folder, ssh={"port": "SSH"}, environment={"OMP_NUM_THREADS": "1"})
    text = path.read_text().replace("&id001", "").replace("*id001", "{port: SSH}")
    for node in settings:
        text = text.replace("{port: SSH}", json.dumps(node), 1).replace(
            "\n    port: SSH", " " + json.dumps(node), 1
        )
    path.write_text(text)


@pytest.mark.slow
def test_two_nodes_behind_sshd_train_together(
    tmp_path: Path, servers: tuple[Path, list[int]], reference: list[float]
) -> None:
    write(tmp_path / "train.py", TRAIN)
    ssh_cluster(tmp_path, servers, key="key", known="known")
    code, out, err = run_launch(tmp_path, "--port", "0", "--", "train.py", "o 'u' t", timeout_s=120)
    assert code == 0, err
    assert sorted(line[:4] for line in out.splitlines()) == ["[a] ", "[b] "]
    check_losses(tmp_path / "o 'u' t", 2, reference)


@pytest.mark.slow
def test_remote_processes_end_with_their_ssh(
    tmp_path: Path, servers: tuple[Path, list[int]]
) -> None:
    """When the launcher is killed, the guards behind sshd see their input end."""
    script = "import pathlib, os, time\npathlib.Path(f'on{os.getpid()}').touch()\ntime.sleep(100)\n"
    write(tmp_path / "train.py", script)
    ssh_cluster(tmp_path, servers, key="key", known="known")
    mark = f"mark-{tmp_path}"
    process = start_launch(tmp_path, "--port", "0", "--grace-s", "5", "--", "train.py", mark)
    end = time.monotonic() + 100
    while len(list(tmp_path.glob("on*"))) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=10)
    assert wait_until_gone(mark, 30) == []


def test_ssh_refusals_are_explained(tmp_path: Path, servers: tuple[Path, list[int]]) -> None:
    write(tmp_path / "train.py", "")
    write(servers[0] / "empty", "")
    wrong = (
        (servers[0] / "known")
        .read_text()
        .replace(
            (servers[0] / "host.pub").read_text().split()[1],
            (servers[0] / "other.pub").read_text().split()[1],
        )
    )
    write(servers[0] / "wrong", wrong)
    for key, known, message in (
        ("other", "known", "refuses the login as 127.0.0.1"),
        ("key", "empty", "its host key is not known here"),
        ("key", "wrong", "its host key is not the known one"),
    ):
        ssh_cluster(tmp_path, servers, key=key, known=known)
        code, _, err = run_launch(tmp_path, "--port", "0", "--", "train.py")
        assert code == 1
        assert f"node a: {message}" in err
        assert f"node b: {message}" in err
        assert "try: " in err


def test_unreachable_nodes_are_named_in_time(tmp_path: Path) -> None:
    """Unused addresses drop packets, refuse them or have no route, depending on the network."""
    write(tmp_path / "train.py", "")
    cluster_file(tmp_path, addresses=("198.51.100.1", "203.0.113.1"), ssh={"port": 2222})
    began = time.monotonic()
    code, _, err = run_launch(tmp_path, "--timeout-s", "1", "--", "train.py")
    assert code == 1
    assert time.monotonic() - began < 15
    assert "2 of 2 nodes cannot start" in err
    assert "198.51.100.1" in err
    assert "203.0.113.1" in err
