"""Check this machine, for `shardwise doctor`.

Every check yields `Finding`s: a name, a status and what to do about it. Missing optional packages
are `ok`, with the command that installs them. Checks that may crash the process (bf16 arithmetic on
some CPUs) run in a child process.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.formatting import size

Status = Literal["ok", "warn", "fail"]

_BF16 = """
import torch
a = torch.full((256, 256), 0.5, dtype=torch.bfloat16)
assert (a @ a)[0, 0].item() == 64.0
"""
_CHILD_TIMEOUT_S = 120
# Optional packages: name, minimum supported version, and the command that installs it.
_OPTIONAL = (
    ("transformers", (5, 20), 'pip install "shardwise[huggingface]"'),
    ("accelerate", (1, 12), 'pip install "shardwise[huggingface]"'),
    ("lightning", (2, 5), 'pip install "shardwise[lightning]"'),
    ("torchmetrics", (1,), 'pip install "shardwise[lightning]"'),
    ("tensorboard", (), 'pip install "shardwise[tensorboard]"'),
    ("wandb", (), 'pip install "shardwise[wandb]"'),
)
_PORT = 29500  # torchrun's default rendezvous port
_MIN_DISK, _MIN_SHM, _MIN_FILES = 5 * 2**30, 2**30, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: its result as text, and a hint where it is not ok."""

    name: str
    status: Status
    value: str
    hint: str = ""


def examine() -> tuple[Finding, ...]:
    """Run all checks; imports torch."""
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _versions,
        _packages,
        _compiler,
        _backends,
        _loopback,
        _port,
        _hostname,
        _memory,
        _disk,
        _shared_memory,
        _open_files,
        _bf16,
        _cuda,
    )
    return tuple(finding for check in checks for finding in check())


def to_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """Return the findings as data: `{"ok": bool, "checks": [...]}`."""
    items = [asdict(finding) for finding in findings]
    return {"ok": all(item["status"] != "fail" for item in items), "checks": items}


def show(findings: Iterable[Finding]) -> None:
    """Print the findings as a table on stdout."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, show_header=False)
    for finding in findings:
        color = colors[finding.status]
        text = escape(finding.value)
        if finding.hint:
            text += f"\n[{color}]try: {escape(finding.hint)}[/]"
        table.add_row(f"[{color}]{finding.status}[/]", finding.name, text)
    Console().print(table)


def _versions() -> Iterator[Finding]:
    yield Finding(name="python", status="ok", value=platform.python_version())
    for package in ("shardwise", "torch", "numpy"):
        version = str(importlib.import_module(package).__version__)
        yield Finding(name=package, status="ok", value=version)


def _packages() -> Iterator[Finding]:
    """Check the packages of integrations and logs, without importing them."""
    for package, minimum, install in _OPTIONAL:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name=package, status="ok", value="not installed", hint=install)
            continue
        numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
        old = numbers < minimum
        required = ".".join(map(str, minimum))
        yield Finding(
            name=package,
            status="warn" if old else "ok",
            value=version + (f", older than {required}" if old else ""),
            hint=install.replace("install", "install --upgrade") if old else "",
        )


def _compiler() -> Iterator[Finding]:
    """Check what `compile: true` and the user's own C++ operators need."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [
        what
        for what, exists in (("a C++ compiler", compiler), ("Python's headers", headers.is_file()))
        if not exists
    ]
    yield Finding(
        name="compiler",
        status="warn" if missing else "ok",
        value=f"no {' and no '.join(missing)}: compile: true fails" if missing else str(compiler),
        hint="apt install g++ python3-dev" if missing else "",
    )
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        yield Finding(name="nvcc", status="ok", value=nvcc)


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    available = dist.is_available()
    gloo = available and dist.is_gloo_available()
    yield Finding(
        name="gloo",
        status="ok" if gloo else "fail",
        value="available" if gloo else "missing",
        hint="" if gloo else "install a torch build with torch.distributed",
    )
    yield _nccl(available and dist.is_nccl_available())
    mpi = available and dist.is_mpi_available()
    yield Finding(name="mpi", status="ok", value="available" if mpi else "not in this build")


def _nccl(available: bool) -> Finding:
    """Check NCCL, through which GPUs communicate."""
    import torch

    if available:
        version = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
        return Finding(name="nccl", status="ok", value=".".join(map(str, version)) or "available")
    needed = torch.cuda.device_count() > 1
    return Finding(
        name="nccl",
        status="warn" if needed else "ok",
        value="not in this build" + (": GPUs communicate through the host" if needed else ""),
        hint="install a torch build for CUDA" if needed else "",
    )


