"""Build the cluster of a row from its device label and a description of its links, such as
"8x400Gb/s IB per node".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise, permutations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from shardwise.cluster import Cluster, Device, Factor, Link
from shardwise.cluster.device import Curve, Rates
from shardwise.cluster.links import OPERATIONS, Factors
from shardwise.cost.kernels import MEMORY, Kernel
from shardwise.formatting import GIB
from shardwise.ir import Graph
from shardwise.published.rows import Row, Unusable, is_empty, is_unsaid
from shardwise.simulation.workload import FORWARD, WEIGHT, Launch, NodeCollective, Workload

# Model devices of a node that are linked pair by pair without a switch: how many links carry what a
# group's rings send out of each device. Few devices of a cube mesh share few links.


# NVLinks between V100s of a DGX-1, p3.16xlarge or p3dn.24xlarge, a hybrid cube mesh: `nvidia-smi
# topo -m` there. NVIDIA DGX-1 System Architecture (2017) draws it.
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
WIRES = 6  # per device
WIRE_BYTES_PER_S = 25e9  # NVLink 2, one way
# PCIe 3.0 x16 carries 12 GB/s (the preset's host_bytes_per_s), used where there is no link.
_HOST_WIRES = 12 / 25


def slowest(groups: Iterable[tuple[int, ...]]) -> float:
    """Return the smallest number of links of any group;
    devices are counted from 0 in their node.
    """
    return min((ring_wires(tuple(sorted(group))) for group in groups), default=float(WIRES))


@lru_cache(maxsize=512)
def ring_wires(devices: tuple[int, ...]) -> float:
    """Return the links out of each device that rings through all `devices` use at once.

    A ring runs in both directions; between two devices, every link is a ring.

    >>> [ring_wires(tuple(range(n))) for n in (2, 4, 8)], ring_wires((0, 2, 4, 6))
    ([1, 4, 6], 2)
    """
    first, *rest = devices
    if len(devices) == 2:
        return CUBE_MESH[first][rest[0]] or _HOST_WIRES
    orders = (
        (first, *order, first)
        for order in permutations(rest)
        if order[0] < order[-1]  # each ring once, not also reversed
    )
    rings = [ring for ring in orders if all(CUBE_MESH[a][b] for a, b in pairwise(ring))]
    return 2 * _most(rings, {}) or _HOST_WIRES


def _most(rings: list[tuple[int, ...]], used: dict[frozenset[int], int]) -> int:
    """Return how many of the rings can run at once, each on its own links."""
    best = 0
    for at, ring in enumerate(rings):
        edges = [frozenset(pair) for pair in pairwise(ring)]
        taken = used | {edge: used.get(edge, 0) + 1 for edge in edges}
        if all(count <= CUBE_MESH[min(edge)][max(edge)] for edge, count in taken.items()):
            best = max(best, 1 + _most(rings[at:], taken))
        if best == WIRES // 2:
            break
    return best


# Fractions of a device's rates that training steps reach, by kind of device.
#
# Presets hold the best rates measured for single operators. A step of a published stack reaches
# only a fraction of them: its operators are not the best of their kind, clocks drop under load, and
# a model has operators that a table of its dims does not reveal. These factors are all that is
# fitted (`benchmarks/calibrate.py`).


# Loss of a step per doubling of the nodes: all ranks wait for the slowest.
WAITING = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Fractions of a preset's rates: matrix products, fused attention, memory, and links within a
    node.

    `overlap_loss` is the fraction of communication time that compute loses, because both share
    memory and multiprocessors. With 1, nothing is hidden.
    """

    matmul: float
    attention: float
    memory: float
    link: float
    overlap_loss: float = 0.5

    def times(self, matmul: float, memory: float) -> Reached:
        """Return the fractions reached by a device that has these fractions of the same rates."""
        attention = self.attention * matmul
        return replace(
            self, matmul=self.matmul * matmul, attention=attention, memory=self.memory * memory
        )

    def on(self, device: Device) -> Device:
        """Return the device with these rates."""
        return replace(
            device,
            matmul_flops_per_s=_scaled(device.matmul_flops_per_s, self.matmul),
            attention_flops_per_s=_scaled(device.attention_flops_per_s, self.attention),
            memory_bytes_per_s=_times(device.memory_bytes_per_s, self.memory),
            overlap_loss=self.overlap_loss,
        )


