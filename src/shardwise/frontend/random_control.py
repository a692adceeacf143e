"""Handle random numbers that would decide Python control flow, as in LayerDrop.

A static graph cannot hold `if torch.rand([]) < p: skip the layer`. While capturing, scalar draws
are `Draw`s: a comparison with only one possible outcome (p = 0) is answered, any other is refused
with the reason; used as a tensor, a `torch.rand` draw is an ordinary random node.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from shardwise.errors import CaptureError
from shardwise.frontend.errors import is_user_code

_HINT = "set layerdrop (or the drop probability) to 0, or use torch.where on a drawn tensor"

_FROZEN = "forward draws numbers from Python's or NumPy's generator; the graph would freeze them"
_TORCH = "draw with torch, whose random ops stay in the graph"
_DRAWS = (
    (random, ("randint", "randrange", "choice", "choices", "shuffle", "sample", "gauss")),
    (np.random, ("randn", "randint", "choice", "permutation", "shuffle", "normal")),
)
_CLOCKS = ("time", "time_ns", "perf_counter", "monotonic", "process_time")


class Draw:
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
                hint="draw with torch.rand and keep it a tensor",
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
            "forward makes a Python number of a random draw; the graph would freeze it",
            hint="draw with torch.rand and keep it a tensor",
        )

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, "lt")

    def __le__(self, other: Any) -> Any:
        return self._compare(other, "le")

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, "gt")

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, "ge")

    def _compare(self, other: Any, name: str) -> Any:
        if not isinstance(other, int | float):
            return getattr(torch, name)(self.materialize(), other)
        below = name in ("lt", "le")
        known = None  # between low and high, both outcomes are possible
        if other >= self._high:
            known = below
        elif other <= self._low:
            known = not below
        return Comparison(self, name, other, known)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*map(_plain, args), **{k: _plain(v) for k, v in (kwargs or {}).items()})


class Comparison:
    """The result of `draw < p`: a bool if it is certain, a tensor if used as one, else refused."""

    def __init__(self, draw: Draw, name: str, bound: float, known: bool | None) -> None:
        self._draw, self._name, self._bound, self._known = draw, name, bound, known

    def materialize(self) -> Any:
        return getattr(torch, self._name)(self._draw.materialize(), self._bound)

    def __bool__(self) -> bool:
        if self._known is None:
            raise CaptureError(
                f"a random number compared with {self._bound} decides which code runs; a graph has "
                "one path",
                hint=_HINT,
            )
        return self._known

    def item(self) -> bool:
        return bool(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    __torch_function__ = Draw.__torch_function__


def _plain(value: Any) -> Any:
    if isinstance(value, Draw | Comparison):
        return value.materialize()
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return value


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Draw, *args: Any) -> Any:
        return getattr(self.materialize(), name)(*map(_plain, args))

    return method


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg"),
    *("getitem", "floordiv", "mod", "and", "or", "invert"),
):
    setattr(Draw, f"__{_name}__", _delegate(f"__{_name}__"))
    setattr(Comparison, f"__{_name}__", _delegate(f"__{_name}__"))


@contextlib.contextmanager
def controlled_random() -> Iterator[None]:
    """Patch scalar draws; refuse any other draw of Python or NumPy without a seed, and clocks."""
    states = (random.getstate(), np.random.get_state())
    seeded: list[int] = []
    rand = torch.rand

    def draw_tensor(*size: Any, **kwargs: Any) -> Any:
        shape = tuple(kwargs.get("size", size[0] if _is_shape(size) else size))
        if any(dim != 1 for dim in shape) or kwargs.get("generator") is not None:
            return rand(*size, **kwargs)
        return Draw(tensor=lambda: rand(*size, **kwargs))

    patches = [(torch, "rand", draw_tensor), (random, "random", lambda: Draw())]
    patches += [(random, "uniform", Draw)]
    for name in ("rand", "random", "random_sample", "uniform"):
        patches.append((np.random, name, _numpy_draw(getattr(np.random, name), name)))
    for owner, names in _DRAWS:
        patches.append((owner, "seed", _recording(owner.seed, seeded)))
        for name in names:
            patches.append((owner, name, _refusing(getattr(owner, name), _FROZEN, _TORCH, seeded)))
    for name in _CLOCKS:
        clock = "forward reads the clock; the graph would freeze the time"
        refusing = _refusing(getattr(time, name), clock, "measure around pm.train_step", [])
        patches.append((time, name, refusing))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        yield
        if not seeded and not _same_state(states, (random.getstate(), np.random.get_state())):
            raise CaptureError(_FROZEN, hint=_TORCH)
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
        random.setstate(states[0])
        np.random.set_state(states[1])


def _is_shape(size: tuple[Any, ...]) -> bool:
    return len(size) == 1 and isinstance(size[0], tuple | list | torch.Size)


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


def _recording(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return recorded


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
