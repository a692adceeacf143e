"""Change torch and Python while a model is traced.

Each function returns a context manager for one reason why tracing a model unchanged would fail,
lose information, or freeze a value into the graph.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import logging
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.nn import functional

from shardwise.errors import CaptureError
from shardwise.frontend.errors import in_package, is_user_code, is_user_file, running_frame

_RECURSION_LIMIT = 4000
_ABSENT = object()


@contextlib.contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of modules and classes inside a `with` block: (owner, name, value)."""
    originals = [(owner, name, vars(owner).get(name, _ABSENT)) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, original in originals:
            if original is _ABSENT:
                delattr(owner, name)  # which uncovers the inherited attribute
            else:
                setattr(owner, name, original)


def bags_of_rows() -> contextlib.AbstractContextManager[None]:
    """Trace bags that are rows of a matrix as sums of embeddings, which are sharded row by row.

    In torch's own operator, bags are ranges of all indices, which ranks cannot share as easily.
    """
    embedding_bag = functional.embedding_bag
    signature = inspect.signature(embedding_bag)

    def traced(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = SimpleNamespace(**bound.arguments)
        indices, scales, weight = call.input, call.per_sample_weights, call.weight
        other = call.max_norm is not None or call.scale_grad_by_freq or call.mode == "max"
        fits = scales is None or (scales.shape == indices.shape and call.mode == "sum")
        fits &= indices.dim() == 2 and indices.numel() > 0
        if call.offsets is not None or other or not fits:
            return embedding_bag(*args, **kwargs)
        rows = functional.embedding(indices, weight, call.padding_idx, sparse=call.sparse)
        used = None
        if call.padding_idx is not None:
            used = (indices != call.padding_idx % len(weight)).to(weight.dtype)
            scales = used if scales is None else scales * used
        if scales is not None:
            rows = rows * scales.unsqueeze(-1)
        if call.mode == "sum":
            return rows.sum(1)
        return rows.mean(1) if used is None else rows.sum(1) / used.sum(1, True).clamp(min=1)

    return patched((functional, "embedding_bag", traced))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress export's warnings, logs and prints: what matters is in the graph or an error."""
    names = ("torch.export", "torch._export", "torch.fx", "torch._subclasses.fake_tensor")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def deep_stack() -> Iterator[None]:
    """Raise the recursion limit: tracing adds frames to each call of a nested module."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _RECURSION_LIMIT))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextlib.contextmanager
def cuda_uninitialized() -> Iterator[None]:
    """Make `torch.cuda.is_available()` use NVML, so that the CUDA driver is not initialized.

    Forks of a process with an initialized driver cannot compute, and `tune` runs plans in forks.
    """
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def keeping_user_frames() -> Iterator[None]:
    """Keep the user's frames that are not named `forward` while a step is traced.

    torch records only frames of that name: no function that `forward` calls, no loss function, no
    `training_step`.
    """
    tracer: Any = fx.proxy.TracerBase
    original = getattr(tracer, "_filter_traceback_frames", None)
    if original is None:
        yield
        return

    def with_user_frames(self: Any, summary: traceback.StackSummary) -> traceback.StackSummary:
        forwards: traceback.StackSummary = original(self, summary)
        if any(frame.name == "forward" and is_user_file(frame.filename) for frame in forwards):
            last = next(frame for frame in reversed(summary) if is_user_code(frame.filename))
            return traceback.StackSummary.from_list([*forwards, last])
        captured = itertools.dropwhile(lambda frame: not in_package(frame.filename), summary)
        users = [frame for frame in captured if is_user_code(frame.filename)]
        return traceback.StackSummary.from_list([*forwards, *users])

    with patched((tracer, "_filter_traceback_frames", with_user_frames)):
        yield


def refusing_derivatives() -> contextlib.AbstractContextManager[None]:
    """Make `torch.autograd.grad` and `backward` raise a `CaptureError` at the user's line.

    Inside `forward` they would run torch's engine on tensors without data, and their results would
    not be part of the graph. Usually the model has a penalty on gradients.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        frame = running_frame()
        raise CaptureError(
            "forward takes derivatives itself (torch.autograd.grad or backward), which a captured "
            "graph cannot contain",
            where=None if frame is None else str(frame),
            hint="write the derivative out with torch operations; a penalty on gradients also "
            "works on differences: (critic(a) - critic(b)).abs() / (a - b).flatten(1).norm(dim=1)",
        )

    return patched((torch.autograd, "_engine_run_backward", refuse))


# ---------------------------------------------------------------- random numbers
# A static graph cannot hold `if torch.rand([]) < p: skip the layer` (LayerDrop). While tracing,
# scalar draws are `Draw`s: a comparison with only one possible outcome (p = 0) is answered, any
# other is refused with the reason; used as a tensor, a `torch.rand` draw is a random node.

_SKIPPED_LAYERS = (
    "set layerdrop (or the drop probability) to 0, or use torch.where on a drawn tensor"
)
_KEEP_TENSOR = "draw with torch.rand and keep it a tensor"
_FROZEN = "forward draws numbers from Python's or NumPy's generator; the graph would freeze them"
_USE_TORCH = "draw with torch, whose random ops stay in the graph"
_DRAWS = (
    (random, ("randint", "randrange", "choice", "choices", "shuffle", "sample", "gauss")),
    (np.random, ("randn", "randint", "choice", "permutation", "shuffle", "normal")),
)
_CLOCKS = ("time", "time_ns", "perf_counter", "monotonic", "process_time")


class _Lazy:
    """A value that becomes a tensor of the graph when it is used as one."""

    def materialize(self) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*map(_tensor, args), **{k: _tensor(v) for k, v in (kwargs or {}).items()})


class Draw(_Lazy):
    """A number drawn uniformly from [low, high) whose value is not decided yet."""

    def __init__(
        self, low: float = 0.0, high: float = 1.0, tensor: Callable[[], Any] | None = None
    ) -> None:
        self._low, self._high, self._make, self._value = low, high, tensor, None

    def materialize(self) -> Any:
        """Return the draw as a tensor of the graph; refuse a draw of Python or NumPy."""
        if self._make is None:
            raise CaptureError(
                "forward computes with a number drawn by Python's or NumPy's generator; "
                "the graph would freeze it",
                hint=_KEEP_TENSOR,
            )
        if self._value is None:
            self._value = self._make()
        return self._value

    def item(self) -> Draw:
        return Draw(self._low, self._high)

    def to(self, *args: Any, **kwargs: Any) -> Draw:
        return self

    def __float__(self) -> float:
        raise CaptureError(
            "forward turns a random draw into a Python number; the graph would freeze it",
            hint=_KEEP_TENSOR,
        )

    def compare(self, name: str, other: Any) -> Any:
        """Return `draw < other` for "lt", and so on."""
        if not isinstance(other, int | float):
            return getattr(torch, name)(self.materialize(), other)
        is_less = name in ("lt", "le")
        outcome = None  # between low and high, both outcomes are possible
        if other >= self._high:
            outcome = is_less
        elif other <= self._low:
            outcome = not is_less
        return Comparison(self, name, other, outcome)


class Comparison(_Lazy):
    """The result of `draw < p`: a bool if it is certain, a tensor if used as one, else refused."""

    def __init__(self, draw: Draw, name: str, bound: float, outcome: bool | None) -> None:
        self._draw, self._name, self._bound, self._outcome = draw, name, bound, outcome

    def materialize(self) -> Any:
        return getattr(torch, self._name)(self._draw.materialize(), self._bound)

    def __bool__(self) -> bool:
        if self._outcome is None:
            raise CaptureError(
                f"a random number compared with {self._bound} decides which code runs; a graph has "
                "one path",
                hint=_SKIPPED_LAYERS,
            )
        return self._outcome

    def item(self) -> bool:
        return bool(self)


def _tensor(value: Any) -> Any:
    if isinstance(value, _Lazy):
        return value.materialize()
    if isinstance(value, tuple | list):
        return type(value)(map(_tensor, value))
    return value


def _define_operators() -> None:
    """Define the operators of draws, which Python looks up on the class."""

    def delegate(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self.materialize(), name)(*map(_tensor, args))

    def compare(name: str) -> Callable[..., Any]:
        return lambda self, other: self.compare(name, other)

    for name in (
        *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg"),
        *("getitem", "floordiv", "mod", "and", "or", "invert"),
    ):
        setattr(_Lazy, f"__{name}__", delegate(f"__{name}__"))
    for name in ("lt", "le", "gt", "ge"):
        setattr(Draw, f"__{name}__", compare(name))


_define_operators()


@contextlib.contextmanager
def controlled_random() -> Iterator[None]:
    """Patch scalar draws; refuse any other draw of Python or NumPy without a seed, and clocks."""
    states = (random.getstate(), np.random.get_state())
    seeded: list[int] = []  # calls of `seed`
    rand = torch.rand

    def draw_tensor(*size: Any, **kwargs: Any) -> Any:
        is_shape = len(size) == 1 and isinstance(size[0], tuple | list | torch.Size)
        shape = tuple(kwargs.get("size", size[0] if is_shape else size))
        if any(dim != 1 for dim in shape) or kwargs.get("generator") is not None:
            return rand(*size, **kwargs)
        return Draw(tensor=lambda: rand(*size, **kwargs))

    patches = [(torch, "rand", draw_tensor), (random, "random", Draw), (random, "uniform", Draw)]
    for name in ("rand", "random", "random_sample", "uniform"):
        patches.append((np.random, name, _numpy_draw(getattr(np.random, name), name)))
    for owner, names in _DRAWS:
        patches.append((owner, "seed", _counting(owner.seed, seeded)))
        for name in names:
            draw = _refusing(getattr(owner, name), _FROZEN, _USE_TORCH, seeded)
            patches.append((owner, name, draw))
    for name in _CLOCKS:
        message = "forward reads the clock; the graph would freeze the time"
        clock = _refusing(getattr(time, name), message, "measure around pm.train_step", [])
        patches.append((time, name, clock))
    try:
        with patched(*patches):
            yield
        if not seeded and not _same_state(states, (random.getstate(), np.random.get_state())):
            raise CaptureError(_FROZEN, hint=_USE_TORCH)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _refusing(
    function: Callable[..., Any], message: str, hint: str, unless: list[int]
) -> Callable[..., Any]:
    """Let libraries call a function, and raise an error if the user's own code does."""

    def refusing(*args: Any, **kwargs: Any) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if not unless and is_user_code(file) and "site-packages" not in file:
            raise CaptureError(message, hint=hint)
        return function(*args, **kwargs)

    return refusing


def _counting(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return counted


def _numpy_draw(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        sized = kwargs.get("size") is not None or (args if name != "uniform" else args[2:])
        if sized:
            return function(*args, **kwargs)
        low = args[0] if args else kwargs.get("low", 0.0)
        high = args[1] if len(args) > 1 else kwargs.get("high", 1.0)
        return Draw(low, high) if name == "uniform" else Draw()

    return draw


def _same_state(before: Any, after: Any) -> bool:
    numpy_same = all(np.array_equal(a, b) for a, b in zip(before[1], after[1], strict=True))
    return bool(before[0] == after[0] and numpy_same)
