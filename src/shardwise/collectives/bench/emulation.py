"""Emulate a network by Linux namespaces, configured with `ip` and `tc`.

Every resource of the network is one queue: a pair of virtual cards whose first end is limited
(`tbf`) to the rate at which data get its capacity, with a burst of at least 128 KB or 4 ms. Packets
are routed by their source and the queue that they left last, so that a send crosses exactly its
resources, in their order. Ranks without an edge between them are connected over the fewest hops, as
hosts would route. Both ends of a pair of cards have the same hardware address and ARP is off, so
that only data travel.
"""

import contextlib
import math
import os
import secrets
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.collectives import Network
from shardwise.errors import ClusterError, LaunchError
from shardwise.processes import is_abandoned, owned, run_commands, terminated_as_interrupt

FRAME = 1514 / 1448  # bytes on the link per byte of data: TCP, IP and Ethernet headers
BURST_BYTES, BURST_S = 128_000, 4e-3  # minimums: smaller bursts distort rates
QUEUE_S = 0.07  # data that may wait in a queue before packets are dropped
FASTEST = 2.5e9  # bytes per second; faster queues would only cost CPU time
MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of namespaces, and lines for `ip -batch` and `tc -batch` in each."""

    hosts: tuple[str, ...]
    middle: str
    ip: dict[str, tuple[str, ...]]
    tc: tuple[str, ...]  # in the middle

    @property
    def names(self) -> tuple[str, ...]:
        return (self.middle, *self.hosts)


def layout(network: Network, prefix: str) -> Layout:
    """Return the namespaces of a network, whose names begin with `prefix`."""
    count = network.num_ranks
    if not 2 <= count <= MAX_RANKS:
        raise ClusterError(
            f"{count} ranks cannot be emulated", hint=f"--ranks: 2 to {MAX_RANKS} of them"
        )
    hosts = tuple(f"{prefix}-{rank}" for rank in range(count))
    middle = f"{prefix}-m"
    ip = {middle: (*_queues(network), *_ports(hosts), *_routes(network))}
    ip |= {host: tuple(_host(rank)) for rank, host in enumerate(hosts)}
    return Layout(hosts=hosts, middle=middle, ip=ip, tc=tuple(_rates(network)))


def address(rank: int) -> str:
    """Return the address of a rank in its namespace."""
    return f"10.86.{rank // 250}.{rank % 250 + 1}"


def _hardware(kind: int, number: int) -> str:
    return f"02:86:00:{kind:02x}:{number >> 8:02x}:{number & 255:02x}"


def _pair(first: str, second: str, hardware: str, into: str = "") -> str:
    peer = f"peer name {second} address {hardware}" + (f" netns {into}" if into else "")
    return f"link add {first} address {hardware} type veth {peer}"


def _queues(network: Network) -> Iterator[str]:
    """Yield the queues: resource r is a pair of cards from q{r} to e{r}."""
    for number in _limited(network):
        yield _pair(f"q{number}", f"e{number}", _hardware(1, number))
        for end in "qe":
            yield f"link set {end}{number} arp off up"


def _ports(hosts: tuple[str, ...]) -> Iterator[str]:
    """Yield the ports: the card of rank r has its other end at p{r}."""
    for rank, host in enumerate(hosts):
        yield _pair(f"p{rank}", "eth0", _hardware(0, rank), host)
        yield f"link set p{rank} arp off up"


def _host(rank: int) -> Iterator[str]:
    yield f"address add {address(rank)}/32 dev eth0"
    yield "link set eth0 arp off up"
    yield "link set lo up"
    yield "route add default dev eth0"


def _routes(network: Network) -> Iterator[str]:
    """Yield a routing table for each source rank and device at which its packets arrive."""
    tables: dict[tuple[int, str], int] = {}
    for a in range(network.num_ranks):
        for b, path in paths_from(network, a).items():
            arrivals = [f"p{a}", *(f"e{r}" for r in path)]
            departures = [*(f"q{r}" for r in path), f"p{b}"]
            for arrival, departure in zip(arrivals, departures, strict=True):
                if (a, arrival) not in tables:
                    tables[a, arrival] = 1000 + len(tables)
                    yield f"rule add from {address(a)} iif {arrival} lookup {tables[a, arrival]}"
                yield f"route replace {address(b)} dev {departure} table {tables[a, arrival]}"


def paths_from(network: Network, start: int) -> dict[int, tuple[int, ...]]:
    """Return the resources from a rank to every other one, in order and each at most once."""
    limited = _limited(network)
    used = [tuple(r for r in row if r in limited) for row in network.uses.tolist()]
    paths: dict[int, tuple[int, ...]] = {start: ()}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for e in range(network.num_edges):
            target = int(network.target[e])
            if network.source[e] == rank and target not in paths:
                paths[target] = tuple(dict.fromkeys((*paths[rank], *used[e])))
                queue.append(target)
    del paths[start]
    return paths


def _limited(network: Network) -> list[int]:
    """Return the resources that are emulated."""
    return [r for r, capacity in enumerate(network.capacity.tolist()) if capacity < FASTEST]


def _rates(network: Network) -> Iterator[str]:
    for number in _limited(network):
        rate = float(network.capacity[number]) * FRAME
        burst = math.ceil(max(BURST_BYTES, rate * BURST_S))
        limit = burst + math.ceil(max(rate * QUEUE_S, BURST_BYTES))
        sizes = f"rate {max(8, round(rate * 8))}bit burst {burst} limit {limit}"
        yield f"qdisc add dev q{number} root tbf {sizes}"


# ------------------------------------------------------------ namespaces
PREFIX = "sw"  # of namespaces
COMMAND_S = 30.0  # limit of one call of ip or tc
SETTINGS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}


@contextlib.contextmanager
def emulated(network: Network) -> Iterator[Layout]:
    """Emulate a network while the context lasts; first remove what killed runs left behind."""
    check_tools()
    _remove_abandoned()
    namespaces = layout(network, owned(PREFIX) + secrets.token_hex(2))
    with terminated_as_interrupt():
        try:
            _create(namespaces)
            yield namespaces
        finally:
            for name in namespaces.names:
                _call(["ip", "netns", "delete", name], check=False)


def run_on_hosts(
    namespaces: Layout,
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    environment: dict[str, str],
) -> None:
    """Run a command in the namespace of each rank; all have ended when this returns."""
    run_commands(
        [
            ["ip", "netns", "exec", host, *command]
            for host, command in zip(namespaces.hosts, commands, strict=True)
        ],
        what="the emulated network",
        timeout_s=timeout_s,
        environment={**environment, "GLOO_SOCKET_IFNAME": "eth0"},
    )


def check_tools() -> None:
    """Raise if this machine cannot create network namespaces."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LaunchError(
                f"emulating a network needs {tool!r}, which is not installed",
                hint="apt-get install iproute2",
            )
    if sys.platform != "linux" or os.geteuid() != 0:
        raise LaunchError(
            "emulating a network needs Linux namespaces, which only root can create",
            hint=f"sudo {shutil.which('shardwise') or 'shardwise'} collective bench … --emulate",
        )


def _create(namespaces: Layout) -> None:
    for name in namespaces.names:
        _call(["ip", "netns", "add", name])
    write = "; ".join(f"echo {v} > /proc/sys/net/ipv4/{k}" for k, v in SETTINGS.items())
    for name in namespaces.names:
        _call(["ip", "netns", "exec", name, "sh", "-c", write])
    for name, lines in namespaces.ip.items():
        _call(["ip", "-n", name, "-batch", "-"], lines)
    _call(["tc", "-n", namespaces.middle, "-batch", "-"], namespaces.tc)


def _call(command: Sequence[str], lines: Sequence[str] = (), *, check: bool = True) -> None:
    try:
        done = subprocess.run(
            command,
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"`{' '.join(command)}` took more than {COMMAND_S:g} s") from None
    if check and done.returncode:
        raise LaunchError(
            f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}",
            hint="root in a container needs CAP_NET_ADMIN and CAP_SYS_ADMIN",
        )


def _remove_abandoned() -> None:
    """Remove the namespaces of runs that were killed."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    for line in listed.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        if is_abandoned(name, PREFIX):
            _call(["ip", "netns", "delete", name], check=False)
