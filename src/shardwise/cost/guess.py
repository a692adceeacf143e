"""The cost of a call that could not be tried: every operand and result once, with the reason.

Enters: a `Signature`. Leaves: a `CallCost` with a note.
"""

from __future__ import annotations

from shardwise.cost.kernels import MEMORY, CallCost, Kernel, Saved
from shardwise.cost.signature import Signature
from shardwise.dtypes import dtype_name


def guessed(signature: Signature, reason: str) -> CallCost:
    """Bytes of operands and results; backward reads both and their gradients, and keeps both."""
    operands = {first: signature.types[first] for first in signature.firsts}
    results = signature.results or tuple(operands.values())[:1]
    given = sum(t.num_bytes for t in operands.values())
    made = sum(t.num_bytes for t in results)
    main = max(results, key=lambda t: t.num_bytes, default=None)

    def kernel(suffix: str, size: int) -> tuple[Kernel, ...]:
        return (
            Kernel(
                op=signature.op.removeprefix("aten.").split(".")[0] + suffix,
                kind=MEMORY,
                flops=0.0,
                bytes=float(size),
                dtype=dtype_name(main.dtype) if main else "float32",
                shape=main.shape if main else (),
            ),
        )

    wanted = {signature.firsts[i] for i in signature.grads}
    wanted = {i for i in wanted if operands[i].dtype.is_floating_point}
    forward = kernel("", given + made)
    if not wanted:
        return CallCost(forward=forward, results=signature.results, note=reason)
    gradients = sum(operands[i].num_bytes for i in wanted)
    backward = kernel("_backward", given + 2 * made + gradients)
    saved = [Saved(operand=i, num_bytes=t.num_bytes) for i, t in operands.items()]
    saved += [Saved(result=i, num_bytes=t.num_bytes) for i, t in enumerate(signature.results)]
    return CallCost(
        forward=forward,
        backward=backward,
        weight=backward if wanted <= signature.parameters else (),
        saved=tuple(saved),
        results=signature.results,
        aliases=tuple(None for _ in signature.results),
        gradients=tuple((i, operands[i].num_bytes) for i in sorted(wanted)),
        note=reason,
    )
