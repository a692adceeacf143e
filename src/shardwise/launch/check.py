"""Every node is asked before any work starts: can it be reached, has it what it needs?"""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.hosts import Place, meeting_address, rank_program, reach, script_of
from shardwise.version import __version__

# What a node says of itself before anything starts on it.
#
# Only the standard library is imported here, and torch for GPUs.


MARK = "shardwise-node "


def show(folder: str, script: str, meet: str, port: int | None, gpus: bool) -> None:
    """Print what `examine` finds."""
    sys.stdout.write(f"\n{MARK}{json.dumps(examine(folder, script, meet, port, gpus))}\n")
    sys.stdout.flush()


def examine(folder: str, script: str, meet: str, port: int | None, gpus: bool) -> dict[str, Any]:
    """Versions; whether folder, script and the name `meet` are known; GPUs; and a free port."""
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": _version("torch"),
        "shardwise": _version("shardwise"),
        "folder": os.path.isdir(folder),
        "script": not script or os.path.isfile(os.path.join(folder, script)),
        "meet": not meet or is_known(meet),
    }
    if gpus:
        import torch

        found["gpus"] = torch.cuda.device_count()
    if port is not None:
        found["port"] = port if port and is_free(port) else free_port()
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def is_known(host: str) -> bool:
    """Whether the name or number of a host has an address here."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def is_free(port: int) -> bool:
    """Whether a server could listen there, on every address."""
    for family, address in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        try:
            server = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 here
        with server:
            # As the store does: connections that are closing do not count.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                server.bind((address, port))
                server.listen(1)
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    return False
    return True


def free_port() -> int:
    """One that the system has to give."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


SSH_FAILED = 255
MUTE = "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with one node, and what to type."""

    node: str
    message: str
    hint: str


Answer = dict[str, Any] | Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """All nodes can start; their ranks meet at `port` of the first."""

    port: int
    warnings: tuple[str, ...] = ()


def check_nodes(
    found: Sequence[Place], argv: Sequence[str], port: int, timeout_s: float
) -> Checked:
    """Ask all nodes at once. Port 0 takes one that is free on the first node."""
    meet = meeting_address(found)
    script = script_of(rank_program(argv))
    questions = []
    for index, place in enumerate(found):
        words = ["check", "--folder", place.folder or os.getcwd(), "--meet", meet]
        words += ["--script", script] if script else []
        words += ["--port", str(port)] if index == 0 else []
        words += ["--gpus"] if place.kind == "cuda" else []
        questions.append(reach(place, words, timeout_s))
    answers = _ask(found, questions, timeout_s)
    faults = []
    for place, answer in zip(found, answers, strict=True):
        fault = answer if isinstance(answer, Fault) else _lacking(place, script, meet, answer)
        if fault is not None:
            faults.append(fault)
    if faults:
        raise _error(faults, len(found))
    said = [answer for answer in answers if isinstance(answer, dict)]
    if port and said[0]["port"] != port:
        raise LaunchError(
            f"port {port} is in use",
            where=f"node {found[0].name} ({found[0].address}), where the ranks meet",
            hint=f"--port {said[0]['port']}, or --port 0 for any that is free",
        )
    return Checked(port=said[0]["port"], warnings=_differences(found, said))


def _ask(
    found: Sequence[Place], questions: Sequence[Sequence[str]], timeout_s: float
) -> list[Answer]:
    """Run all commands at once, and no longer than `timeout_s`."""
    end = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    asked: list[subprocess.Popen[bytes] | Fault] = []
    try:
        for place, argv in zip(found, questions, strict=True):
            try:
                asked.append(
                    subprocess.Popen(
                        argv,
                        stdin=subprocess.DEVNULL,
                        stdout=pipe,
                        stderr=pipe,
                        start_new_session=True,
                    )
                )
            except OSError as error:
                message = f"cannot run {argv[0]}: {error.strerror}"
                hint = "ssh: {program: ssh} in the cluster file, or --ssh-program"
                asked.append(Fault(node=place.name, message=message, hint=hint))
        return [_answer(place, one, end) for place, one in zip(found, asked, strict=True)]
    finally:
        for one in asked:
            if not isinstance(one, Fault) and one.poll() is None:
                one.kill()


def _answer(place: Place, asked: subprocess.Popen[bytes] | Fault, end: float) -> Answer:
    if isinstance(asked, Fault):
        return asked
    try:
        out, err = asked.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        if place.ssh is None:
            message = "its Python does not answer in time"
            return Fault(node=place.name, message=message, hint="--timeout-s 300")
        return explain_ssh(place, MUTE)
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            said: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return said
    text = err.decode(errors="replace").strip()
    if place.ssh is not None and asked.returncode == SSH_FAILED:
        return explain_ssh(place, text)
    return _explain_python(place, text, asked.returncode)


