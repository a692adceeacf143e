"""Find the user's source lines, and explain why a model cannot be captured and what to change."""

import contextlib
import functools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import yaml
from torch import fx

from shardwise.errors import CaptureError, ShardwiseError, explaining

# ---------------------------------------------------------------- the user's modules and lines
ROOT = "model"  # the attribute of the exported step that holds the user's model

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(?!File ")([^\n]*))?')
_TORCH = str(Path(torch.__file__).parent) + "/"
_PACKAGE = str(Path(__file__).parents[1]) + "/"
_PYTHON = sysconfig.get_path("stdlib") + "/"


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack trace."""

    file: str
    line: int
    function: str
    text: str

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.text}" if self.text else self.place


def origin_of(meta: dict[str, Any], *, innermost: bool = False) -> dict[str, str]:
    """Return a `Node`'s place, in the innermost `forward` or function, from its fx meta."""
    origin = dict.fromkeys(("module", "module_class", "source", "source_text"), "")
    stack = meta.get("nn_module_stack")
    if stack:
        path, qualified = list(stack.values())[-1]
        origin["module"] = _strip_root(path)
        if path:  # otherwise the step itself: loss code outside the model
            name = qualified if isinstance(qualified, str) else qualified.__qualname__
            origin["module_class"] = str(name).rsplit(".", 1)[-1]
    frame = user_frame(meta.get("stack_trace") or "", innermost)
    if frame is not None:
        origin |= {"source": frame.place, "source_text": frame.text}
    return origin


@functools.lru_cache(maxsize=65536)
def user_frame(trace: str, innermost: bool = False) -> Frame | None:
    """Return the innermost `forward` outside torch; else the innermost such frame of any name."""
    frames = [  # outermost first
        Frame(file, int(line), function, text.strip())
        for file, line, function, text in _FRAME.findall(trace)
        if is_user_file(file)
    ]
    forwards = [frame for frame in frames if frame.function.rsplit(".", 1)[-1] == "forward"]
    return next(reversed((not innermost and forwards) or frames), None)


def in_package(file: str) -> bool:
    """Return whether a source file is ours."""
    return file.startswith(_PACKAGE)


def is_user_file(file: str) -> bool:
    """Return whether a source file is neither torch's nor ours."""
    generated = file == "<string>" or file.startswith(("<frozen", "<eval_with_key>"))
    return not generated and not file.startswith((_TORCH, _PACKAGE))


def running_frame() -> Frame | None:
    """Return the innermost running frame of the user's code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_code(code.co_filename):
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return Frame(code.co_filename, frame.f_lineno, code.co_name, text)
        frame = frame.f_back
    return None


def user_stacklevel() -> int:
    """Return the `stacklevel` that attributes a caller's warning to the user's innermost line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)):
        level, frame = level + 1, frame.f_back
    return level


@functools.lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Return whether a file is the user's or a model library's: not torch's, Python's or ours."""
    library = file.startswith(_PYTHON) and "site-packages" not in file
    return is_user_file(file) and not library


@functools.lru_cache(maxsize=65536)
def _strip_root(path: str) -> str:
    path = re.sub(r"@\d+", "", path)
    return "" if path == ROOT else path.removeprefix(f"{ROOT}.")


# ---------------------------------------------------------------- known causes
_LOADER = "compute it in the data loader and pass it in the batch, padded to a fixed size"
_WHERE = "torch.where(condition, a, b), which computes both"
EXPERTS = (
    "order, counts = route(ids, num_experts) of shardwise.routing, with dispatch, grouped_linear "
    "and collect in place of a loop over experts"
)


class Cure(NamedTuple):
    """A known cause: patterns of the message and of the user's line, the reason, and a hint."""

    pattern: str
    reason: str
    hint: str
    line: str = ""  # a pattern of the user's line, if it matters


DATA_DEPENDENT = Cure("", "the result's shape depends on the data", f"{_LOADER}; or mask instead")


