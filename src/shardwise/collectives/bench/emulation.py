"""A network as Linux namespaces: what `ip` and `tc` are told.

Every resource of the network is one queue: a pair of virtual cards whose first end sends no faster
than lets data have its capacity (`tbf`), with a burst of at least 128 KB or 4 ms. Between ranks,
packets are routed by where they come from and the queue that they left last, so that a send crosses
exactly the resources that the network says, in their order. Ranks without a send between them are
joined over others by the fewest hops, as hosts would route. Both ends of a pair of cards have one
hardware address, and nobody asks for addresses: nothing but data travels.
"""

from __future__ import annotations

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

FRAME = 1514 / 1448  # bytes on the wire for each of data: TCP, IP and Ethernet headers
BURST_BYTES, BURST_S = 128_000, 4e-3  # the least: smaller bursts distort rates
QUEUE_S = 0.07  # what may wait in a queue before packets are dropped
FASTEST = 2.5e9  # bytes per second; faster queues would only take the processor's time
MOST_RANKS = 64


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
    """Return the namespaces of a network, named `prefix` and more."""
    count = network.num_ranks
    if not 2 <= count <= MOST_RANKS:
        raise ClusterError(
            f"{count} ranks cannot be emulated", hint=f"--ranks: 2 to {MOST_RANKS} of them"
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
    return (
        f"link add {first} address {hardware} type veth peer name {second} address {hardware}"
        + (f" netns {into}" if into else "")
    )


def _queues(network: Network) -> Iterator[str]:
    """Resource r is from q{r} to e{r}."""
    for number in _limited(network):
        yield _pair(f"q{number}", f"e{number}", _hardware(1, number))
        for end in "qe":
            yield f"link set {end}{number} arp off up"


def _ports(hosts: tuple[str, ...]) -> Iterator[str]:
    """Rank r's card has its other end at p{r}."""
    for rank, host in enumerate(hosts):
        yield _pair(f"p{rank}", "eth0", _hardware(0, rank), host)
        yield f"link set p{rank} arp off up"


def _host(rank: int) -> Iterator[str]:
    yield f"address add {address(rank)}/32 dev eth0"
    yield "link set eth0 arp off up"
    yield "link set lo up"
    yield "route add default dev eth0"


def _routes(network: Network) -> Iterator[str]:
    """What comes from a and left queue q last goes to b through the next queue: a table for each
    pair of a and q.
    """
    tables: dict[tuple[int, str], int] = {}
    for a in range(network.num_ranks):
        for b, way in ways(network, a).items():
            entered = [f"p{a}", *(f"e{r}" for r in way)]
            left = [*(f"q{r}" for r in way), f"p{b}"]
            for came, goes in zip(entered, left, strict=True):
                if (a, came) not in tables:
                    tables[a, came] = 1000 + len(tables)
                    yield f"rule add from {address(a)} iif {came} lookup {tables[a, came]}"
                yield f"route replace {address(b)} dev {goes} table {tables[a, came]}"


def ways(network: Network, start: int) -> dict[int, tuple[int, ...]]:
    """Return the resources on the way from a rank to each other one, in order;
    each at most once.
    """
    limited = _limited(network)
    used = [tuple(r for r in row if r in limited) for row in network.uses.tolist()]
    found: dict[int, tuple[int, ...]] = {start: ()}
    direct = {
        int(network.target[e]): used[e]
        for e in range(network.num_edges)
        if network.source[e] == start
    }
    found |= direct
    queue = deque(direct)
    while queue:
        at = queue.popleft()
        for e in range(network.num_edges):
            to = int(network.target[e])
            if network.source[e] == at and to not in found:
                found[to] = tuple(dict.fromkeys((*found[at], *used[e])))
                queue.append(to)
    del found[start]
    return found


def _limited(network: Network) -> list[int]:
    """Return the resources that are emulated."""
    return [r for r, capacity in enumerate(network.capacity.tolist()) if capacity < FASTEST]


def _rates(network: Network) -> Iterator[str]:
    for number in _limited(network):
        wire = float(network.capacity[number]) * FRAME
        burst = math.ceil(max(BURST_BYTES, wire * BURST_S))
        limit = burst + math.ceil(max(wire * QUEUE_S, BURST_BYTES))
        yield f"qdisc add dev q{number} root tbf rate {max(8, round(wire * 8))}bit " + (
            f"burst {burst} limit {limit}"
        )


# Emulated hosts: namespaces made, used by processes, and removed.
#
# What a killed run left behind is removed by the next.


PREFIX = "sw"  # of namespaces
COMMAND_S = 30.0  # limit of one call of ip or tc
SETTINGS = {"ip_forward": "1", "conf/all/rp_filter": "0", "conf/default/rp_filter": "0"}


@contextlib.contextmanager
def emulated(network: Network) -> Iterator[Layout]:
    """The network, as long as the context lasts."""
    check_tools()
    _remove_left_behind()
    plan = layout(network, owned(PREFIX) + secrets.token_hex(2))
    with terminated_as_interrupt():
        try:
            _make(plan)
            yield plan
        finally:
            for name in plan.names:
                _call(["ip", "netns", "delete", name], check=False)


def run_all(
    plan: Layout,
    commands: Sequence[Sequence[str]],
    *,
    timeout_s: float,
    environment: dict[str, str],
) -> None:
    """A command in the namespace of each rank; all are over, or dead, when this returns."""
    run_commands(
        [
            ["ip", "netns", "exec", host, *command]
            for host, command in zip(plan.hosts, commands, strict=True)
        ],
        what="the emulated network",
        timeout_s=timeout_s,
        environment={**environment, "GLOO_SOCKET_IFNAME": "eth0"},
    )


def check_tools() -> None:
    """Refuse where namespaces cannot be made, and say why."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LaunchError(
                f"networks are emulated with {tool!r}, which is not installed",
                hint="apt-get install iproute2",
            )
    if sys.platform != "linux" or os.geteuid() != 0:
        raise LaunchError(
            "networks are emulated with Linux namespaces, which only root makes",
            hint=f"sudo {shutil.which('shardwise') or 'shardwise'} collective bench … --emulate",
        )


def _make(plan: Layout) -> None:
    for name in plan.names:
        _call(["ip", "netns", "add", name])
    write = "; ".join(f"echo {v} > /proc/sys/net/ipv4/{k}" for k, v in SETTINGS.items())
    for name in plan.names:
        _call(["ip", "netns", "exec", name, "sh", "-c", write])
    for name, lines in plan.ip.items():
        _call(["ip", "-n", name, "-batch", "-"], lines)
    _call(["tc", "-n", plan.middle, "-batch", "-"], plan.tc)


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


def _remove_left_behind() -> None:
    """Namespaces of runs that are no more."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    for line in listed.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        if is_abandoned(name, PREFIX):
            _call(["ip", "netns", "delete", name], check=False)
