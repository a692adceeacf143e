"""Where ranks meet: a store that listens at the address it is told, not on every interface.

Enters: an address and a port, or torchrun's variables. Leaves: torch's `TCPStore`, or the process
group. torch's own store takes a host name but accepts connections on all interfaces; whoever
reaches its port can read and write what ranks tell each other.
"""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwise.listening import listening_socket

__all__ = ["host_store", "init_process_group"]


def host_store(
    host: str,
    port: int = 0,
    *,
    num_hosts: int = 1,
    timeout: datetime.timedelta = datetime.timedelta(minutes=5),
) -> TCPStore:
    """Host a store at `host`, and be its first guest."""
    listener = listening_socket(host, port, num_hosts=num_hosts)
    return TCPStore(
        host_name=host,
        port=listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def init_process_group(backend: str, timeout: datetime.timedelta) -> None:
    """Join the group of torchrun's variables; rank 0 hosts the store if no agent does."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        num_hosts = 1 if os.environ.get("LOCAL_WORLD_SIZE") == str(size) else size
        store = host_store(host, port, num_hosts=num_hosts, timeout=timeout)
    else:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