# Fitted to shared/data/published_calibration.csv, all rows of a kind of device at once; B200 and
# GB200, which it does not have, to other tables (docs/guides/predictions.md).
REACHED = {
    # Megatron-LM 2020, Alpa: V100 has no fused attention, and its stacks computed and communicated
    # one after the other
    "v100": Reached(matmul=0.8, attention=1.0, memory=0.83, link=0.9, overlap_loss=1.0),
    # llm-foundry, Megatron-LM, InternEvo
    "a100": Reached(matmul=0.87, attention=0.6, memory=0.48, link=0.95),
    # llm-foundry of 2023, whose attention was written for A100
    "h100": Reached(matmul=0.84, attention=0.37, memory=0.56, link=0.94),
    # NVIDIA's recipes on its own machines: cuDNN's attention, fused operators, reductions in the
    # switch; also for later devices, which were only measured with such stacks. Above 1 for
    # products: large ones of the preset are at 0.87 of the best rate, as power limits an H200.
    "dgx": Reached(matmul=1.06, attention=0.7, memory=0.96, link=1.4),
    # The same with two dies in the power of a rack: clocks fall further under load
    "b200": Reached(matmul=0.9, attention=0.7, memory=0.96, link=1.4),
    # NVLinks of a rack, over which products and messages were not overlapped
    "gb200": Reached(matmul=0.9, attention=0.7, memory=0.96, link=1.0),
}


def waiting(nodes: int) -> float:
    """Return the factor by which waiting for the slowest of `nodes` nodes prolongs a step."""
    return 1.0 + WAITING * math.log2(nodes)


def _scaled(rates: Rates, factor: float) -> Rates:
    return tuple((dtype, _times(curve, factor)) for dtype, curve in rates)


def _times(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, rate * factor) for size, rate in curve.points))


# Map device labels of published tables, such as "H100-80GB (DGX-H100)" or "a100-sxm4-80gb", to
# presets, the fractions of their rates that steps reach, and differences of the labelled variant.


PCIE_BYTES_PER_S = 25e9  # PCIe 4.0 x16 carries 31.5 GB/s one way, of which DMA reaches 80%
# Memory figures in labels that mean the preset's: GB, GiB, and less what error correction takes.
_SAME_MEMORY = 0.06

# Name in a label -> preset, and the entry of `REACHED` for it; most specific first. DGX-A100 was
# first sold with 40 GB. MI300X has neither the fused operators nor the switch of "dgx".
_LABELS = (
    (r"GB300", "gb200", "dgx"),
    (r"GB200", "gb200", "gb200"),
    (r"B300", "b300", "dgx"),
    (r"B200", "b200", "b200"),
    (r"H200", "h200", "dgx"),
    (r"DGX[\s_-]?H100|H100.*DGX", "h100", "dgx"),
    (r"H100|H800", "h100", "h100"),
    (r"A100.*80\s*G|A800", "a100-80", "a100"),
    (r"A100.*40\s*G|DGX[\s_-]?A100", "a100-40", "a100"),
    (r"A100", "a100-80", "a100"),
    (r"V100.*16\s*G|V100.*P3\.(?:8|16)XLARGE", "v100-16", "v100"),
    (r"V100", "v100", "v100"),
    (r"MI300X?", "mi300x", "h100"),
)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*G(?:i?B)?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A device that differs from its preset in rates, links or memory."""

    matmul: float = 1.0
    memory: float = 1.0
    link_bytes_per_s: float | None = None
    memory_gib: float | None = None


_SAME = Variant()
# From the vendor's data sheets, and shared/data/hardware_facts.csv for H100 with HBM2e; the first
# match wins.
_VARIANTS = (
    # 756 of 989 TFLOP/s, 2.0 of 3.35 TB/s; PCIe 5.0
    (r"H100.*PCI|PCI.*H100", Variant(matmul=0.76, memory=0.6, link_bytes_per_s=50e9)),
    (r"A100.*PCI|PCI.*A100", Variant(memory=0.97, link_bytes_per_s=PCIE_BYTES_PER_S)),
    # 112 of 125 TFLOP/s; PCIe 3.0
    (r"V100.*PCI|PCI.*V100", Variant(matmul=0.9, link_bytes_per_s=12e9)),
    (r"H100.*HBM2E", Variant(memory=0.72)),  # 2.4 of 3.35 TB/s
    (r"H800|A800", Variant(link_bytes_per_s=200e9)),  # NVLink of 400 GB/s in both ways
    (r"GB300", Variant(memory_gib=267.0)),  # as B300
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A preset by name, the fractions that steps reach of it,
    and how the device differs from it.
    """

    preset: str
    name: str
    variant: Variant = _SAME
    memory_gib: float | None = None  # as labelled

    @property
    def is_old(self) -> bool:
        """Whether stacks without fused attention ran on it."""
        return self.name in ("v100", "a100")

    @property
    def reached(self) -> Reached:
        """The fractions that steps reach of the preset's rates."""
        return REACHED[self.name]

    def memory_bytes(self, usual: int) -> int:
        """Return the device's memory; `usual` is the preset's."""
        labelled = None if self.memory_gib is None else round(self.memory_gib * GIB)
        if labelled is not None and abs(labelled / usual - 1) > _SAME_MEMORY:
            return labelled
        other = self.variant.memory_gib
        return usual if other is None else round(other * GIB)


