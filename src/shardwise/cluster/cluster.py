"""The machines: nodes with devices, and the links between them.

Enters: JSON, or a number of ranks on this machine. Leaves: `Cluster`, which plans are made for
and estimates are computed from. Rank order is node by node, device by device.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.errors import ClusterError, did_you_mean

FORMAT_VERSION = 1

# Estimates for `Cluster.local`, rounded from single runs on a shared x86 server with torch 2.13: a
# 1024 x 1024 matmul on one thread; gloo all-reduces between 2 processes of 4 bytes (0.4 to 3.6 ms)
# and of 64 MiB (101 to 461 ms).
_CPU_FLOPS_PER_S = (("bfloat16", 1.0e10), ("float32", 2.5e10), ("float64", 1.2e10))
_LOOPBACK_BANDWIDTH_BYTES_PER_S = 0.6e9
_LOOPBACK_LATENCY_S = 4.0e-4
_FALLBACK_MEMORY_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one process's share of a CPU; rates are by dtype name."""

    kind: str
    memory_bytes: int
    flops_per_s: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        _require_positive("memory_bytes", self.memory_bytes, self.kind)
        for dtype, rate in self.flops_per_s:
            _require_positive(f"flops_per_s of {dtype}", rate, self.kind)

    def rate(self, dtype: str) -> float:
        """Floating-point operations per second in `dtype`, for example "float32"."""
        rates = dict(self.flops_per_s)
        if dtype not in rates:
            known = ", ".join(rates)
            raise ClusterError(
                f"device {self.kind} has no rate for {dtype}, only for {known}",
                hint=f'add "{dtype}" to flops_per_s',
            )
        return rates[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection, in each direction: time = latency_s + bytes / bandwidth_bytes_per_s."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        _require_positive("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, "link")
        if self.latency_s < 0:
            raise ClusterError(f"latency_s is {self.latency_s}, must not be negative", where="link")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine: `count` equal devices and the link between any two of them."""

    name: str
    device: Device
    count: int
    link: Link

    def __post_init__(self) -> None:
        _require_positive("count", self.count, f"node {self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes, and the link between any two nodes.

    >>> Cluster.local(4).num_ranks
    4
    """

    name: str
    nodes: tuple[ClusterNode, ...]
    network: Link

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError(f"cluster {self.name} has no nodes", hint="Cluster.local(4)")

    @classmethod
    def local(cls, num_ranks: int) -> Cluster:
        """`num_ranks` CPU processes on this machine, connected by gloo over loopback.

        Memory is this machine's, shared equally. Compute rates and the link are estimates for a
        server CPU, one thread per rank, not a measurement of this machine; ranks beyond its
        number of cores share them.
        """
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise ClusterError(
                f"a cluster needs at least 1 rank, not {num_ranks!r}", hint="Cluster.local(2)"
            )
        share = min(1.0, (os.cpu_count() or 1) / num_ranks)
        device = Device(
            kind="cpu",
            memory_bytes=_machine_memory_bytes() // num_ranks,
            flops_per_s=tuple((dtype, rate * share) for dtype, rate in _CPU_FLOPS_PER_S),
        )
        link = Link(
            bandwidth_bytes_per_s=_LOOPBACK_BANDWIDTH_BYTES_PER_S, latency_s=_LOOPBACK_LATENCY_S
        )
        node = ClusterNode(name="localhost", device=device, count=num_ranks, link=link)
        return cls(name="local", nodes=(node,), network=link)

    @property
    def num_ranks(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def fingerprint(self) -> str:
        """Hex digest of every field."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def node_of(self, rank: int) -> ClusterNode:
        """The machine that `rank` runs on."""
        return self.nodes[self._node_index(rank)]

    def link_between(self, a: int, b: int) -> Link:
        """The link that traffic from rank `a` to rank `b` crosses."""
        first, second = self._node_index(a), self._node_index(b)
        return self.nodes[first].link if first == second else self.network

    def _node_index(self, rank: int) -> int:
        if not 0 <= rank < self.num_ranks:
            raise ClusterError(f"rank {rank} is outside a cluster of {self.num_ranks} ranks")
        ends = itertools.accumulate(node.count for node in self.nodes)
        return next(index for index, end in enumerate(ends) if rank < end)

    def to_json(self) -> str:
        """The cluster as versioned JSON text, readable and editable."""
        nodes = [asdict(node) for node in self.nodes]
        for node in nodes:
            node["device"]["flops_per_s"] = dict(node["device"]["flops_per_s"])
        document = {
            "version": FORMAT_VERSION,
            "name": self.name,
            "nodes": nodes,
            "network": asdict(self.network),
        }
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """The cluster that `to_json` wrote; errors name the field."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ClusterError(f"not JSON: {error}") from None
        version = document.pop("version", None) if isinstance(document, dict) else None
        if version != FORMAT_VERSION:
            raise ClusterError(
                f"cluster format version {version!r}, this is {FORMAT_VERSION}",
                hint=f'"version": {FORMAT_VERSION}',
            )
        top = _checked(cls, document, "cluster")
        if not isinstance(top["nodes"], list):
            raise ClusterError("nodes is not a list", where="cluster")
        nodes = tuple(_node(item, f"nodes[{i}]") for i, item in enumerate(top["nodes"]))
        network = Link(**_checked(Link, top["network"], "network"))
        return cls(name=top["name"], nodes=nodes, network=network)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to `path`."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read what `save` wrote."""
        return cls.from_json(Path(path).read_text())

    def __str__(self) -> str:
        parts = [
            f"{node.count} x {node.device.kind} ({node.device.memory_bytes / 2**30:.1f} GiB each)"
            f" on {node.name}"
            for node in self.nodes
        ]
        return f"Cluster {self.name}: {self.num_ranks} ranks; {'; '.join(parts)}"


def _node(item: Any, where: str) -> ClusterNode:
    entries = _checked(ClusterNode, item, where)
    device = _checked(Device, entries["device"], f"{where}.device")
    if not isinstance(device["flops_per_s"], Mapping):
        raise ClusterError("flops_per_s is not an object", where=f"{where}.device")
    device["flops_per_s"] = tuple(device["flops_per_s"].items())
    entries["device"] = Device(**device)
    entries["link"] = Link(**_checked(Link, entries["link"], f"{where}.link"))
    return ClusterNode(**entries)


def _checked(kind: type[Any], item: Any, where: str) -> dict[str, Any]:
    """`item` as a dict with exactly the fields of the dataclass `kind`."""
    names = [field.name for field in fields(kind)]
    if not isinstance(item, dict):
        raise ClusterError(f"expected an object with {', '.join(names)}", where=where)
    for name in item:
        if name not in names:
            raise ClusterError(f"unknown field {name!r}{did_you_mean(name, names)}", where=where)
    for name in names:
        if name not in item:
            raise ClusterError(f"field {name!r} is missing", where=where)
    return dict(item)


def _require_positive(name: str, value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ClusterError(f"{name} is {value!r}, must be a number above 0", where=where)


def _machine_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return _FALLBACK_MEMORY_BYTES
