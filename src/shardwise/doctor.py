"""Checks of this machine, for `shardwise doctor`.

Enters: nothing. Leaves: `Finding`s, each a name, a status and what to do about it. What may crash
a process (bf16 arithmetic on some CPUs) runs in a child.
"""

from __future__ import annotations

import importlib
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]

_BF16 = """
import torch
a = torch.full((256, 256), 0.5, dtype=torch.bfloat16)
assert (a @ a)[0, 0].item() == 64.0
"""
_CHILD_TIMEOUT_S = 120


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
        _backends,
        _loopback,
        _memory,
        _bf16,
        _cuda,
    )
    return tuple(finding for check in checks for finding in check())


def to_dict(findings: Iterable[Finding]) -> dict[str, Any]:
    """`{"ok": bool, "checks": [...]}`, for JSON."""
    items = [asdict(finding) for finding in findings]
    return {"ok": all(item["status"] != "fail" for item in items), "checks": items}


def show(findings: Iterable[Finding]) -> None:
    """Print the findings as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = Table(box=None, show_header=False)
    for finding in findings:
        color = colors[finding.status]
        text = finding.value + (f"\n[{color}]try: {finding.hint}[/]" if finding.hint else "")
        table.add_row(f"[{color}]{finding.status}[/]", finding.name, text)
    Console().print(table)


def _versions() -> Iterator[Finding]:
    yield Finding(name="python", status="ok", value=platform.python_version())
    for package in ("shardwise", "torch", "numpy"):
        version = str(importlib.import_module(package).__version__)
        yield Finding(name=package, status="ok", value=version)


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
    for name, present in (
        ("nccl", available and dist.is_nccl_available()),
        ("mpi", available and dist.is_mpi_available()),
    ):
        yield Finding(name=name, status="ok", value="available" if present else "not in this build")


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
        value=f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB",
        hint="use fewer ranks" if low else "",
    )


def _bf16() -> Iterator[Finding]:
    yield bf16_finding(_BF16)


def bf16_finding(program: str) -> Finding:
    """Run `program` in a child and say how it ended."""
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
        text = (
            f"{torch.cuda.get_device_name(index)}, "
            f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB"
        )
        yield Finding(name=f"cuda:{index}", status="ok", value=text)
