"""The cost of AdamW, the optimizer that every prediction assumes.

A GPU updates all parameters in a few fused calls, which read each parameter, its gradient and two
states, and write all but the gradient. A CPU runs a sequence of operators for each parameter
(`torch.optim.adamw._single_tensor_adamw`).
"""

from shardwise.cluster import Device

WORD_BYTES = 4
STATE_BYTES = 4.0 * WORD_BYTES  # per element: weight, gradient and two states
FUSED_BYTES = 7.0 * WORD_BYTES  # that fused calls read and write per element
FUSED_CALLS = 12
# Words that mul_, lerp_, mul_, addcmul_, sqrt, div, add_ and addcdiv_ read and write, and their
# number with two or three calls for the step count.
OPERATOR_WORDS = 2 + 3 + 2 + 3 + 2 + 2 + 2 + 4
OPERATOR_CALLS = 11


def fused_seconds(
    numel: float, device: Device, *, calls: float = FUSED_CALLS, word_bytes: int = WORD_BYTES
) -> float:
    """Return the time of fused calls that update `numel` elements."""
    num_bytes = FUSED_BYTES / WORD_BYTES * word_bytes * numel
    return num_bytes / device.memory_rate(max(num_bytes, 1.0)) + calls * device.overhead_s


def operator_seconds(numel: float, device: Device, *, piece: float, tensors: float) -> float:
    """Return the time of single operators on `tensors` parameters of about `piece` elements."""
    rate = device.memory_rate(3 * WORD_BYTES * max(piece, 1.0))
    calls_s = OPERATOR_CALLS * device.overhead_s * tensors
    return OPERATOR_WORDS * WORD_BYTES * numel / rate + calls_s
