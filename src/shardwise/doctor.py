"""Check this machine, for `shardwise doctor`.

Every check yields `Finding`s: a name, a status, a value and what to try. A missing optional package
is `ok`, with the command that installs it. A check that may crash the process (bf16 arithmetic on
some CPUs) runs in a child process.
"""

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
import time
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
# A rank of a group: backend, rank, number of ranks, address of the store. It sums 16 MB, sends them
# around a ring, and prints the seconds of both.
_RANK = """
import datetime, sys, time
import torch
import torch.distributed as dist
backend, rank, size, address = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
device = torch.device("cpu")
if backend == "nccl":
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
limit = datetime.timedelta(seconds=60)
dist.init_process_group(
    backend, init_method=address, rank=rank, world_size=size, timeout=limit
)
data, out = torch.ones(1 << 22, device=device), torch.empty(1 << 22, device=device)
def ring():
    ends = ((dist.isend, data, (rank + 1) % size), (dist.irecv, out, (rank - 1) % size))
    for work in dist.batch_isend_irecv([dist.P2POp(*end) for end in ends]):
        work.wait()
seconds = []
for call in (lambda: dist.all_reduce(data, dist.ReduceOp.MAX), ring):
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        call()
        float(out[0] + data[0])
        last = time.perf_counter() - start
    seconds.append(last)
assert data[0] == 1 and out[-1] == 1
if rank == 0:
    print(*seconds)
dist.destroy_process_group()
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
    """The result of a check as text, with a hint if it is not ok."""

    name: str
    status: Status
    value: str
    hint: str = ""


def _finding(
    name: str, value: str, *, warn: bool = False, fail: bool = False, hint: str = ""
) -> Finding:
    """Return an `ok` finding, or a warning or failure with a hint."""
    status: Status = "fail" if fail else "warn" if warn else "ok"
    return Finding(name=name, status=status, value=value, hint=hint if warn or fail else "")


def examine() -> tuple[Finding, ...]:
    """Run all checks; imports torch."""
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _versions, _packages, _compiler, _backends, _loopback, _port, _hostname, _memory, _disk,
        _shared_memory, _open_files, lambda: [bf16_finding(_BF16)], _cuda, _ranks,
    )  # fmt: skip
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
    yield _finding("python", platform.python_version())
    for package in ("shardwise", "torch", "numpy"):
        yield _finding(package, str(importlib.import_module(package).__version__))


def _packages() -> Iterator[Finding]:
    """Check the packages for integrations and logs without importing them."""
    for package, minimum, install in _OPTIONAL:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name=package, status="ok", value="not installed", hint=install)
            continue
        numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
        old = numbers < minimum
        required = ".".join(map(str, minimum))
        yield _finding(
            package,
            version + (f", older than {required}" if old else ""),
            warn=old,
            hint=install.replace("install", "install --upgrade"),
        )


def _compiler() -> Iterator[Finding]:
    """Check the compiler for `compile: true` and C++ operators of the user."""
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    required = (("C++ compiler", compiler), ("Python headers", headers.is_file()))
    missing = [name for name, exists in required if not exists]
    yield _finding(
        "compiler",
        f"no {' and no '.join(missing)}: compile: true fails" if missing else str(compiler),
        warn=bool(missing),
        hint="apt install g++ python3-dev",
    )
    if nvcc := shutil.which("nvcc"):
        yield _finding("nvcc", nvcc)


def _backends() -> Iterator[Finding]:
    import torch.distributed as dist

    available = dist.is_available()
    gloo = available and dist.is_gloo_available()
    hint = "install a torch build with torch.distributed"
    yield _finding("gloo", "available" if gloo else "missing", fail=not gloo, hint=hint)
    yield _nccl(available and dist.is_nccl_available())
    mpi = available and dist.is_mpi_available()
    yield _finding("mpi", "available" if mpi else "not in this build")


def _nccl(available: bool) -> Finding:
    """Check NCCL, through which GPUs communicate."""
    import torch

    if available:
        version = torch.cuda.nccl.version() if torch.cuda.is_available() else ()  # type: ignore[no-untyped-call]
        return _finding("nccl", ".".join(map(str, version)) or "available")
    needed = torch.cuda.device_count() > 1
    return _finding(
        "nccl",
        "not in this build" + (": GPUs communicate through the host" if needed else ""),
        warn=needed,
        hint="install a torch build for CUDA",
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
        yield _finding("loopback", str(error), fail=True, hint=hint)
        return
    assert received == b"x"
    yield _finding("loopback", f"port {port} on 127.0.0.1 answered")


def _port() -> Iterator[Finding]:
    """Check that the default rendezvous port is free."""
    try:
        with socket.create_server(("127.0.0.1", _PORT)):
            yield _finding("port", f"{_PORT} is free")
    except OSError as error:
        hint = "torchrun --master-port 29501, or shardwise launch --port 0"
        yield _finding("port", f"{_PORT}: {error.strerror or error}", warn=True, hint=hint)


def _hostname() -> Iterator[Finding]:
    """Check that the name of this machine resolves to an address, as gloo expects."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        hint = "export GLOO_SOCKET_IFNAME=lo, or eth0 for several nodes"
        yield _finding("host name", f"{name}: {error}", warn=True, hint=hint)
        return
    yield _finding("host name", f"{name} is {address}")


