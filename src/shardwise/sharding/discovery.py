"""Rules of unknown operators, found by executing them on small inputs.

For every dim of every operand: cut it, together with dims of the same size of the other operands
or alone, and see whether the results are shards along one of their dims, or partial sums. What
holds on all trials becomes an axis; everything else is frozen.

Enters: a `Call` whose operator the table does not know. Leaves: a `NodeRule` with `discovered`
set; an operator that cannot be tried is left whole, with the reason. It never raises, and the
same call gives the same rule in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from shardwise.ir import Ref, format_arg, map_refs
from shardwise.ir.schema import operator
from shardwise.sharding.rule import Axis, Call, Dim, NodeRule, whole_rule
from shardwise.sharding.trials import Hypothesis, NotExecutable, Run, Trial, make_trials

MAX_HYPOTHESES = 400
Dims = tuple[int | None, ...]

_FOUND: dict[tuple[str, ...], tuple[Hypothesis, ...] | str] = {}


def discover(call: Call, run: Run | None = None) -> NodeRule:
    """The rule of an operator that the table does not know; `run` where torch does not know it."""
    key = signature_of(call)
    if key not in _FOUND:
        _FOUND[key] = _search(call, run if run is not None else operator(call.node.op))
    found = _FOUND[key]
    if isinstance(found, str):
        return whole_rule(call, found)
    if not found:
        return whole_rule(call, f"no dim of {call.node.op} could be cut in experiments")
    return as_rule(call, found)


def signature_of(call: Call) -> tuple[str, ...]:
    """What decides a call's rule: operator, constants, types."""
    names = (*call.node.inputs, *call.node.outputs)
    label = {name: Ref(str(i)) for i, name in enumerate(dict.fromkeys(names))}
    given = map_refs((call.node.args, call.node.kwargs), lambda ref: label[ref.name])
    return (call.node.op, format_arg(given), *(str(call.types[name]) for name in names))


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
    """All that sizes allow: first those that cut every result, then those that leave sums."""
    found: dict[Hypothesis, None] = {}
    sizes = dict.fromkeys(size for t in trial.inputs for size in t.shape if size > 1)
    for size in sizes:
        operands = [_matching(tuple(t.shape), size) for t in trial.inputs]
        results = []
        for t, whole in zip(trial.results, call.results, strict=True):
            sums = t.dtype.is_floating_point or t.dtype.is_complex
            same = [d for d in _matching(tuple(t.shape), size) if d is None or whole[d] != 1]
            results.append([d for d in same if d is not None or sums])
        for left in product(*operands):
            if any(d is not None for d in left):
                found |= {Hypothesis(left, right): None for right in product(*results)}
    return iter(sorted(found, key=_order))


def _matching(shape: tuple[int, ...], size: int) -> list[int | None]:
    return [*(d for d, length in enumerate(shape) if length == size), None]


def _order(hypothesis: Hypothesis) -> tuple[int, int, str]:
    """Few partial results, then many cut operands, then any fixed order."""
    partial = sum(d is None for d in hypothesis.results)
    whole = sum(d is None for d in hypothesis.operands)
    return partial, whole, str(hypothesis)


def _overlaps(hypothesis: Hypothesis, chosen: list[Hypothesis]) -> bool:
    """Whether a dim already belongs to an axis that was found."""
    return any(
        d is not None and d == taken
        for other in chosen
        for mine, theirs in (
            (hypothesis.operands, other.operands),
            (hypothesis.results, other.results),
        )
        for d, taken in zip(mine, theirs, strict=True)
    )


def as_rule(call: Call, found: tuple[Hypothesis, ...]) -> NodeRule:
    """The rule: an axis for each hypothesis, frozen axes for all other dims."""
    frozen = whole_rule(call, "")
    axes = dict(frozen.axes)
    operands = [list(dims) for dims in frozen.operands]
    results = [list(dims) for dims in frozen.results]
    for number, hypothesis in enumerate(found):
        name = f"a{number}"
        for dims, shapes, chosen in (
            (operands, call.operands, hypothesis.operands),
            (results, call.results, hypothesis.results),
        ):
            for index, d in enumerate(chosen):
                if d is not None:
                    size = shapes[index][d]
                    if name in axes and axes[name].size != size:
                        return whole_rule(call, "sizes that differ only in the call itself")
                    axes[name] = Axis(name, size)
                    dims[index][d] = (name,)
    used: set[str] = {
        a for side in (operands, results) for dims in side for d in dims for a in _names(d)
    }
    return replace(
        frozen,
        axes={name: axis for name, axis in axes.items() if name in used},
        operands=tuple(tuple(dims) for dims in operands),
        results=tuple(tuple(dims) for dims in results),
        whole=None,
        discovered=True,
    )


def _names(dim: Dim) -> tuple[str, ...]:
    return dim if isinstance(dim, tuple) else (dim.axis,)
