"""A socket that listens at the address it is told, not on every interface."""

from __future__ import annotations

import errno
import ipaddress
import socket

__all__ = ["listening_socket"]


def listening_socket(host: str, port: int = 0, *, num_hosts: int = 1) -> socket.socket:
    """Return a socket that listens at `host` alone; port 0 takes a free one.

    An address that is none of this machine's, as of a Kubernetes service, and a host's own name
    that means the loopback interface here although other hosts connect, can only be reached through
    all interfaces: such a socket listens on these.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    everywhere = num_hosts > 1 and loopback and not _is_address(host) and host != "localhost"
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port) if everywhere else address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
