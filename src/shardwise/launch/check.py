"""Check every node before any process starts: it must be reachable and have all it needs."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.hosts import Host, master_address, node_argv, rank_program
from shardwise.launch.node import ANSWER_PREFIX
from shardwise.version import __version__

SSH_FAILED = 255
NO_ANSWER = "no answer"
MAX_SHOWN = 8  # nodes in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A reason why a node cannot start, and what to do about it."""

    node: str
    message: str
    hint: str


Answer = dict[str, Any] | Fault


def check_nodes(
    hosts: Sequence[Host], argv: Sequence[str], port: int, timeout_s: float
) -> tuple[int, tuple[str, ...]]:
    """Check all nodes at once; return the port of the rendezvous, and warnings.

    Port 0 selects one that is free on the first node.
    """
    address = master_address(hosts)
    program = rank_program(argv)
    script = program[1] if program[0] == "--" else ""
    commands = []
    for index, host in enumerate(hosts):
        words = ["check", "--folder", host.folder or os.getcwd(), "--master-addr", address]
        words += ["--script", script] if script else []
        words += ["--port", str(port)] if index == 0 else []
        words += ["--gpus"] if host.kind == "cuda" else []
        commands.append(node_argv(host, words, timeout_s))
    answers: list[dict[str, Any]] = []
    faults: list[Fault] = []
    for host, answer in zip(hosts, _ask(hosts, commands, timeout_s), strict=True):
        fault = answer if isinstance(answer, Fault) else _missing(host, script, address, answer)
        if fault is not None:
            faults.append(fault)
        elif isinstance(answer, dict):
            answers.append(answer)
    if faults:
        raise _error(faults, len(hosts))
    first, free_port = hosts[0], answers[0]["port"]
    if port and free_port != port:
        raise LaunchError(
            f"port {port} is in use",
            where=f"node {first.name} ({first.address}), which hosts the rendezvous",
            hint=f"--port {free_port}, or --port 0 to select a free one",
        )
    warnings = tuple(
        f"node {host.name} has {name} {answer[name]}, node {first.name} {answers[0][name]}"
        for host, answer in zip(hosts, answers, strict=True)
        for name in ("shardwise", "torch")
        if answer[name] != answers[0][name]
    )
    return free_port, warnings


def _ask(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], timeout_s: float
) -> list[Answer]:
    """Run all commands at once, for at most `timeout_s` seconds together."""
    end = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    processes: list[subprocess.Popen[bytes] | Fault] = []
    try:
        for host, argv in zip(hosts, commands, strict=True):
            try:
                process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
                )
            except OSError as error:
                message = f"cannot run {argv[0]}: {error.strerror}"
                hint = "ssh: {program: ssh} in the cluster file, or --ssh-program"
                processes.append(Fault(node=host.name, message=message, hint=hint))
            else:
                processes.append(process)
        return [
            started if isinstance(started, Fault) else _answer(host, started, end)
            for host, started in zip(hosts, processes, strict=True)
        ]
    finally:
        for started in processes:
            if not isinstance(started, Fault) and started.poll() is None:
                started.kill()


def _answer(host: Host, process: subprocess.Popen[bytes], end: float) -> Answer:
    try:
        out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        if host.ssh is None:
            message = "its Python does not answer in time"
            return Fault(node=host.name, message=message, hint="--timeout-s 300")
        return explain_ssh(host, NO_ANSWER)
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(ANSWER_PREFIX):
            answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER_PREFIX))
            return answer
    text = err.decode(errors="replace").strip()
    if host.ssh is not None and process.returncode == SSH_FAILED:
        return explain_ssh(host, text)
    return _explain_python(host, text, process.returncode)


