"""Build the cluster of a row from its device label and a text about its links.

Labels are such as "H100-80GB (DGX-H100)", texts such as "8x400Gb/s IB per node".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from itertools import permutations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.optimize import LinearConstraint, milp

from shardwise.cluster import Cluster, Device, Factor, Link
from shardwise.cluster.device import Curve, Rates
from shardwise.cluster.links import OPERATIONS, Factors
from shardwise.errors import ShardwiseError
from shardwise.formatting import GIB
from shardwise.published.rows import Row, Unusable, is_empty, is_missing
from shardwise.schema import Reader, parse_yaml

# ------------------------------------------------------------ nodes without a switch
#
# NVLinks between V100s of a DGX-1, p3.16xlarge or p3dn.24xlarge form a hybrid cube mesh: see
# `nvidia-smi topo -m`, and NVIDIA DGX-1 System Architecture (2017). A group of few devices shares
# few links.

CUBE_MESH = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
NUM_LINKS = 6  # per device
LINK_BYTES_PER_S = 25e9  # NVLink 2, one direction
# PCIe 3.0 x16 carries 12 GB/s (the preset's host_bytes_per_s), used if there is no link.
_HOST_LINKS = 12 / 25


@lru_cache(maxsize=512)
def ring_links(devices: tuple[int, ...]) -> float:
    """Return the links out of each device that rings through all `devices` can use at once.

    A ring runs in both directions; between two devices, every link is a ring.

    >>> [ring_links(tuple(range(n))) for n in (2, 4, 8)], ring_links((0, 2, 4, 6))
    ([1, 4, 6], 2)
    """
    first, *others = devices
    if len(devices) == 2:
        return CUBE_MESH[first][others[0]] or _HOST_LINKS
    uses = []  # the links of each ring, between all pairs of devices
    for order in permutations(others):
        steps = np.zeros((len(CUBE_MESH), len(CUBE_MESH)))
        steps[(first, *order), (*order, first)] = 1
        ring = steps + steps.T
        if order[0] < order[-1] and not (ring > CUBE_MESH).any():  # skip the reversed ring
            uses.append(ring.ravel())
    if not uses:
        return _HOST_LINKS
    limits = LinearConstraint(np.transpose(uses), ub=np.ravel(CUBE_MESH))
    return 2 * round(-float(milp(-np.ones(len(uses)), integrality=1, constraints=limits).fun))


# ------------------------------------------------------------ rates of training
#
# Presets have the best rates measured for single operators. A step of a published stack achieves
# only a fraction of them: its operators are not the best of their kind, clocks drop under load, and
# a model has operators that a table of its dims does not reveal. Only these factors are fitted
# (`benchmarks/calibrate.py`).


# Loss of a step per doubling of the nodes: all ranks wait for the slowest.
WAITING = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Fractions of a preset's rates: products, fused attention, memory, and links within a node.

    `overlap_loss` is the fraction of communication time that compute loses, because both share
    memory and multiprocessors. With 1, no communication is hidden.
    """

    matmul: float
    attention: float
    memory: float
    link: float
    overlap_loss: float = 0.5

    def on(self, device: Device, variant: Variant) -> Device:
        """Return a variant of the device with these rates."""
        matmul, attention = self.matmul * variant.matmul, self.attention * variant.matmul
        return replace(
            device,
            matmul_flops_per_s=_scaled(device.matmul_flops_per_s, matmul),
            attention_flops_per_s=_scaled(device.attention_flops_per_s, attention),
            memory_bytes_per_s=_times(device.memory_bytes_per_s, self.memory * variant.memory),
            overlap_loss=self.overlap_loss,
        )


def waiting(nodes: int) -> float:
    """Return the factor by which waiting for the slowest of `nodes` nodes prolongs a step."""
    return 1.0 + WAITING * math.log2(nodes)