def read_device(label: str) -> Kind:
    """Return the device that a label names.

    >>> kind = read_device("H100-80GB (DGX-H100)")
    >>> kind.preset, kind.name
    ('h100', 'dgx')
    """
    variant = next((match for pattern, match in _VARIANTS if _has(label, pattern)), _SAME)
    for pattern, preset, name in _LABELS:
        if _has(label, pattern):
            sizes = [float(size) for size in _MEMORY.findall(label)]
            memory_gib = next((size for size in sizes if size > 0), None)
            return Kind(preset=preset, name=name, variant=variant, memory_gib=memory_gib)
    known = "V100, A100, A800, H100, H800, H200, B200, B300, GB200, GB300, MI300X"
    raise Unusable(f"unknown device {label!r}; known devices: {known}")


def _has(label: str, pattern: str) -> bool:
    """Return whether the label contains a name, not as part of another name or number (as
    "DGXB200").
    """
    before = "(?:(?<![A-Z0-9])|(?<=DGX)|(?<=HGX))"
    return re.search(rf"{before}(?:{pattern})(?![0-9])", label.upper()) is not None


# Transform the work of a bfloat16 model into that of a stack that computes products in float8.
#
# As in Transformer Engine on Hopper, every operand of a layer's products is converted, and copied
# once more in transposed form for the weight gradient. Norms write float8 directly, and operands
# are converted before they are gathered. The last product and all sums keep the wide dtype.


FLOAT8 = "float8_e4m3fn"
# Bytes per element: read in bfloat16 and written twice; or read in float8 and written once.
_CONVERTED_BYTES = 2 + 1 + 1
_COPIED_BYTES = 1 + 1


class Float8:
    """How the products of a graph's layers change; `blocks` names each node's layer, or ""."""

    def __init__(self, graph: Graph, blocks: tuple[str, ...], gathered: int | None) -> None:
        self.graph, self.blocks = graph, blocks
        self.gathered = gathered  # gathered columns of gradients, if any
        self.norms = {node.name for node in graph.nodes if "norm" in node.op}

    def change(self, work: Workload) -> Workload:
        """Return the work in float8."""
        converted: set[str] = set()
        return replace(
            work,
            launches=tuple(new for old in work.launches for new in self._launches(old, converted)),
            collectives=tuple(_talk(talk) for talk in work.collectives),
        )

    def _launches(self, launch: Launch, converted: set[str]) -> Iterator[Launch]:
        kernel = launch.kernel
        if kernel.kind != "matmul" or kernel.shape[0] > 1 or not self.blocks[launch.node]:
            yield launch
            return
        num_bytes = self._converted_bytes(launch, converted)
        if num_bytes:
            yield replace(launch, kernel=_conversion(kernel, num_bytes), product=False)
        _, m, n, k = kernel.shape
        moved = float(m * k + k * n + 2 * m * n)
        yield replace(launch, kernel=replace(kernel, dtype=FLOAT8, bytes=moved))

    def _converted_bytes(self, launch: Launch, converted: set[str]) -> int:
        """Return the bytes read and written before the product; its weight is converted once a
        step.
        """
        _, rows, _, columns = launch.kernel.shape
        if launch.phase == WEIGHT:
            return 0  # the other two products have converted both operands
        if launch.phase != FORWARD:
            only_copied = columns == self.gathered
        else:
            operand = self.graph.nodes[launch.node].inputs[0]
            if operand in converted:
                return 0
            converted.add(operand)
            only_copied = operand in self.norms
        return rows * columns * (_COPIED_BYTES if only_copied else _CONVERTED_BYTES)


