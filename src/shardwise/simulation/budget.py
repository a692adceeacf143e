"""What of a device's memory the tensors of a plan may take.

Enters: a `Device` and how many communicators a rank has. Leaves: `Budget`.

Not for tensors are: what the driver and the process keep (`reserved_gib` of the cluster file, with
one communicator), workspaces of libraries, buffers of further communicators, and what torch's
allocator leaves over between tensors. A plan fits if its predicted peak is within `limit_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster import Device

# Of NCCL, on each device, for every further group that talks: 24 channels, each with three
# connections of 4 MiB (NCCL_BUFFSIZE) + 4.7 MiB (LL128) + 0.5 MiB (LL). Measured by others on A100:
# 544 MB for two devices, 688 MB for more (github.com/NVIDIA/nccl/issues/964).
COMMUNICATOR_BYTES = 24 * 3 * int(9.2 * 2**20)

# Of cuBLAS and cuBLASLt, as torch gives it to them on Hopper, the most of all; measured: 62 MiB.
WORKSPACE_BYTES = 2 * (32 << 20)

# What the allocator needs beyond its tensors where segments grow (`runtime.offload`), as a part
# of them. Of 15 ranks on one H200 that were given 3% more than the predicted peak, 13 ran through
# (`benchmarks.memory`); of the others one was predicted 2.7% too low, one needed a little more.
# What is left over does not shrink with the plan: two ranks of 5.5 and 5.8 GiB did not run in 5%
# more than their predicted peak, and do with half a GiB besides; with room to spare they took 0.61
# and 0.75 GiB more.
LEFT_OVER, LEAST_LEFT_OVER_BYTES = 0.05, 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of one device, and what of it is not for tensors."""

    memory_bytes: float
    reserved_bytes: float
    communicators_bytes: float = 0.0
    left_over: float = 0.0  # as a part of what tensors take
    least_left_over_bytes: float = 0.0  # and besides

    @classmethod
    def of(cls, device: Device, communicators: int = 1) -> Budget:
        """The budget of a rank on `device` that is in so many groups that talk."""
        if device.kind != "cuda":  # gloo's buffers are small, and the system's allocator is another
            return cls(memory_bytes=device.memory_bytes, reserved_bytes=device.reserved_bytes)
        return cls(
            memory_bytes=device.memory_bytes,
            reserved_bytes=device.reserved_bytes + WORKSPACE_BYTES,
            communicators_bytes=float(max(0, communicators - 1) * COMMUNICATOR_BYTES),
            left_over=LEFT_OVER,
            least_left_over_bytes=LEAST_LEFT_OVER_BYTES,
        )

    @property
    def limit_bytes(self) -> float:
        """The most that tensors may take."""
        free = self.memory_bytes - self.reserved_bytes - self.communicators_bytes
        return max(free - self.least_left_over_bytes, 1.0) / (1 + self.left_over)

    def taken(self, peak_bytes: float) -> float:
        """What the allocator takes of the device for so many bytes of tensors."""
        return peak_bytes * (1 + self.left_over) + self.least_left_over_bytes

    def others(self) -> dict[str, float]:
        """Bytes of the device that are not for tensors, by what has them."""
        return {
            "process": self.reserved_bytes,
            "communicators": self.communicators_bytes,
            "allocator": self.limit_bytes * self.left_over + self.least_left_over_bytes,
        }