def _scaled(rates: Rates, factor: float) -> Rates:
    return tuple((dtype, _times(curve, factor)) for dtype, curve in rates)


def _times(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, rate * factor) for size, rate in curve.points))


# ------------------------------------------------------------ device labels
FLOAT8 = "float8_e4m3fn"
PCIE_BYTES_PER_S = 25e9  # PCIe 4.0 x16 carries 31.5 GB/s per direction, of which DMA reaches 80%
# A memory size in a label means the preset's if it differs by less: GB or GiB, error correction.
_SAME_MEMORY = 0.06

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*G(?:i?B)?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A pattern of device labels, with a preset and its key in `achieved`."""

    pattern: str
    preset: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A device that differs from its preset in rates, links or memory."""

    pattern: str = ""
    matmul: float = 1.0
    memory: float = 1.0
    link_bytes_per_s: float | None = None
    memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The contents of `machines.yaml`."""

    achieved: Mapping[str, Achieved]
    labels: tuple[Label, ...]
    variants: tuple[Variant, ...]
    instances_gbit: Mapping[str, int]
    ports_gbit: Mapping[str, int]


def _read_tables() -> Tables:
    text = resources.files("shardwise.published").joinpath("machines.yaml").read_text("utf-8")
    data, lines = parse_yaml(text, ShardwiseError, where="machines.yaml")
    tables: Tables = Reader(ShardwiseError, "machines.yaml", lines).read(Tables, data)
    return tables


TABLES = _read_tables()
_SAME = Variant()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The preset of a device, its key in `achieved`, and its differences from the preset."""

    preset: str
    name: str
    variant: Variant = _SAME
    memory_gib: float | None = None  # as labelled

    @property
    def is_old(self) -> bool:
        """Whether stacks without fused attention ran on it."""
        return self.name in ("v100", "a100")

    def memory_bytes(self, preset_bytes: int) -> int:
        """Return the device's memory."""
        labelled = None if self.memory_gib is None else round(self.memory_gib * GIB)
        if labelled is not None and abs(labelled / preset_bytes - 1) > _SAME_MEMORY:
            return labelled
        variant_gib = self.variant.memory_gib
        return preset_bytes if variant_gib is None else round(variant_gib * GIB)


def read_device(label: str) -> Kind:
    """Return the device that a label names.

    >>> kind = read_device("H100-80GB (DGX-H100)")
    >>> kind.preset, kind.name
    ('h100', 'dgx')
    """
    variant = next((v for v in TABLES.variants if _has(label, v.pattern)), _SAME)
    for known in TABLES.labels:
        if _has(label, known.pattern):
            sizes = [float(size) for size in _MEMORY.findall(label)]
            memory_gib = next((size for size in sizes if size > 0), None)
            return Kind(
                preset=known.preset, name=known.name, variant=variant, memory_gib=memory_gib
            )
    supported = "V100, A100, A800, H100, H800, H200, B200, B300, GB200, GB300, MI300X"
    raise Unusable(f"unknown device {label!r}; supported devices: {supported}")


def _has(label: str, pattern: str) -> bool:
    """Return whether the label has a name that is not part of another one, except after "DGX"."""
    before = "(?:(?<![A-Z0-9])|(?<=DGX)|(?<=HGX))"
    return re.search(rf"{before}(?:{pattern})(?![0-9])", label.upper()) is not None


# ------------------------------------------------------------ links
_GB = 1e9

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(G|T)(b|B)(?:it)?(?:ps|/s)?")
# Nodes of V100s without a switch.
_CUBES = re.compile(r"p3\.(8|16)xlarge|p3dn\.24xlarge|dgx-1\b", re.IGNORECASE)
_IN_A_NODE = re.compile(r"nvlink|nvswitch|pcie|dgx|single[\s-]*node|intra", re.IGNORECASE)
_CUBE_MESH_EFFICIENCY = 0.85  # bus bandwidth of nccl-tests relative to the links', 8 ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of device and the links that a row describes; None stands for the preset's."""

    kind: Kind
    achieved: Achieved
    node_network_bytes_per_s: float | None = None
    device_network_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