def _conversion(product: Kernel, num_bytes: int) -> Kernel:
    _, rows, _, columns = product.shape
    return replace(
        product,
        op="to_float8",
        kind=MEMORY,
        flops=0.0,
        bytes=float(num_bytes),
        shape=(rows, columns),
    )


def _talk(talk: NodeCollective) -> NodeCollective:
    """Return a collective whose operands travel in float8 and whose sums keep the model's dtype."""
    return replace(talk, num_bytes=talk.num_bytes / 2) if talk.op == "all_gather" else talk


_GB = 1e9

# Network of an entire instance, in Gbit/s (aws.amazon.com/ec2/instance-types).
_INSTANCES_GBIT = {
    "p3.8xlarge": 10,
    "p3.16xlarge": 25,
    "p3dn.24xlarge": 100,
    "p4d.24xlarge": 400,
    "p4de.24xlarge": 400,
    "p5.48xlarge": 3200,
    "p5e.48xlarge": 3200,
    "p5en.48xlarge": 3200,
    "p6-b200.48xlarge": 3200,
}
# One port of an InfiniBand generation, in Gbit/s (infinibandta.org roadmap, 4 lanes).
_PORTS_GBIT = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(G|T)(b|B)(?:it)?(?:ps|/s)?")
# Machines of V100s without a switch.
_CUBES = re.compile(r"p3\.(8|16)xlarge|p3dn\.24xlarge|dgx-1\b", re.IGNORECASE)
_IN_A_NODE = re.compile(r"nvlink|nvswitch|pcie|dgx|single[\s-]*node|intra", re.IGNORECASE)
_CUBE_MESH_EFFICIENCY = 0.85  # bus bandwidth of nccl-tests relative to the links', 8 ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of device and the links that a row describes (None: those of the preset)."""

    kind: Kind
    reached: Reached
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
        reached=kind.reached,
        node_network_bytes_per_s=node,
        device_network_bytes_per_s=device,
        link_bytes_per_s=kind.variant.link_bytes_per_s or _link(text),
    )


def cluster_of(row: Row, reached: Reached | None = None) -> Cluster:
    """Return the row's cluster: a preset with the row's deviations."""
    machine = read_machine(row.gpu, row.interconnect)
    if reached is not None:
        machine = replace(machine, reached=reached)
    usual = Cluster.preset(machine.kind.preset).nodes[0].count
    is_cube = _CUBES.search(f"{row.gpu} {row.interconnect}") is not None
    per_node = row.gpus_per_node or (min(usual, len(CUBE_MESH)) if is_cube else usual)
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
    cluster = _changed(cluster, machine)
    if row.dtype == "float8" and FLOAT8 not in cluster.nodes[0].device.dtypes:
        raise Unusable(f"{cluster.nodes[0].device.name} has no float8")
    if is_cube:
        cluster = _without_switch(cluster, row, machine.reached.link)
    return cluster


def preset_device(gpu: str) -> Device:
    """Return the preset's device for a label, with the best rates of single operators."""
    return _preset_device(read_device(gpu).preset)


@cache
def _preset_device(name: str) -> Device:
    return Cluster.preset(name).nodes[0].device


def _without_switch(cluster: Cluster, row: Row, reached: float) -> Cluster:
    """Return a cube mesh in which each of the row's groups has the links between its
    own devices.
    """
    (node,) = cluster.nodes
    if node.link is None or node.count > len(CUBE_MESH):
        return cluster
    link = replace(
        node.link,
        bandwidth_bytes_per_s=WIRES * WIRE_BYTES_PER_S,
        efficiency=_CUBE_MESH_EFFICIENCY * reached,
        collectives=_factors(row, node.count),
    )
    return replace(cluster, nodes=(replace(node, link=link),))


