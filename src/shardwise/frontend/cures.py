"""Why a model cannot be captured, in words, and what to write instead.

Enters: what torch said, or the operator at fault, and the user's line. Leaves: a `Cure`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["DATA_DEPENDENT", "EXPERTS", "Cure", "cure_for", "cure_for_operator"]

_LOADER = "compute it when the batch is made and pass it in, padded to a fixed size"
_WHERE = "torch.where(condition, a, b), which computes both"
EXPERTS = 'config._experts_implementation = "batched_mm"'


class Cure(NamedTuple):
    """A cause, by a pattern of the message or of the user's line; its reason; and what to do."""

    pattern: str
    reason: str
    hint: str
    line: str = ""  # a pattern of the user's line, if that decides


DATA_DEPENDENT = Cure("", "the result's shape depends on the data", f"{_LOADER}; or mask instead")
_OPERATORS = (  # whose results have a size that depends on the data
    Cure(
        r"unique",
        "the result of torch.unique has as many entries as the data has distinct values",
        f"{_LOADER}; or work on all n possible values: F.one_hot(ids, n).amax(0)",
    ),
    Cure(
        r"bincount|histc",
        "the result has as many entries as the largest value in the data",
        "torch.zeros(n).scatter_add(0, ids, weights), with a fixed n",
    ),
    Cure(
        r"repeat_interleave",
        "the result has as many rows as the counts in the data add up to",
        f"{_LOADER}; or torch.gather with row numbers from the batch",
    ),
    Cure(
        r"nonzero|masked_select|aten\.index\b|argwhere",
        "a mask selects a number of elements that depends on the data",
        "keep all elements and count with the mask: torch.where(mask, x, 0).sum() / mask.sum()",
    ),
    Cure(
        r"ctc_loss",
        "the CTC loss works in memory whose size depends on the lengths in the batch",
        "wrap it in torch.library.custom_op with a fake and a gradient; "
        "docs/guides/custom_ops.md shows how",
    ),
    Cure(
        r"item|_local_scalar_dense|tolist",
        "a tensor's value becomes a Python number",
        f"keep it a tensor; if it decides a size: {_LOADER}",
    ),
)
_CAUSES = (
    Cure(
        r"data-dependent|DataDependentOutput|is_nonzero|aten\.equal|_local_scalar_dense",
        "an assertion depends on a tensor's value",
        "check the batch before the step, or only outside of capture: "
        "if not torch.compiler.is_compiling(): assert …",
        line=r"^\s*assert\b|torch\._assert|torch\._check|\braise\b|check_.*\(",
    ),
    Cure(
        r"functorch|torch\.func",
        "forward takes derivatives itself (torch.func), which a graph of the step cannot hold",
        "write the derivative out with torch operations",
    ),
    Cure(
        r"higher-order operator (cond|while_loop|scan|map|associative_scan)",
        "the operator chooses what runs by a tensor's value, and cannot be split",
        f"{_WHERE}; a loop with a fixed number of iterations; or a Python value of the "
        "configuration",
    ),
    Cure(
        r"higher-order operator",
        "the operator runs code of its own, which has no rule for how it may be split",
        "call the operations themselves, or wrap them in torch.library.custom_op",
    ),
    Cure(
        r"Could not guard on data-dependent|Could not extract|GuardOnDataDependent"
        r"|DataDependentOutput|is_nonzero|aten\.equal",
        "Python code depends on a tensor's value (if, while, item(), int(), range over data)",
        f"{_WHERE}; or decide with a Python value of the configuration",
    ),
    Cure(
        r"\.numpy\(\)|numpy|data_ptr|Cannot access data pointer",
        "forward leaves PyTorch (numpy, a raw pointer)",
        "use torch operations, or wrap the code in torch.library.custom_op",
    ),
    Cure(
        r"_nested_tensor|NestedTensor|nested_tensor",
        "nested tensors have rows of unequal sizes, which no rule splits",
        "a padded tensor and a mask: torch.nn.utils.rnn.pad_sequence",
    ),
    Cure(
        r"SparseTensorImpl|sparse_coo|SparseCsr|layout torch\.sparse",
        "sparse tensors have a size that depends on the data",
        "a dense tensor, or index_add and gather with indices from the batch",
    ),
    Cure(
        r"were assigned during export",
        "forward assigns a tensor to an attribute, which would be kept for the next step",
        'self.register_buffer("name", tensor) makes it part of the state',
    ),
    Cure(
        r"no fake impl|fake impl|not implemented for.*[Mm]eta|Meta.*backend",
        "an operator has no shape function",
        "register one with torch.library.register_fake",
    ),
)


def cure_for(message: str, line: str = "", *, experts: bool = False) -> Cure | None:
    """Return what fits a message of torch and the user's line; None if nothing is known.

    With `experts`, the code is a model of transformers, which may be a mixture of experts.
    """
    found = next((c for c in _CAUSES if re.search(c.pattern, message) and _at(c, line)), None)
    if found is None or re.search(r"DynamicOutputShape|data-dependent output shape", message):
        found = cure_for_operator(message) or found
    if found is None and re.search(r"data-dependent|[Uu]nbacked", message):
        found = DATA_DEPENDENT
    if found is not None and experts:
        return found._replace(hint=f"for a mixture of experts, {EXPERTS}; otherwise, {found.hint}")
    return found


def cure_for_operator(name: str) -> Cure | None:
    """Return what fits an operator whose result has a size that depends on the data."""
    return next((cure for cure in _OPERATORS if re.search(cure.pattern, name)), None)


def _at(cure: Cure, line: str) -> bool:
    return not cure.line or re.search(cure.line, line) is not None