def read_machine(gpu: str, interconnect: str) -> Machine:
    """Return the machine described by a device label and a text about its links."""
    kind = read_device(gpu)
    text = "" if is_empty(interconnect) else interconnect
    node, device = _network(gpu, text)
    return Machine(
        kind=kind,
        achieved=TABLES.achieved[kind.name],
        node_network_bytes_per_s=node,
        device_network_bytes_per_s=device,
        link_bytes_per_s=kind.variant.link_bytes_per_s or _link_rate(text),
    )


def cluster_of(row: Row, achieved: Achieved | None = None) -> Cluster:
    """Return the row's cluster: a preset with the row's deviations."""
    machine = read_machine(row.gpu, row.interconnect)
    if achieved is not None:
        machine = replace(machine, achieved=achieved)
    in_preset = Cluster.preset(machine.kind.preset).nodes[0].count
    is_cube = _CUBES.search(f"{row.gpu} {row.interconnect}") is not None
    per_node = row.gpus_per_node or (min(in_preset, len(CUBE_MESH)) if is_cube else in_preset)
    while row.gpus % per_node:  # the largest equal nodes
        per_node -= 1
    network = machine.node_network_bytes_per_s
    if machine.device_network_bytes_per_s is not None:
        network = machine.device_network_bytes_per_s * per_node
    cluster = Cluster.preset(
        machine.kind.preset,
        nodes=row.gpus // per_node,
        devices_per_node=per_node,
        nic_gbit_per_s=None if network is None else network * 8 / _GB,
    )
    cluster = _customized(cluster, machine)
    if row.dtype == "float8" and FLOAT8 not in cluster.nodes[0].device.dtypes:
        raise Unusable(f"{cluster.nodes[0].device.name} does not support float8")
    if is_cube:
        cluster = _without_switch(cluster, row, machine.achieved.link)
    return cluster


def _without_switch(cluster: Cluster, row: Row, achieved: float) -> Cluster:
    """Return a cube mesh, in which a group has only the links between its own devices."""
    (node,) = cluster.nodes
    if node.link is None or node.count > len(CUBE_MESH):
        return cluster
    link = replace(
        node.link,
        bandwidth_bytes_per_s=NUM_LINKS * LINK_BYTES_PER_S,
        efficiency=_CUBE_MESH_EFFICIENCY * achieved,
        collectives=_factors(row, node.count),
    )
    return replace(cluster, nodes=(replace(node, link=link),))