def _factors(row: Row, per_node: int) -> Factors:
    """Return how much longer collectives of groups within a node take than with all
    links, by size.
    """
    grid = np.arange(row.gpus).reshape(row.pp, row.dp * row.cp, row.tp)
    fewest: dict[int, float] = {}
    for axis, size in enumerate(grid.shape):
        groups = np.moveaxis(grid, axis, -1).reshape(-1, size)
        if axis == 0:  # stages only send to the next one
            size = min(size, 2)
            groups = sliding_window_view(groups, size, axis=-1).reshape(-1, size)
        near = groups[groups[:, 0] // per_node == groups[:, -1] // per_node] % per_node
        if size > 1 and near.size:
            few = slowest(map(tuple, np.unique(near, axis=0).tolist()))
            fewest[size] = min(few, fewest.get(size, few))
    factors = tuple(
        Factor(ranks=size, bytes=Curve.constant(WIRES / few))
        for size, few in sorted(fewest.items())
    )
    return tuple((operation, factors) for operation in OPERATIONS) if factors else ()


def _changed(cluster: Cluster, machine: Machine) -> Cluster:
    """Return the cluster with rates that steps reach, and the row's memory or link if it states
    one.
    """
    (node,) = cluster.nodes
    variant, link = machine.kind.variant, node.link
    device = machine.reached.times(variant.matmul, variant.memory).on(node.device)
    device = replace(device, memory_bytes=machine.kind.memory_bytes(device.memory_bytes))
    network = cluster.network
    if link is not None:
        link = _link_of(link, machine)
    else:
        every = _equal(cluster.num_nodes, network.domains[0].every) if network.domains else 0
        domains = tuple(
            replace(d, link=_link_of(d.link, machine), every=every) for d in network.domains
        )
        network = replace(network, domains=domains)
    node = replace(node, devices=(device,) * node.count, link=link)
    return replace(cluster, nodes=(node,), network=network)


def _equal(nodes: int, per_domain: int) -> int:
    """Return how many nodes of each domain a run uses: equally many, as schedulers allocate them.

    512 devices in racks of 72 are 8 times 64. Runs that leave half of a domain empty do not occur.
    """
    equal = max((n for n in range(1, per_domain + 1) if nodes % n == 0), default=per_domain)
    return equal if 2 * equal >= per_domain or nodes <= per_domain else per_domain


def _link_of(link: Link, machine: Machine) -> Link:
    bandwidth = machine.link_bytes_per_s or link.bandwidth_bytes_per_s
    efficiency = link.efficiency * machine.reached.link
    return replace(link, bandwidth_bytes_per_s=bandwidth, efficiency=efficiency)


def _network(label: str, text: str) -> tuple[float | None, float | None]:
    """Return bytes per second of a node and of each device, as far as the texts state them.

    "8x400Gb/s" counts a node's ports. A single rate is a node's, unless the text says "per GPU" or
    describes InfiniBand, which has one port per device.
    """
    for instance, gbit in _INSTANCES_GBIT.items():
        if instance in f"{label} {text}".lower():
            return gbit / 8 * _GB, None
    for part in re.split(r"[;,]", text):
        low = part.lower()
        if "nvlink" in low or "nvswitch" in low:
            continue
        ports = re.search(r"(\d+)\s*[x\u00d7]", low)
        of_node = re.search(r"node|machine|server|host", low)
        of_device = re.search(r"per[\s-]*(gpu|device|accelerator)", low) or (
            not of_node and re.search(rf"\bib\b|infiniband|{'|'.join(_PORTS_GBIT).lower()}", low)
        )
        rate = _rate(part)
        if rate is None:
            continue
        if ports:
            return int(ports[1]) * rate, None
        return (None, rate) if of_device else (rate, None)
    return None, None


def unread_links(text: str) -> str:
    """Return the part of a text about links that is not understood, if no part states a rate.

    >>> unread_links("NVLink; carrier pigeon")
    'carrier pigeon'
    """
    if is_unsaid(text) or _network("", text) != (None, None):
        return ""
    parts = [part.strip() for part in re.split(r"[;,]", text)]
    return "; ".join(part for part in parts if part and not _IN_A_NODE.search(part))


def _rate(part: str) -> float | None:
    """Return the bytes per second stated in a text, as a number or an InfiniBand generation."""
    match = _RATE.search(part)
    if match:
        size, scale, unit = match.groups()
        return float(size) * (1 if scale == "G" else 1000) * _GB / (8 if unit == "b" else 1)
    ports = [g for name, g in _PORTS_GBIT.items() if re.search(rf"\b{name}\b", part.upper())]
    return ports[0] / 8 * _GB if ports else None


def _link(text: str) -> float | None:
    """Return bytes per second in one direction between devices of a node; NVLink is quoted for
    both.
    """
    for part in re.split(r"[;,]", text):
        low = part.lower()
        rate = _rate(part)
        if ("nvlink" in low or "nvswitch" in low) and rate is not None and "B/s" in part:
            return rate / 2
        if "pcie" in low and "nvlink" not in text.lower():
            return PCIE_BYTES_PER_S
    return None
