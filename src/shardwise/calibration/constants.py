"""What training steps reach of a device's rates.

Enters: nothing. Leaves: `REACHED`, by kind of device. Presets hold the best rates that others have
measured of single operators; a step of a published stack reaches a part of them: its operators are
not the best ones of their kind, clocks fall under load, and a model has operators that no table
of dims tells. These factors are all that is fitted (`benchmarks/calibrate.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.cluster import Device
from shardwise.cluster.device import Curve, Rates

# What a step loses by each doubling of the nodes: all ranks wait for the slowest.
WAITING = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Parts of a preset's rates: of products, of fused attention, of memory, of links in a node.

    `overlap_loss` is what computing loses of the time in which messages travel: they share memory
    and multiprocessors. With 1, nothing is hidden.
    """

    matmul: float
    attention: float
    memory: float
    link: float
    overlap_loss: float = 0.5

    def times(self, matmul: float, memory: float) -> Reached:
        """What is reached of the same rates by a device with such parts of them."""
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
    """How many times longer a step takes on so many nodes, by waiting for the slowest."""
    return 1.0 + WAITING * math.log2(nodes)


def _scaled(rates: Rates, factor: float) -> Rates:
    return tuple((dtype, _times(curve, factor)) for dtype, curve in rates)


def _times(curve: Curve, factor: float) -> Curve:
    return Curve(tuple((size, rate * factor) for size, rate in curve.points))