def _factors(row: Row, per_node: int) -> Factors:
    """Return the slowdown of groups within a node relative to all links, by size."""
    grid = np.arange(row.gpus).reshape(row.pp, row.dp * row.cp, row.tp)
    links: dict[int, float] = {}  # of the group with the fewest, by size
    for axis, size in enumerate(grid.shape):
        groups = np.moveaxis(grid, axis, -1).reshape(-1, size)
        if axis == 0:  # stages only send to the next one
            size = min(size, 2)
            groups = sliding_window_view(groups, size, axis=-1).reshape(-1, size)
        in_node = groups[groups[:, 0] // per_node == groups[:, -1] // per_node] % per_node
        if size > 1 and in_node.size:
            distinct = np.unique(in_node, axis=0).tolist()
            fewest = min(ring_links(tuple(sorted(group))) for group in distinct)
            links[size] = min(fewest, links.get(size, fewest))
    factors = tuple(
        Factor(ranks=size, bytes=Curve.constant(NUM_LINKS / fewest))
        for size, fewest in sorted(links.items())
    )
    return tuple((operation, factors) for operation in OPERATIONS) if factors else ()


def _customized(cluster: Cluster, machine: Machine) -> Cluster:
    """Return the cluster with the rates of training, and the row's memory and link."""
    (node,) = cluster.nodes
    link, network = node.link, cluster.network
    device = machine.achieved.on(node.device, machine.kind.variant)
    device = replace(device, memory_bytes=machine.kind.memory_bytes(device.memory_bytes))
    if link is not None:
        link = _link_of(link, machine)
    else:
        every = _nodes_used(cluster.num_nodes, network.domains[0].every) if network.domains else 0
        domains = tuple(
            replace(d, link=_link_of(d.link, machine), every=every) for d in network.domains
        )
        network = replace(network, domains=domains)
    node = replace(node, devices=(device,) * node.count, link=link)
    return replace(cluster, nodes=(node,), network=network)


def _nodes_used(nodes: int, per_domain: int) -> int:
    """Return how many nodes of each domain a run uses: equally many, as schedulers allocate them.

    512 devices in racks of 72 are 8 times 64. Runs do not leave half of a domain empty.
    """
    equal = max((n for n in range(1, per_domain + 1) if nodes % n == 0), default=per_domain)
    return equal if 2 * equal >= per_domain or nodes <= per_domain else per_domain


def _link_of(link: Link, machine: Machine) -> Link:
    bandwidth = machine.link_bytes_per_s or link.bandwidth_bytes_per_s
    efficiency = link.efficiency * machine.achieved.link
    return replace(link, bandwidth_bytes_per_s=bandwidth, efficiency=efficiency)


def _network(label: str, text: str) -> tuple[float | None, float | None]:
    """Return the bytes per second of a node or of each device, if the texts state them.

    "8x400Gb/s" counts a node's ports. A single rate is a node's, unless the text says "per GPU" or
    describes InfiniBand, which has one port per device.
    """
    for instance, gbit in TABLES.instances_gbit.items():
        if instance in f"{label} {text}".lower():
            return gbit / 8 * _GB, None
    for part in re.split(r"[;,]", text):
        low = part.lower()
        if "nvlink" in low or "nvswitch" in low:
            continue
        ports = re.search(r"(\d+)\s*[x\u00d7]", low)
        of_node = re.search(r"node|machine|server|host", low)
        of_device = re.search(r"per[\s-]*(gpu|device|accelerator)", low) or (
            not of_node
            and re.search(rf"\bib\b|infiniband|{'|'.join(TABLES.ports_gbit).lower()}", low)
        )
        rate = _rate(part)
        if rate is None:
            continue
        if ports:
            return int(ports[1]) * rate, None
        return (None, rate) if of_device else (rate, None)
    return None, None


def unread_links(text: str) -> str:
    """Return the part of a text about links that cannot be parsed, if no part states a rate.

    >>> unread_links("NVLink; carrier pigeon")
    'carrier pigeon'
    """
    if is_missing(text) or _network("", text) != (None, None):
        return ""
    parts = [part.strip() for part in re.split(r"[;,]", text)]
    return "; ".join(part for part in parts if part and not _IN_A_NODE.search(part))


def _rate(part: str) -> float | None:
    """Return the bytes per second stated in a text, as a number or an InfiniBand generation."""
    match = _RATE.search(part)
    if match:
        size, scale, unit = match.groups()
        return float(size) * (1 if scale == "G" else 1000) * _GB / (8 if unit == "b" else 1)
    ports = [g for name, g in TABLES.ports_gbit.items() if re.search(rf"\b{name}\b", part.upper())]
    return ports[0] / 8 * _GB if ports else None


def _link_rate(text: str) -> float | None:
    """Return bytes per second between devices of a node; NVLink is quoted for both directions."""
    for part in re.split(r"[;,]", text):
        low = part.lower()
        rate = _rate(part)
        if ("nvlink" in low or "nvswitch" in low) and rate is not None and "B/s" in part:
            return rate / 2
        if "pcie" in low and "nvlink" not in text.lower():
            return PCIE_BYTES_PER_S
    return None