def explain_ssh(host: Host, text: str) -> Fault:
    """Translate an error message of ssh into its cause and remedy."""
    ssh, address = host.ssh, host.address
    port = ssh.port if ssh is not None else 22
    port_option = f"-p {port} " if port != 22 else ""
    target = f"{ssh.user}@{address}" if ssh is not None and ssh.user else address
    command = f"ssh {port_option}{shlex.quote(target)}"
    known_host = f"[{address}]:{port}" if port != 22 else address
    causes = (
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED",
            "its host key is not the known one: another machine answers, or it was reinstalled",
            f"if you know why: ssh-keygen -R {shlex.quote(known_host)}",
        ),
        (
            "Host key verification failed",
            "its host key is not known here",
            f"ssh-keyscan {port_option}{shlex.quote(address)} >> ~/.ssh/known_hosts "
            "(compare the key first)",
        ),
        (
            "Permission denied",
            f"refuses the login as {target}",
            f"ssh-copy-id {port_option}{shlex.quote(target)}; "
            "or ssh: {user: …, key: …}; or ssh-add",
        ),
        ("Could not resolve", f"there is no host {address!r}", "address: 10.0.0.1 of that node"),
        ("Connection refused", f"nothing listens at port {port} of {address}", f"{command}: sshd?"),
        ("timed out", f"does not answer at {address} port {port}", f"ping {address}; {command}"),
        (
            NO_ANSWER,
            f"does not answer in time at {address} port {port}",
            f"{command}; --timeout-s 300",
        ),
        ("No route to host", f"no route to {address}", f"ping {address}"),
        ("unreachable", f"no route to {address}", f"ping {address}"),
        ("not accessible", f"the key {ssh.key if ssh else ''} cannot be read", "ssh: {key: …}"),
    )
    for sign, message, hint in causes:
        if sign in text:
            return Fault(node=host.name, message=message, hint=hint)
    last = text.splitlines()[-1] if text else "no reason given"
    return Fault(node=host.name, message=f"ssh failed: {last}", hint=command)


def _explain_python(host: Host, text: str, code: int) -> Fault:
    python = host.python or sys.executable
    if "No module named" in text and "shardwise" in text:
        message = f"{python} has no shardwise {__version__}"
        hint = f"pip install shardwise=={__version__} there; or start: {{python: …}}"
    elif code in (126, 127):
        message = f"no Python at {python}"
        hint = "start: {python: ~/venv/bin/python} in the cluster file"
    else:
        last = text.splitlines()[-1] if text else "no error message"
        message = f"{python} failed with exit code {code}: {last}"
        hint = "run it on that node"
    return Fault(node=host.name, message=message, hint=hint)


def _missing(host: Host, script: str, address: str, answer: dict[str, Any]) -> Fault | None:
    """Return the first thing that a node lacks."""
    folder = host.folder or os.getcwd()
    for name, message, hint in (
        (
            "folder",
            f"no folder {folder}",
            "start: {folder: …} in the cluster file, or copy the project there",
        ),
        (
            "script",
            f"no {script} in {folder}",
            "start: {folder: …} in the cluster file, or copy the file there",
        ),
        (
            "master_addr",
            f"cannot resolve {address!r}, which hosts the rendezvous",
            "address: 10.0.0.1, the IP address of the first node, in the cluster file",
        ),
        ("torch", "no torch", "pip install torch there; or start: {python: …}"),
    ):
        if not answer[name]:
            return Fault(node=host.name, message=message, hint=hint)
    if answer.get("gpus", host.num_devices) < host.num_devices:
        return Fault(
            node=host.name,
            message=f"{answer['gpus']} GPUs, but the cluster file lists {host.num_devices}",
            hint="nvidia-smi there; or correct devices: in the cluster file",
        )
    return None


def _error(faults: Sequence[Fault], num_nodes: int) -> LaunchError:
    if len(faults) == 1:
        (fault,) = faults
        return LaunchError(f"node {fault.node}: {fault.message}", hint=fault.hint)
    lines = "".join(
        f"\n  node {fault.node}: {fault.message}\n    try: {fault.hint}"
        for fault in faults[:MAX_SHOWN]
    )
    more = f"\n  and {len(faults) - MAX_SHOWN} more" if len(faults) > MAX_SHOWN else ""
    return LaunchError(f"{len(faults)} of {num_nodes} nodes cannot start{lines}{more}")
