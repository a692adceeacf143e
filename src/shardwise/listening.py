"""Open listening sockets on one address instead of on every interface."""

import errno
import ipaddress
import socket


def listening_socket(host: str, port: int = 0, *, num_hosts: int = 1) -> socket.socket:
    """Return a socket that listens only on `host`; port 0 selects a free port.

    It listens on all interfaces if `host` is not an address of this machine (a Kubernetes service),
    or if it is a name that resolves to the loopback interface although other hosts connect.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    loopback = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    all_interfaces = num_hosts > 1 and loopback and not _is_address(host) and host != "localhost"
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port) if all_interfaces else address)
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
