"""Where a node came from: the user's module and source line.

Enters: an fx node's `nn_module_stack` and `stack_trace`. Leaves: `Origin`.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = "model"  # the attribute of the exported step that holds the user's model

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)(?:\n\s+(?!File ")([^\n]*))?')
_TORCH = str(Path(torch.__file__).parent) + "/"
_PACKAGE = str(Path(__file__).parents[1]) + "/"
_PYTHON = sysconfig.get_path("stdlib") + "/"


@dataclass(frozen=True, slots=True)
class Origin:
    """`module` as in `named_modules()`, its class, `file.py:line` and the line's text."""

    module: str = ""
    module_class: str = ""
    source: str = ""
    source_text: str = ""


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


def origin_of(meta: dict[str, Any]) -> Origin:
    """Return the origin of a node, from its fx meta."""
    module, module_class = "", ""
    stack = meta.get("nn_module_stack")
    if stack:
        path, qualified = list(stack.values())[-1]
        module, module_class = _strip_root(path), _class_name(qualified)
        if path == "":  # the step itself: loss code outside the model
            module_class = ""
    frame = user_frame(meta.get("stack_trace") or "")
    if frame is None:
        return Origin(module, module_class)
    return Origin(module, module_class, frame.place, frame.text)


@functools.lru_cache(maxsize=65536)
def user_frame(trace: str) -> Frame | None:
    """Return the innermost `forward` outside torch; else the innermost such frame of any name."""
    frames = [frame for frame in parse_frames(trace) if is_user_file(frame.file)]
    for frame in reversed(frames):
        if frame.function.rsplit(".", 1)[-1] == "forward":
            return frame
    return frames[-1] if frames else None


def parse_frames(trace: str) -> list[Frame]:
    """Return the frames of a printed stack, outermost first."""
    return [
        Frame(file, int(line), function, (text or "").strip())
        for file, line, function, text in _FRAME.findall(trace)
    ]


def is_user_file(file: str) -> bool:
    """Whether a source file is neither torch's nor ours."""
    generated = file == "<string>" or file.startswith(("<frozen", "<eval_with_key>"))
    return not generated and not file.startswith((_TORCH, _PACKAGE))


@contextlib.contextmanager
def keeping_user_frames() -> Iterator[None]:
    """While a step is traced, keep the user's frames that are not called `forward`.

    torch keeps frames of that name alone: of a loss function, of a step that is a function, or of
    a `training_step` nothing would be left.
    """
    tracer: Any = torch.fx.proxy.TracerBase
    original = getattr(tracer, "_filter_traceback_frames", None)
    if original is None:
        yield
        return

    def kept(self: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        found: traceback.StackSummary = original(self, summary)
        if any(frame.name == "forward" and is_user_file(frame.filename) for frame in found):
            return found
        inside = False
        users: list[traceback.FrameSummary] = []
        for frame in summary:
            inside = inside or frame.filename.startswith(_PACKAGE)
            if inside and is_user_code(frame.filename):
                users.append(frame)
        return traceback.StackSummary.from_list([*found, *users])

    tracer._filter_traceback_frames = kept
    try:
        yield
    finally:
        tracer._filter_traceback_frames = original


def running_frame() -> Frame | None:
    """Return the innermost frame of the user's code that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_code(code.co_filename):
            line = frame.f_lineno
            text = linecache.getline(code.co_filename, line).strip()
            return Frame(code.co_filename, line, code.co_name, text)
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Whether a source file is the user's or a library's of models: not torch, Python or ours."""
    library = file.startswith(_PYTHON) and "site-packages" not in file
    return is_user_file(file) and not library and not file.startswith(_PACKAGE)


@functools.lru_cache(maxsize=65536)
def _strip_root(path: str) -> str:
    path = re.sub(r"@\d+", "", path)
    return "" if path == ROOT else path.removeprefix(f"{ROOT}.")


def _class_name(qualified: Any) -> str:
    name = qualified if isinstance(qualified, str) else qualified.__qualname__
    return str(name).rsplit(".", 1)[-1]
