"""The machines that a row names.

Enters: a device label such as "H100-80GB (DGX-H100)" and text such as "8x400Gb/s IB per node".
Leaves: `Machine`: the preset, and the figures that the text changes; and the `Cluster` of a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from shardwise.calibration import wires
from shardwise.calibration.constants import REACHED, Reached
from shardwise.calibration.rows import Row
from shardwise.calibration.values import Unusable, is_empty
from shardwise.cluster import Cluster, Curve, Factor, Link
from shardwise.cluster.links import OPERATIONS, Factors

GIB = 2**30
_GB = 1e9

# Name in a label -> preset, and the entry of `REACHED` for it; most specific first. DGX-A100 was
# first sold with 40 GB.
_LABELS = (
    (r"GB200|GB300", "gb200", "dgx"),
    (r"B300", "b300", "dgx"),
    (r"B200", "b200", "dgx"),
    (r"H200", "h200", "dgx"),
    (r"DGX[\s_-]?H100|H100.*DGX", "h100", "dgx"),
    (r"H100|H800", "h100", "h100"),
    (r"A100.*80\s*G|A800", "a100-80", "a100"),
    (r"A100.*40\s*G|DGX[\s_-]?A100", "a100-40", "a100"),
    (r"A100", "a100-80", "a100"),
    (r"V100.*16\s*G|V100.*P3\.16XLARGE", "v100-16", "v100"),
    (r"V100", "v100", "v100"),
    (r"MI300X?", "mi300x", "dgx"),
)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*-?\s*G(?:i?B)?\b", re.IGNORECASE)

# Network of a whole instance, in Gbit/s (aws.amazon.com/ec2/instance-types).
_INSTANCES_GBIT = {
    "p3.16xlarge": 25,
    "p3dn.24xlarge": 100,
    "p4d.24xlarge": 400,
    "p4de.24xlarge": 400,
    "p5.48xlarge": 3200,
    "p5e.48xlarge": 3200,
}
# One port of an InfiniBand generation, in Gbit/s (infinibandta.org roadmap, 4 lanes).
_PORTS_GBIT = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(G|T)(b|B)(?:it)?(?:ps|/s)?")
_CUBE_MESH_EFFICIENCY = 0.85  # bus bandwidth of nccl-tests over the wires', 8 ranks
_SAME_MEMORY = 0.06  # GB and GiB, and what error correction takes
_PCIE_BYTES_PER_S = 25e9  # PCIe 4.0 x16 carries 31.5 GB/s one way, of which DMA reaches 80%


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A preset by name, and what a row's text says otherwise (None: as the preset has it)."""

    preset: str
    reached: Reached
    memory_bytes: int | None = None
    node_network_bytes_per_s: float | None = None
    device_network_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


def read_machine(gpu: str, interconnect: str) -> Machine:
    """The machine of a device label and a text about its links."""
    preset, kind = read_device(gpu)
    sizes = [float(size) for size in _MEMORY.findall(gpu)]
    text = "" if is_empty(interconnect) else interconnect
    node, device = _network(gpu, text)
    return Machine(
        preset=preset,
        reached=REACHED[kind],
        memory_bytes=round(sizes[0] * GIB) if sizes else None,
        node_network_bytes_per_s=node,
        device_network_bytes_per_s=device,
        link_bytes_per_s=_link(text),
    )


def cluster_of(row: Row, reached: Reached | None = None) -> Cluster:
    """The row's machines: a preset, with what the row says otherwise."""
    machine = read_machine(row.gpu, row.interconnect)
    if reached is not None:
        machine = replace(machine, reached=reached)
    usual = Cluster.preset(machine.preset).nodes[0].count
    per_node = row.gpus_per_node or usual
    while row.gpus % per_node:  # the largest equal nodes
        per_node -= 1
    network = machine.node_network_bytes_per_s
    if machine.device_network_bytes_per_s is not None:
        network = machine.device_network_bytes_per_s * per_node
    cluster = Cluster.preset(
        machine.preset,
        nodes=row.gpus // per_node,
        devices_per_node=per_node,
        nic_gbit_per_s=None if network is None else network * 8 / _GB,
    )
    cluster = _changed(cluster, machine)
    if row.dtype == "float8":
        cluster = _in_float8(cluster)
    if re.search(r"p3\.16xlarge|dgx-1\b", f"{row.gpu} {row.interconnect}".lower()):
        cluster = _without_switch(cluster, row, machine.reached.link)
    return cluster


