"""How long kernels take on a device.

Enters: `Kernel`s and a `Device`. Leaves: seconds.

A kernel takes the longer of its arithmetic and its memory traffic. A CPU adds the overhead of the
call. A GPU runs kernels while the host launches the next ones: the overhead shows only where
kernels are shorter than their launches.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.cluster import Device
from shardwise.cost.flops import seen_part
from shardwise.cost.kernels import MEMORY, Kernel

# From the end of a kernel to the start of the next of one stream, when both are launched ahead:
# "Getting Started with CUDA Graphs" (NVIDIA, 2019) finds 2.9 us kernels every 3.8 us then.
GAP_S = 0.9e-6
# Columns that the CPU's flash kernel computes at once (kvSplitSize in FlashAttentionKernel.cpp).
# On one thread of an x86 server, head size 64, a causal attention takes 0.95, 1.1, 0.99 and 0.75
# of a whole one at 128, 256, 512 and 1024 positions.
CPU_TILE = 512


def execution_seconds(kernel: Kernel, device: Device) -> float:
    """The kernel alone: arithmetic or memory traffic, whichever takes longer."""
    moving = kernel.bytes / device.memory_rate(kernel.bytes) if kernel.bytes else 0.0
    if kernel.kind == MEMORY or not kernel.flops:
        return moving
    dtype = _rated(kernel.dtype, device)
    if kernel.kind == "attention":
        rate = device.attention_rate(dtype, kernel.shape[-2]) / _unseen(kernel, device)
    else:
        batch, m, n, k = kernel.shape
        rate = device.matmul_rate(dtype, m, n, k, batch)
    return max(kernel.flops / rate, moving)


def _rated(dtype: str, device: Device) -> str:
    """The dtype whose rate counts: products of integers or complex numbers go at the slowest."""
    if dtype in device.dtypes or "float" in dtype:
        return dtype
    return min(device.dtypes, key=lambda name: device.matmul_rate(name, 1024, 1024, 1024))


def _unseen(kernel: Kernel, device: Device) -> float:
    """How much more than the part of a causal mask that is seen a device computes."""
    if not kernel.causal or device.kind != "cpu":
        return 1.0  # rates of GPUs are of causal attentions, by the part that is seen
    rows, columns = kernel.shape[-3:-1]
    return seen_part(rows, columns, CPU_TILE) / seen_part(rows, columns)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """The kernel as one of many, one after the other."""
    running = execution_seconds(kernel, device)
    if device.kind == "cpu":
        return device.overhead_s + running
    return max(device.overhead_s, running + GAP_S)


def kernels_seconds(kernels: Iterable[Kernel], device: Device) -> float:
    """The kernels one after the other."""
    return sum(kernel_seconds(kernel, device) for kernel in kernels)