def _loopback() -> Iterator[Finding]:
    """Bind a free port on 127.0.0.1, connect to it and send a byte."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x")
                    received = accepted.recv(1)
    except OSError as error:
        hint = "allow connections to 127.0.0.1; ranks on this machine need them"
        yield Finding(name="loopback", status="fail", value=str(error), hint=hint)
        return
    assert received == b"x"
    yield Finding(name="loopback", status="ok", value=f"port {port} on 127.0.0.1 answered")


def _port() -> Iterator[Finding]:
    """Check that the default rendezvous port is free."""
    try:
        with socket.create_server(("127.0.0.1", _PORT)):
            yield Finding(name="port", status="ok", value=f"{_PORT} is free")
    except OSError as error:
        yield Finding(
            name="port",
            status="warn",
            value=f"{_PORT}: {error.strerror or error}",
            hint="torchrun --master-port 29501, or shardwise launch --port 0",
        )


def _hostname() -> Iterator[Finding]:
    """Check that this machine's own name has an address, as gloo expects."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield Finding(
            name="host name",
            status="warn",
            value=f"{name}: {error}",
            hint="export GLOO_SOCKET_IFNAME=lo, or eth0 for several machines",
        )
        return
    yield Finding(name="host name", status="ok", value=f"{name} is {address}")


def _disk() -> Iterator[Finding]:
    """Check the disk space for checkpoints, and for temporary files of compilers and loaders."""
    seen: set[int] = set()
    for place in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            usage, device = shutil.disk_usage(place), place.stat().st_dev
        except OSError as error:
            yield Finding(name="disk", status="warn", value=f"{place}: {error.strerror}")
            continue
        if device in seen:
            continue
        seen.add(device)
        low = usage.free < _MIN_DISK
        yield Finding(
            name="disk",
            status="warn" if low else "ok",
            value=f"{place}: {size(usage.free)} free of {size(usage.total)}",
            hint="remove files, or train with --folder on another disk" if low else "",
        )


def _shared_memory() -> Iterator[Finding]:
    """Check `/dev/shm`, through which data loaders and ranks of one machine pass tensors."""
    place = Path("/dev/shm")
    if not place.is_dir():
        yield Finding(name="/dev/shm", status="ok", value="not on this system")
        return
    usage = shutil.disk_usage(place)
    low = usage.free < _MIN_SHM
    yield Finding(
        name="/dev/shm",
        status="warn" if low else "ok",
        value=f"{size(usage.free)} free of {size(usage.total)}",
        hint="docker run --ipc host, or --shm-size 8g; else data.workers: 0" if low else "",
    )


def _open_files() -> Iterator[Finding]:
    """Check the limit that many ranks and data loaders reach first."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 0 <= soft < _MIN_FILES
    yield Finding(
        name="open files",
        status="warn" if low else "ok",
        value=f"{soft} of at most {hard}",
        hint=f"ulimit -n {min(65536, hard) if hard > 0 else 65536}" if low else "",
    )


def _memory() -> Iterator[Finding]:
    yield Finding(name="cpus", status="ok", value=str(os.cpu_count() or 1))
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (page * os.sysconf(f"SC_{kind}PHYS_PAGES") for kind in ("AV", ""))
    except (AttributeError, ValueError, OSError):
        yield Finding(name="memory", status="warn", value="unknown on this system")
        return
    low = free < 2**30
    yield Finding(
        name="memory",
        status="warn" if low else "ok",
        value=f"{size(free)} free of {size(total)}",
        hint="use fewer ranks" if low else "",
    )


def _bf16() -> Iterator[Finding]:
    yield bf16_finding(_BF16)


def bf16_finding(program: str) -> Finding:
    """Run `program` in a child process and return how it ended."""
    name = "bf16 matmul"
    try:
        child = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(name=name, status="fail", value=f"no answer in {_CHILD_TIMEOUT_S} s")
    if child.returncode == 0:
        return Finding(name=name, status="ok", value="works")
    if child.returncode < 0:
        cause = signal.Signals(-child.returncode).name
        hint = "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
        return Finding(name=name, status="fail", value=f"crashes with {cause}", hint=hint)
    last = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
    return Finding(name=name, status="fail", value=last[0])


def _cuda() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding(name="cuda", status="ok", value="no devices")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {size(free)} free of {size(total)}"
        yield Finding(name=f"cuda:{index}", status="ok", value=text)