def explain_ssh(place: Place, text: str) -> Fault:
    """What ssh said, in terms of what can be done about it."""
    ssh, address = place.ssh, place.address
    port = ssh.port if ssh is not None else 22
    target = f"{ssh.user}@{address}" if ssh is not None and ssh.user else address
    typed = " ".join(["ssh", *(["-p", str(port)] if port != 22 else []), shlex.quote(target)])
    known = f"[{address}]:{port}" if port != 22 else address
    by_port = f"-p {port} " if port != 22 else ""
    cases = (
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED",
            "its host key is not the known one: another machine answers, or it was reinstalled",
            f"if you know why: ssh-keygen -R {shlex.quote(known)}",
        ),
        (
            "Host key verification failed",
            "its host key is not known here",
            f"ssh-keyscan {by_port}{shlex.quote(address)} >> ~/.ssh/known_hosts "
            "(compare the key first)",
        ),
        (
            "Permission denied",
            f"refuses the login as {target}",
            f"ssh-copy-id {by_port}{shlex.quote(target)}; or ssh: {{user: …, key: …}}; or ssh-add",
        ),
        ("Could not resolve", f"there is no host {address!r}", "address: 10.0.0.1 of that node"),
        ("Connection refused", f"nothing listens at port {port} of {address}", f"{typed}: sshd?"),
        ("timed out", f"does not answer at {address} port {port}", f"ping {address}; {typed}"),
        (MUTE, f"does not answer in time at {address} port {port}", f"{typed}; --timeout-s 300"),
        ("No route to host", f"no route to {address}", f"ping {address}"),
        ("unreachable", f"no route to {address}", f"ping {address}"),
        ("not accessible", f"the key {ssh.key if ssh else ''} cannot be read", "ssh: {key: …}"),
    )
    for sign, message, hint in cases:
        if sign in text:
            return Fault(node=place.name, message=message, hint=hint)
    last = text.splitlines()[-1] if text else "no reason given"
    return Fault(node=place.name, message=f"ssh failed: {last}", hint=typed)


def _explain_python(place: Place, text: str, code: int) -> Fault:
    python = place.python or sys.executable
    if "No module named" in text and "shardwise" in text:
        return Fault(
            node=place.name,
            message=f"{python} has no shardwise {__version__}",
            hint=f"pip install shardwise=={__version__} there; or start: {{python: …}}",
        )
    if code in (126, 127):
        return Fault(
            node=place.name,
            message=f"no Python at {python}",
            hint="start: {python: ~/venv/bin/python} in the cluster file",
        )
    last = text.splitlines()[-1] if text else "and said nothing"
    return Fault(
        node=place.name, message=f"{python} failed with exit code {code}: {last}", hint="look there"
    )


def _lacking(place: Place, script: str, meet: str, said: dict[str, Any]) -> Fault | None:
    folder = place.folder or os.getcwd()
    if not said["folder"]:
        hint = "start: {folder: …} in the cluster file, or copy the project there"
        return Fault(node=place.name, message=f"no folder {folder}", hint=hint)
    if not said["script"]:
        hint = "start: {folder: …} in the cluster file, or copy the file there"
        return Fault(node=place.name, message=f"no {script} in {folder}", hint=hint)
    if not said["meet"]:
        hint = "address: 10.0.0.1, its number, at the first node of the cluster file"
        message = f"it does not know {meet!r}, where the ranks meet"
        return Fault(node=place.name, message=message, hint=hint)
    if not said["torch"]:
        hint = "pip install torch there; or start: {python: …}"
        return Fault(node=place.name, message="no torch", hint=hint)
    if "gpus" in said and said["gpus"] < place.num_devices:
        return Fault(
            node=place.name,
            message=f"{said['gpus']} GPUs, the cluster file says {place.num_devices}",
            hint="nvidia-smi there; or correct devices: in the cluster file",
        )
    return None


def _differences(found: Sequence[Place], said: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Versions that are not those of the first node."""
    return tuple(
        f"node {place.name} has {name} {answer[name]}, node {found[0].name} {said[0][name]}"
        for place, answer in zip(found, said, strict=True)
        for name in ("shardwise", "torch")
        if answer[name] != said[0][name]
    )


def _error(faults: Sequence[Fault], num_nodes: int) -> LaunchError:
    if len(faults) == 1:
        (fault,) = faults
        return LaunchError(f"node {fault.node}: {fault.message}", hint=fault.hint)
    shown = "".join(f"\n  node {f.node}: {f.message}\n    try: {f.hint}" for f in faults[:8])
    more = f"\n  and {len(faults) - 8} more" if len(faults) > 8 else ""
    return LaunchError(f"{len(faults)} of {num_nodes} nodes cannot start{shown}{more}")