@functools.cache
def _cures(kind: str) -> tuple[Cure, ...]:
    """Return the cures of one kind in `causes.yaml`: "causes", or those for "operators"."""
    text = resources.files("shardwise.frontend").joinpath("causes.yaml").read_text("utf-8")
    text = text.replace("<loader>", _LOADER).replace("<where>", _WHERE)
    return tuple(Cure(**entry) for entry in yaml.safe_load(text)[kind])


def cure_for(message: str, line: str = "", *, experts: bool = False) -> Cure | None:
    """Return the cause that matches a message of torch and the user's line, if it is known.

    With `experts`, the code may be that of a mixture of experts.
    """
    causes = (c for c in _cures("causes") if re.search(c.pattern, message))
    cure = next((c for c in causes if re.search(c.line, line)), None)
    if cure is None or re.search(r"DynamicOutputShape|data-dependent output shape", message):
        cure = cure_for_operator(message) or cure
    if cure is None and re.search(r"data-dependent|[Uu]nbacked", message):
        cure = DATA_DEPENDENT
    if cure is not None and experts:
        return cure._replace(hint=f"for a mixture of experts, {EXPERTS}; otherwise, {cure.hint}")
    return cure


def cure_for_operator(name: str) -> Cure | None:
    """Return the cause for an operator whose result has a size that depends on the data."""
    return next((c for c in _cures("operators") if re.search(c.pattern, name)), None)


# ---------------------------------------------------------------- errors while tracing
_GENERAL = "check that model(**batch) runs, also where torch.compiler.is_compiling() is true"


def capture_error(error: BaseException, model_name: str) -> ShardwiseError:
    """Return the error to raise from `error`: ours with a place, others explained."""
    own = next((cause for cause in _chain(error) if isinstance(cause, ShardwiseError)), None)
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


def explained(model_name: str) -> contextlib.AbstractContextManager[None]:
    """Turn any error that is not ours into a `CaptureError` at the user's line."""
    return explaining(lambda error: capture_error(error, model_name))


def describe_failure(error: BaseException) -> tuple[str | None, str]:
    """Return the user's line that raised an error, if any, and the start of the error's text."""
    frame = _user_frame(error)
    return None if frame is None else str(frame), _first(f"{type(error).__name__}: {error}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _in_experts(error: BaseException) -> bool:
    """Return whether the error came from code that selects experts."""
    for cause in _chain(error):
        for frame in traceback.extract_tb(cause.__traceback__):
            code = f"{frame.name} {frame.line}".lower()
            if not in_package(frame.filename) and ("expert" in code or "moe" in code):
                return True
    return False


def _user_frame(error: BaseException) -> Frame | None:
    """Return the innermost user frame of an exception or of the first one that led to it."""
    innermost: Frame | None = None
    for cause in _chain(error):
        frames = traceback.extract_tb(cause.__traceback__)
        users = [f for f in frames if is_user_code(f.filename)]
        if users:
            last = users[-1]
            innermost = Frame(last.filename, last.lineno or 0, last.name, (last.line or "").strip())
    return innermost


def _first(text: str) -> str:
    """Return the first two lines that are not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    short = " ".join(lines[:2])
    return short if len(short) <= 240 else short[:237] + "..."


# ---------------------------------------------------------------- checks
def check_regions_can_go(
    module: fx.GraphModule, reason: Exception, *, nested: bool = False
) -> None:
    """Raise if removing a `no_grad` region, as torch's functionalization does, adds a gradient."""
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
    """Return whether a trained parameter, or in a nested graph any real input, leads to `node`."""
    visited, stack = {node}, [node]
    while stack:
        current = stack.pop()
        value: Any = current.meta.get("val")
        is_input = current.op == "placeholder" and isinstance(value, torch.Tensor)
        if is_input and (value.requires_grad or (nested and value.is_floating_point())):
            return True
        if current.target is torch.ops.aten.detach.default:
            continue
        new = [n for n in current.all_input_nodes if n not in visited]
        visited.update(new)
        stack.extend(new)
    return False
