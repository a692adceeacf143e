"""Where ranks meet: a store that listens at the address it is told, not on every interface.

Enters: an address and a port, or torchrun's variables. Leaves: torch's `TCPStore`, or the process
group. torch's own store takes a host name but accepts connections on all interfaces; whoever
reaches its port can read and write what ranks tell each other.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.listening import listening_socket

__all__ = ["host_store", "init_process_group", "meeting_store"]


def host_store(
    host: str,
    port: int = 0,
    *,
    num_hosts: int = 1,
    timeout: datetime.timedelta = datetime.timedelta(minutes=5),
) -> TCPStore:
    """Host a store at `host`, and connect to it."""
    listener = listening_socket(host, port, num_hosts=num_hosts)
    return TCPStore(
        host_name=host,
        port=listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def meeting_store(
    host: str, port: int, *, rank: int, num_hosts: int, timeout: datetime.timedelta
) -> TCPStore | None:
    """Return the store of a group, which rank 0 hosts; None where torchrun's agent hosts it."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    if rank == 0:
        return host_store(host, port, num_hosts=num_hosts, timeout=timeout)
    return TCPStore(host, port, is_master=False, timeout=timeout)


def init_process_group(backend: str, timeout: datetime.timedelta) -> None:
    """Join the group of torchrun's variables; rank 0 hosts the store if no agent does."""
    if "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = meeting_store(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        rank=rank,
        num_hosts=1 if os.environ.get("LOCAL_WORLD_SIZE") == str(size) else size,
        timeout=timeout,
    )
    place: dict[str, Any] = {}
    if store is not None:
        place = {"store": store, "rank": rank, "world_size": size}
    dist.init_process_group(backend, timeout=timeout, **place)
