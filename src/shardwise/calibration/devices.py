"""Devices by the labels that tables give them.

Enters: a label such as "H100-80GB (DGX-H100)" or "a100-sxm4-80gb". Leaves: `Kind`: the preset, what
steps reach of its rates, and how the labelled variant differs from the preset's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.calibration.constants import REACHED, Reached
from shardwise.calibration.values import Unusable
from shardwise.formatting import GIB

PCIE_BYTES_PER_S = 25e9  # PCIe 4.0 x16 carries 31.5 GB/s one way, of which DMA reaches 80%
# A label's figures of memory that mean the preset's: GB and GiB, and what error correction takes.
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
    """A device that differs from its preset: parts of its rates, other links or memory."""

    matmul: float = 1.0
    memory: float = 1.0
    link_bytes_per_s: float | None = None
    memory_gib: float | None = None


_SAME = Variant()
# From the vendor's data sheets, and shared/data/hardware_facts.csv for H100 with HBM2e; the first
# that a label matches.
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
    """A preset by name, what steps reach of it, and how the device differs from it."""

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
        """What steps reach of the preset's rates."""
        return REACHED[self.name]

    def memory_bytes(self, usual: int) -> int:
        """Return the device's memory, where `usual` is the preset's."""
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
    variant = next((found for pattern, found in _VARIANTS if _has(label, pattern)), _SAME)
    for pattern, preset, name in _LABELS:
        if _has(label, pattern):
            sizes = [float(size) for size in _MEMORY.findall(label)]
            memory_gib = next((size for size in sizes if size > 0), None)
            return Kind(preset=preset, name=name, variant=variant, memory_gib=memory_gib)
    known = "V100, A100, A800, H100, H800, H200, B200, B300, GB200, GB300, MI300X"
    raise Unusable(f"unknown device {label!r}; known are {known}")


def _has(label: str, pattern: str) -> bool:
    """Whether a name is in the label, not as a part of another name or number: "DGXB200"."""
    before = "(?:(?<![A-Z0-9])|(?<=DGX)|(?<=HGX))"
    return re.search(rf"{before}(?:{pattern})(?![0-9])", label.upper()) is not None
