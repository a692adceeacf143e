"""The machines that a row names.

Enters: a device label such as "H100-80GB (DGX-H100)" and text such as "8x400Gb/s IB per node".
Leaves: `Machine`: the preset, and the figures that the text changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.calibration.values import Unusable, is_empty

GIB = 2**30
_GB = 1e9

# Name in a label -> preset, most specific first. DGX-A100 was first sold with 40 GB.
_LABELS = (
    (r"GB200|GB300", "gb200"),
    (r"B300", "b300"),
    (r"B200", "b200"),
    (r"H200", "h200"),
    (r"H100|H800", "h100"),
    (r"A100.*80\s*G|A800", "a100-80"),
    (r"A100.*40\s*G|DGX[\s_-]?A100|P4D\b", "a100-40"),
    (r"A100", "a100-80"),
    (r"V100.*16\s*G|V100.*P3\.16XLARGE", "v100-16"),
    (r"V100", "v100"),
    (r"MI300X?", "mi300x"),
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
_PCIE_BYTES_PER_S = 25e9  # PCIe 4.0 x16 carries 31.5 GB/s one way, of which DMA reaches 80%


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A preset by name, and what a row's text says otherwise (None: as the preset has it)."""

    preset: str
    memory_bytes: int | None = None
    node_network_bytes_per_s: float | None = None
    device_network_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None


def read_machine(gpu: str, interconnect: str) -> Machine:
    """The machine of a device label and a text about its links."""
    preset = read_device(gpu)
    sizes = [float(size) for size in _MEMORY.findall(gpu)]
    text = "" if is_empty(interconnect) else interconnect
    node, device = _network(gpu, text)
    return Machine(
        preset=preset,
        memory_bytes=round(sizes[0] * GIB) if sizes else None,
        node_network_bytes_per_s=node,
        device_network_bytes_per_s=device,
        link_bytes_per_s=_link(text),
    )


def read_device(label: str) -> str:
    """The preset for a device label.

    >>> read_device("H100-80GB (DGX-H100)")
    'h100'
    """
    for pattern, preset in _LABELS:
        if re.search(rf"(?<![A-Z0-9])(?:{pattern})", label.upper()):
            return preset
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
