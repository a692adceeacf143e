"""The machines that a row names.

Enters: a device label (`devices.py`) and text such as "8x400Gb/s IB per node". Leaves: `Machine`:
the kind of device and the links that the text names; and the `Cluster` of a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from shardwise.calibration import wires
from shardwise.calibration.constants import Reached
from shardwise.calibration.devices import PCIE_BYTES_PER_S, Kind, read_device
from shardwise.calibration.float8 import FLOAT8
from shardwise.calibration.rows import Row
from shardwise.calibration.values import Unusable, is_empty, is_unsaid
from shardwise.cluster import Cluster, Curve, Device, Factor, Link
from shardwise.cluster.links import OPERATIONS, Factors

_GB = 1e9

# Network of a whole instance, in Gbit/s (aws.amazon.com/ec2/instance-types).
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
_CUBE_MESH_EFFICIENCY = 0.85  # bus bandwidth of nccl-tests over the wires', 8 ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A kind of device, and what a row's text says of links (None: as the preset has them)."""

    kind: Kind
    reached: Reached
    node_network_bytes_per_s: float | None = None
    device_network_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


def read_machine(gpu: str, interconnect: str) -> Machine:
    """Return the machine of a device label and a text about its links."""
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
    """Return the row's machines: a preset, with what the row says otherwise."""
    machine = read_machine(row.gpu, row.interconnect)
    if reached is not None:
        machine = replace(machine, reached=reached)
    usual = Cluster.preset(machine.kind.preset).nodes[0].count
    is_cube = _CUBES.search(f"{row.gpu} {row.interconnect}") is not None
    per_node = row.gpus_per_node or (min(usual, len(wires.CUBE_MESH)) if is_cube else usual)
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
    """Return the preset's device for a label, with the best rates that single operators reach."""
    return _preset_device(read_device(gpu).preset)


@cache
def _preset_device(name: str) -> Device:
    return Cluster.preset(name).nodes[0].device


def _without_switch(cluster: Cluster, row: Row, reached: float) -> Cluster:
    """Return a cube mesh: each of the row's groups has the wires between its own devices."""
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


def _equal(nodes: int, most: int) -> int:
    """How many nodes of each domain a run takes: equally many, as schedulers give them.

    512 devices of racks of 72 are 8 times 64. Runs that leave half of a domain empty are none.
    """
    equal = max((n for n in range(1, most + 1) if nodes % n == 0), default=most)
    return equal if 2 * equal >= most or nodes <= most else most


def _link_of(link: Link, machine: Machine) -> Link:
    bandwidth = machine.link_bytes_per_s or link.bandwidth_bytes_per_s
    efficiency = link.efficiency * machine.reached.link
    return replace(link, bandwidth_bytes_per_s=bandwidth, efficiency=efficiency)


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


def unread_links(text: str) -> str:
    """Return the part of a text about links that says nothing, where no part says the network's
    rate.

    >>> unread_links("NVLink; carrier pigeon")
    'carrier pigeon'
    """
    if is_unsaid(text) or _network("", text) != (None, None):
        return ""
    parts = [part.strip() for part in re.split(r"[;,]", text)]
    return "; ".join(part for part in parts if part and not _IN_A_NODE.search(part))


def _rate(part: str) -> float | None:
    """Return the bytes per second that a text names, by a figure or an InfiniBand generation."""
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
            return PCIE_BYTES_PER_S
    return None
