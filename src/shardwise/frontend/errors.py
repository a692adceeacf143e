"""Why a model cannot be captured, in words, and what to write instead."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.errors import CaptureError, ShardwiseError
from shardwise.frontend.builder import Frame, is_user_code, running_frame

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


# Turns what went wrong while tracing into a `CaptureError` at the user's line.


_GENERAL = "check that model(**batch) runs, also where torch.compiler.is_compiling() is true"


def capture_error(error: BaseException, model_name: str) -> ShardwiseError:
    """Return the error to raise from `error`: our own as it is (with a place), others explained."""
    own = _own(error)
    frame = _user_frame(error)
    place = str(frame) if frame is not None else None
    if own is not None:
        if own.where is None and place:
            return type(own)(own.message, where=place, hint=own.hint)
        return own
    text = f"{type(error).__name__}: {error}"
    line = frame.text if frame is not None else ""
    cure = cure_for(text, line, experts=_in_experts(error))
    reason = f": {cure.reason}" if cure is not None else ""
    return CaptureError(
        f"{model_name} cannot be captured{reason}\n  because: {_first(text)}",
        where=place,
        hint=cure.hint if cure is not None else _GENERAL,
    )


@contextlib.contextmanager
def explained(model_name: str) -> Iterator[None]:
    """Turn any error that is not ours into a `CaptureError` at the user's line."""
    try:
        yield
    except ShardwiseError:
        raise
    except Exception as error:
        raise capture_error(error, model_name) from error


def describe_failure(error: BaseException) -> tuple[str | None, str]:
    """Return the user's line that an error came from, if there is one, and its first words."""
    frame = _user_frame(error)
    return None if frame is None else str(frame), _first(f"{type(error).__name__}: {error}")


def _in_experts(error: BaseException | None) -> bool:
    """Return whether code of transformers that chooses experts has failed."""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            code = f"{frame.name} {frame.line}".lower()
            if "/transformers/" in frame.filename and ("expert" in code or "moe" in code):
                return True
        error = error.__cause__ or error.__context__
    return False


def _own(error: BaseException | None) -> ShardwiseError | None:
    """Our own error, also when torch wrapped it."""
    while error is not None:
        if isinstance(error, ShardwiseError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _user_frame(error: BaseException | None) -> Frame | None:
    """Return the innermost user frame of the exception or of one it was raised from."""
    found: Frame | None = None
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        users = [f for f in frames if is_user_code(f.filename)]
        if users:
            last = users[-1]
            found = Frame(last.filename, last.lineno or 0, last.name, (last.line or "").strip())
        error = error.__cause__ or error.__context__
    return found


def _first(text: str) -> str:
    """Return the first lines that say something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    short = " ".join(lines[:2])
    return short if len(short) <= 240 else short[:237] + "..."


# Refuses a forward pass that takes derivatives itself, at the user's line.
#
# `torch.autograd.grad` and `backward` inside of `forward` run torch's engine on tensors without
# data: what they return is part of no graph. A penalty on gradients is the usual case.


_HINT = (
    "write the derivative out with torch operations; a penalty on gradients also works on "
    "differences: (critic(a) - critic(b)).abs() / (a - b).flatten(1).norm(dim=1)"
)


@contextlib.contextmanager
def refusing_derivatives() -> Iterator[None]:
    """Inside, `torch.autograd.grad` and `backward` raise a `CaptureError`."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def refuse(*args: Any, **kwargs: Any) -> Any:
        frame = running_frame()
        raise CaptureError(
            "forward takes derivatives itself (torch.autograd.grad or backward), which a graph of "
            "the step cannot hold",
            where=None if frame is None else str(frame),
            hint=_HINT,
        )

    autograd._engine_run_backward = refuse
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


# Whether torch's functionalization, which forgets `no_grad`, would change gradients.


def check_regions_can_go(
    module: fx.GraphModule, reason: Exception, *, nested: bool = False
) -> None:
    """Refuse when a `no_grad` region returns something that would otherwise have a gradient."""
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            check_regions_can_go(child, reason, nested=True)
    for node in module.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.HigherOrderOperator):
            continue
        if str(target) != "wrap_with_set_grad_enabled" or node.args[0]:
            continue
        values = node.meta.get("val") or ()
        returned = [v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        operands = [a for a in node.args[2:] if isinstance(a, fx.Node)]
        if returned and any(_may_need_grad(a, nested=nested) for a in operands):
            raise CaptureError(
                f"{reason}, next to a no_grad region whose results depend on parameters",
                hint="replace the in-place write by an operation that returns a new tensor",
            )


def _may_need_grad(node: fx.Node, *, nested: bool) -> bool:
    """Whether a trainable parameter is upstream of `node`; in a nested graph, any real input."""
    seen, stack = {node}, [node]
    while stack:
        here = stack.pop()
        value: Any = here.meta.get("val")
        is_input = here.op == "placeholder" and isinstance(value, torch.Tensor)
        if is_input and (value.requires_grad or (nested and value.is_floating_point())):
            return True
        if here.target is torch.ops.aten.detach.default:
            continue
        fresh = [n for n in here.all_input_nodes if n not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return False
