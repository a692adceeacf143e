"""Discover the rules of unknown operators by executing them on small random inputs.

For every dim of every operand: shard it, together with dims of the same size of the other operands
or alone, and see whether the results are shards along one of their dims, or partial sums, forward
and, where the operator is differentiable, backward. A hypothesis that holds in all trials becomes
an axis; all other dims are frozen. An operator that cannot be tried stays replicated, with the
reason. Discovery never raises, and the same call gives the same rule in every process.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice, product
from typing import Any

import torch
from torch import Tensor

from shardwise.ir import Ref, format_arg, map_refs
from shardwise.ir.operators import operator, tensors
from shardwise.sharding.rule import Axis, Call, NodeRule, replicated_rule

Run = Callable[..., Any]
SMALL = (5, 7, 11, 13, 17, 19, 23, 29)  # distinct and prime: no size is a product by chance
MAX_ELEMENTS = 1 << 20
# Errors of operators without a derivative, of which only the forward call counts.
_NO_DERIVATIVE = ("no autograd formula", "not implemented", "not differentiable")


class NotExecutable(Exception):
    """The operator cannot be tried; the text says why."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One axis: the dim that contains it, of every operand and result; None where none does.

    A result without it is a partial sum.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of inputs with the results and gradients of the unsharded call."""

    call: Call
    run: Run
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    seeds: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    tolerance: float

    def holds(self, hypothesis: Hypothesis) -> bool:
        """Return whether sharding gives the same: in 2 shards, 3 uneven ones, one empty."""
        sizes = {
            t.shape[d]
            for sides in ((self.inputs, hypothesis.operands), (self.results, hypothesis.results))
            for t, d in zip(*sides, strict=True)
            if d is not None
        }
        if len(sizes) != 1:
            return False
        size = sizes.pop()
        half, third = size // 2, size // 3
        splits = ((size - half, half), (size - third - 1, third, 1), (size, 0))
        try:
            return all(self._equal(hypothesis, lengths) for lengths in splits if min(lengths) >= 0)
        except Exception:  # an operator may fail in any way on shapes it does not expect
            return False

    def _equal(self, hypothesis: Hypothesis, lengths: tuple[int, ...]) -> bool:
        outcomes = []
        for stop, length in zip(accumulate(lengths), lengths, strict=True):
            start = stop - length
            leaves = [
                _leaf(t if d is None else t.narrow(d, start, length))
                for t, d in zip(self.inputs, hypothesis.operands, strict=True)
            ]
            results = execute(self.run, self.call, leaves)
            seeds = [
                s if s is None or d is None else s.narrow(d, start, length)
                for s, d in zip(self.seeds, hypothesis.results, strict=True)
            ]
            if any(
                r.shape != s.shape for r, s in zip(results, seeds, strict=True) if s is not None
            ):
                return False
            outcomes.append((results, backward(results, seeds, leaves)))
        expected = (self.results, self.gradients)
        dims = (hypothesis.results, hypothesis.operands)
        return all(
            self._same([outcome[kind][i] for outcome in outcomes], full, dims[kind][i])
            for kind in (0, 1)
            for i, full in enumerate(expected[kind])
        )

    def _same(self, parts: list[Any], full: Tensor | None, dim: int | None) -> bool:
        if full is None or any(part is None for part in parts):
            return full is None and all(part is None for part in parts)
        joined = torch.cat(parts, dim) if dim is not None else torch.stack(parts).sum(0)
        if joined.shape != full.shape or joined.dtype != full.dtype:
            return False
        return torch.allclose(joined, full, self.tolerance, self.tolerance, equal_nan=True)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(_is_float(tensor))


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def execute(run: Run, call: Call, operands: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the operator's tensor results."""
    supply = iter(operands)
    args, kwargs = map_refs((call.node.args, call.node.kwargs), lambda _: next(supply))
    with torch.enable_grad():
        return tuple(tensors(run(*args, **dict(kwargs))))