def _in_float8(cluster: Cluster) -> Cluster:
    """Products at the rate of float8; everything else stays in bfloat16."""
    (node,) = cluster.nodes
    rates = dict(node.device.matmul_flops_per_s)
    if "float8_e4m3fn" not in rates:
        raise Unusable(f"{node.device.name} has no float8")
    rates["bfloat16"] = rates["float8_e4m3fn"]
    device = replace(node.device, matmul_flops_per_s=tuple(rates.items()))
    return replace(cluster, nodes=(replace(node, devices=(device,) * node.count),))


def _without_switch(cluster: Cluster, row: Row, reached: float) -> Cluster:
    """A cube mesh: each of the row's groups has the wires between its own devices."""
    (node,) = cluster.nodes
    if node.link is None or node.count > len(wires.CUBE_MESH):
        return cluster
    link = replace(
        node.link,
        bandwidth_bytes_per_s=wires.WIRES * wires.WIRE_BYTES_PER_S,
        efficiency=_CUBE_MESH_EFFICIENCY * reached,
        collectives=_factors(row, node.count),
    )
    return replace(cluster, nodes=(replace(node, link=link),))


def _factors(row: Row, per_node: int) -> Factors:
    """How much longer collectives of groups in a node take than with all wires, by their size."""
    grid = np.arange(row.gpus).reshape(row.pp, row.dp * row.cp, row.tp)
    fewest: dict[int, float] = {}
    for axis, size in enumerate(grid.shape):
        groups = np.moveaxis(grid, axis, -1).reshape(-1, size)
        if axis == 0:  # stages only send to the next
            size = min(size, 2)
            groups = sliding_window_view(groups, size, axis=-1).reshape(-1, size)
        near = groups[groups[:, 0] // per_node == groups[:, -1] // per_node] % per_node
        if size > 1 and near.size:
            few = wires.slowest(map(tuple, np.unique(near, axis=0).tolist()))
            fewest[size] = min(few, fewest.get(size, few))
    found = tuple(
        Factor(ranks=size, bytes=Curve.constant(wires.WIRES / few))
        for size, few in sorted(fewest.items())
    )
    return tuple((operation, found) for operation in OPERATIONS) if found else ()


def _changed(cluster: Cluster, machine: Machine) -> Cluster:
    """With what training steps reach, and another memory or link where a row says so."""
    (node,) = cluster.nodes
    device, link = machine.reached.on(node.device), node.link
    memory = machine.memory_bytes
    if memory is not None and abs(memory / device.memory_bytes - 1) > _SAME_MEMORY:
        device = replace(device, memory_bytes=memory)
    network = cluster.network
    if link is not None:
        link = _link_of(link, machine)
    else:
        domains = tuple(replace(d, link=_link_of(d.link, machine)) for d in network.domains)
        network = replace(network, domains=domains)
    node = replace(node, devices=(device,) * node.count, link=link)
    return replace(cluster, nodes=(node,), network=network)


def _link_of(link: Link, machine: Machine) -> Link:
    bandwidth = machine.link_bytes_per_s or link.bandwidth_bytes_per_s
    efficiency = link.efficiency * machine.reached.link
    return replace(link, bandwidth_bytes_per_s=bandwidth, efficiency=efficiency)


def read_device(label: str) -> tuple[str, str]:
    """The preset for a device label, and the entry of `REACHED`.

    >>> read_device("H100-80GB (DGX-H100)")
    ('h100', 'dgx')
    """
    for pattern, preset, kind in _LABELS:
        if re.search(rf"(?<![A-Z0-9])(?:{pattern})", label.upper()):
            return preset, kind
    known = "V100, A100, H100, H200, B200, B300, GB200, MI300X"
    raise Unusable(f"unknown device {label!r}; known are {known}")


def _network(label: str, text: str) -> tuple[float | None, float | None]:
    """Bytes per second of a node, and of each device, as far as the texts say.

    "8x400Gb/s" counts a node's ports. One rate is a node's, unless the text says "per GPU" or is
    about InfiniBand, whose ports are one per device.
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


def _rate(part: str) -> float | None:
    """The bytes per second that a text names, by a figure or an InfiniBand generation."""
    found = _RATE.search(part)
    if found:
        size, scale, unit = found.groups()
        return float(size) * (1 if scale == "G" else 1000) * _GB / (8 if unit == "b" else 1)
    ports = [g for name, g in _PORTS_GBIT.items() if re.search(rf"\b{name}\b", part.upper())]
    return ports[0] / 8 * _GB if ports else None


def _link(text: str) -> float | None:
    """Bytes per second one way between devices of a node; NVLink is quoted for both ways."""
    for part in re.split(r"[;,]", text):
        low = part.lower()
        rate = _rate(part)
        if ("nvlink" in low or "nvswitch" in low) and rate is not None and "B/s" in part:
            return rate / 2
        if "pcie" in low and "nvlink" not in text.lower():
            return _PCIE_BYTES_PER_S
    return None
