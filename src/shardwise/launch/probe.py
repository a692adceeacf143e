"""What a node says of itself before anything starts on it.

Enters: the folder, script and port of a launch. Leaves: a line of JSON after a mark, since a
login may print lines of its own. Only the standard library is imported here, and torch for GPUs.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from importlib import metadata
from typing import Any

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