def _disk() -> Iterator[Finding]:
    """Check the disk space for checkpoints and for temporary files."""
    devices: set[int] = set()
    for place in (Path.cwd(), Path(tempfile.gettempdir())):
        try:
            usage, device = shutil.disk_usage(place), place.stat().st_dev
        except OSError as error:
            yield _finding("disk", f"{place}: {error.strerror}", warn=True)
            continue
        if device in devices:
            continue
        devices.add(device)
        yield _finding(
            "disk",
            f"{place}: {size(usage.free)} free of {size(usage.total)}",
            warn=usage.free < _MIN_DISK,
            hint="remove files, or train with --folder on another disk",
        )


def _shared_memory() -> Iterator[Finding]:
    """Check `/dev/shm`, which data loaders and ranks of one node use to exchange tensors."""
    place = Path("/dev/shm")
    if not place.is_dir():
        yield _finding("/dev/shm", "not on this system")
        return
    usage = shutil.disk_usage(place)
    yield _finding(
        "/dev/shm",
        f"{size(usage.free)} free of {size(usage.total)}",
        warn=usage.free < _MIN_SHM,
        hint="docker run --ipc host, or --shm-size 8g; else data.workers: 0",
    )


def _open_files() -> Iterator[Finding]:
    """Check the limit of open files, which many ranks and data loaders reach first."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield _finding(
        "open files",
        f"{soft} of at most {hard}",
        warn=0 <= soft < _MIN_FILES,
        hint=f"ulimit -n {min(65536, hard) if hard > 0 else 65536}",
    )


def _memory() -> Iterator[Finding]:
    yield _finding("cpus", str(os.cpu_count() or 1))
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (page * os.sysconf(f"SC_{kind}PHYS_PAGES") for kind in ("AV", ""))
    except (AttributeError, ValueError, OSError):
        yield _finding("memory", "unknown on this system", warn=True)
        return
    text = f"{size(free)} free of {size(total)}"
    yield _finding("memory", text, warn=free < 2**30, hint="use fewer ranks")


def bf16_finding(program: str) -> Finding:
    """Run `program` in a child process and report how it ended."""
    name, command = "bf16 matmul", [sys.executable, "-c", program]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _finding(name, f"no answer in {_CHILD_TIMEOUT_S} s", fail=True)
    if child.returncode == 0:
        return _finding(name, "works")
    if child.returncode < 0:
        cause = signal.Signals(-child.returncode).name
        hint = "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
        return _finding(name, f"crashes with {cause}", fail=True, hint=hint)
    last = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
    return _finding(name, last[0], fail=True)


def _cuda() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield _finding("cuda", "no devices")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {size(free)} free of {size(total)}"
        yield _finding(f"cuda:{index}", text)


def _ranks() -> Iterator[Finding]:
    """Let the GPUs of this machine communicate; two ranks share a single GPU."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        yield _finding("ranks", "no GPUs: NCCL was not tried")
    elif dist.is_nccl_available():
        yield ranks_finding("nccl", torch.cuda.device_count())


def ranks_finding(backend: str, num_gpus: int) -> Finding:
    """Start a rank for each GPU, at least two; report the times of their messages."""
    from shardwise.runtime.rendezvous import host_store, shared_gpu_environment

    num_ranks, store = max(2, num_gpus), host_store("127.0.0.1")
    address = f"tcp://127.0.0.1:{store.port}"
    environment = os.environ | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, backend, str(rank), str(num_ranks), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | (shared_gpu_environment(rank) if num_gpus < 2 else {}),
        )
        for rank in range(num_ranks)
    ]
    name, shared = f"{backend} ranks", ", sharing one GPU over sockets" if num_gpus == 1 else ""
    hint = (
        "NCCL_DEBUG=INFO shardwise doctor; NCCL_SOCKET_IFNAME=eth0 selects the network, "
        "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 avoid a broken link, docker needs --ipc host"
    )
    deadline = time.monotonic() + _CHILD_TIMEOUT_S
    try:
        outputs = [
            rank.communicate(timeout=max(0.1, deadline - time.monotonic())) for rank in ranks
        ]
    except subprocess.TimeoutExpired:
        value = f"{num_ranks} ranks gave no answer in {_CHILD_TIMEOUT_S} s"
        return _finding(name, value, fail=True, hint=hint)
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, outputs, strict=True)):
        if rank.returncode:
            last = errors.strip().splitlines()[-1:] or [f"exit code {rank.returncode}"]
            return _finding(name, f"rank {number}: {last[0]}", fail=True, hint=hint)
    reduced, sent = (1e3 * float(seconds) for seconds in outputs[0][0].split()[-2:])
    times = f"all-reduce of 16 MB {reduced:.1f} ms, send and receive {sent:.1f} ms"
    return _finding(name, f"{num_ranks} ranks{shared}: {times}")