def backward(
    results: tuple[Tensor, ...], seeds: list[Tensor | None], leaves: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operands, None for those without."""
    pairs = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not inputs:
        return tuple(None for _ in leaves)
    gradients = iter(
        torch.autograd.grad([r for r, _ in pairs], inputs, [s for _, s in pairs], allow_unused=True)
    )
    return tuple(next(gradients) if leaf.requires_grad else None for leaf in leaves)


def make_trials(call: Call, run: Run, num: int = 3) -> list[Trial]:
    """Return trials on small shapes, or on the call's own if the operator rejects those."""
    reason = "it has no tensor operands"
    for shapes in dict.fromkeys((shrink(call.operands), call.operands)):
        if not shapes or sum(torch.Size(s).numel() for s in shapes) > MAX_ELEMENTS:
            continue
        for dtype in (torch.float64, None):
            try:
                trials = [_trial(call, run, shapes, dtype, seed) for seed in range(num)]
            except NotExecutable as error:
                raise error from None
            except Exception as error:
                reason = f"it fails on random inputs: {type(error).__name__}: {error}"
                continue
            return trials
    raise NotExecutable(reason.split("\n")[0])


def shrink(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Replace equal sizes by equal small ones, distinct sizes by distinct ones, in the same order.

    >>> shrink(((8, 128, 1), (128, 64)))
    ((5, 11, 1), (11, 7))
    """
    sizes = sorted({size for shape in shapes for size in shape if size > 1})
    if len(sizes) > len(SMALL):
        return shapes
    small = dict(zip(sizes, SMALL, strict=False))
    return tuple(tuple(small.get(size, size) for size in shape) for shape in shapes)


def _trial(
    call: Call, run: Run, shapes: tuple[tuple[int, ...], ...], wide: torch.dtype | None, seed: int
) -> Trial:
    generator = torch.Generator().manual_seed(seed)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return random numbers; the last trials use large ones, which cross thresholds."""
        if dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if dtype.is_complex:
            return torch.randn(shape, dtype=dtype, generator=generator)
        if dtype.is_floating_point:
            numbers = torch.randn(shape, dtype=torch.float64, generator=generator)
            return (numbers * (30.0 if seed == 2 else 1.0)).to(wide or dtype)
        return torch.randint(0, high, shape, dtype=dtype, generator=generator)

    types = [call.types[name] for name in call.node.inputs]
    high = max(2, min((size for shape in shapes for size in shape), default=2))
    inputs = tuple(random(s, kind.dtype) for s, kind in zip(shapes, types, strict=True))
    leaves = [_leaf(t) for t in inputs]
    results = execute(run, call, leaves)
    unchanged = [leaf.detach() for leaf in leaves]
    if not all(torch.equal(a, b) for a, b in zip(unchanged, inputs, strict=True)):
        raise NotExecutable("it changes its operands")
    again = execute(run, call, [_leaf(t) for t in inputs])
    if not all(torch.equal(a, b) for a, b in zip(results, again, strict=True)):
        raise NotExecutable("it gives different results for the same operands")
    if [r.dim() for r in results] != [len(shape) for shape in call.results]:
        raise ValueError("results have other shapes than in the call")
    if not all(torch.isfinite(r).all() for r in results if _is_float(r)):
        raise ValueError("results are not finite")
    seeds = [
        torch.randn(r.shape, dtype=r.dtype, generator=generator) if r.requires_grad else None
        for r in results
    ]
    try:
        gradients = backward(results, seeds, leaves)
    except Exception as error:
        if not any(reason in str(error) for reason in _NO_DERIVATIVE):
            raise  # the derivative needs other shapes than these
        seeds, gradients = [None for _ in results], tuple(None for _ in leaves)
    floats = [t for t in (*inputs, *results) if _is_float(t)]
    exact = all(torch.finfo(t.dtype).bits >= 64 for t in floats)
    return Trial(
        call=call,
        run=run,
        inputs=inputs,
        results=tuple(r.detach() for r in results),
        seeds=tuple(seeds),
        gradients=gradients,
        tolerance=1e-9 if exact else 1e-4,
    )


MAX_HYPOTHESES = 400

_DISCOVERED: dict[tuple[str, ...], tuple[Hypothesis, ...] | str] = {}  # or why it cannot be tried


def discover(call: Call, run: Run | None = None) -> NodeRule:
    """Return the rule of an operator without one; `run` executes it if torch does not know it."""
    key = signature_of(call)
    if key not in _DISCOVERED:
        _DISCOVERED[key] = _search(call, run if run is not None else operator(call.node.op))
    discovered = _DISCOVERED[key]
    if isinstance(discovered, str):
        return replicated_rule(call, discovered)
    if not discovered:
        return replicated_rule(call, f"no dim of {call.node.op} could be sharded in experiments")
    return as_rule(call, discovered)


def signature_of(call: Call) -> tuple[str, ...]:
    """Return the key of a call's rule: operator, constants, types."""
    names = (*call.node.inputs, *call.node.outputs)
    label = {name: Ref(str(i)) for i, name in enumerate(dict.fromkeys(names))}
    labeled = map_refs((call.node.args, call.node.kwargs), lambda ref: label[ref.name])
    return (call.node.op, format_arg(labeled), *(str(call.types[name]) for name in names))


def _search(call: Call, run: Run | None) -> tuple[Hypothesis, ...] | str:
    if run is None:
        return f"{call.node.op} is not registered in this process"
    try:
        trials = make_trials(call, run)
    except NotExecutable as error:
        return f"{call.node.op} could not be tried: {error}"
    except Exception as error:  # an experiment must not stop a plan
        return f"{call.node.op} could not be tried: {type(error).__name__}"
    chosen: list[Hypothesis] = []
    for hypothesis in islice(hypotheses(call, trials[0]), MAX_HYPOTHESES):
        if not _overlaps(hypothesis, chosen) and all(t.holds(hypothesis) for t in trials):
            chosen.append(hypothesis)
    return tuple(chosen)


def hypotheses(call: Call, trial: Trial) -> Iterator[Hypothesis]:
    """Yield all hypotheses that sizes allow: first those that shard every result."""
    possible: set[Hypothesis] = set()
    for size in {size for t in trial.inputs for size in t.shape if size > 1}:
        operands = [_matching(tuple(t.shape), size) for t in trial.inputs]
        results = []
        for t, shape in zip(trial.results, call.results, strict=True):
            same = [d for d in _matching(tuple(t.shape), size) if d is None or shape[d] != 1]
            results.append([d for d in same if d is not None or _is_float(t)])
        for operand_dims in product(*operands):
            if any(d is not None for d in operand_dims):
                possible |= {Hypothesis(operand_dims, dims) for dims in product(*results)}
    return iter(sorted(possible, key=_order))


def _matching(shape: tuple[int, ...], size: int) -> list[int | None]:
    return [*(d for d, length in enumerate(shape) if length == size), None]


def _order(hypothesis: Hypothesis) -> tuple[int, int, str]:
    """Order by few partial results, then by many sharded operands, then in any fixed order."""
    partial = sum(d is None for d in hypothesis.results)
    replicated = sum(d is None for d in hypothesis.operands)
    return partial, replicated, str(hypothesis)


def _overlaps(hypothesis: Hypothesis, chosen: list[Hypothesis]) -> bool:
    """Return whether a dim already belongs to a discovered axis."""
    dims = (*hypothesis.operands, *hypothesis.results)
    return any(
        d is not None and d == used
        for other in chosen
        for d, used in zip(dims, (*other.operands, *other.results), strict=True)
    )


def as_rule(call: Call, discovered: tuple[Hypothesis, ...]) -> NodeRule:
    """Return the rule: an axis for each hypothesis, frozen axes for all other dims."""
    frozen = replicated_rule(call, "")
    axes = dict(frozen.axes)
    operands = [list(dims) for dims in frozen.operands]
    results = [list(dims) for dims in frozen.results]
    for number, hypothesis in enumerate(discovered):
        name = f"a{number}"
        for dims, shapes, chosen in (
            (operands, call.operands, hypothesis.operands),
            (results, call.results, hypothesis.results),
        ):
            for index, d in enumerate(chosen):
                if d is not None:
                    size = shapes[index][d]
                    if name in axes and axes[name].size != size:
                        return replicated_rule(call, "sizes that differ only in the call itself")
                    axes[name] = Axis(name, size)
                    dims[index][d] = (name,)
    all_dims = {dim for side in (operands, results) for dims in side for dim in dims}
    used = {axis for d in all_dims for axis in (d if isinstance(d, tuple) else (d.axis,))}
    return replace(
        frozen,
        axes={name: axis for name, axis in axes.items() if name in used},
        operands=tuple(tuple(dims) for dims in operands),
        results=tuple(tuple(dims) for dims in results),
        replicated_because=None,
        discovered=True,
    )
