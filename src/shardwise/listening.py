"""Open listening sockets on one address instead of on every interface; recognize loopback."""

import errno
import ipaddress
import socket


def listening_socket(host: str, port: int = 0, *, num_hosts: int = 1) -> socket.socket:
    """Return a socket that listens only on `host`; port 0 selects a free port.

    It listens on all interfaces if `host` is not an address of this machine (a Kubernetes service),
    or if it is a name that resolves to the loopback interface although other hosts connect.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_name = _address(host) is None and host != "localhost"
    all_interfaces = num_hosts > 1 and is_name and is_loopback(str(address[0]).partition("%")[0])
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


def is_loopback(host: str) -> bool:
    """Return whether an address is on the loopback interface; of names, only localhost is known.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
