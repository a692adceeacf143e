"""The one-line notation for rules.

    "b... k+, n k+, n -> b... n"      a linear layer: k is summed over, b... is any number of dims
    "b t (c h e) -> b t c h e"        a dim may be a product of axes
    "... s^ -> ... s^"                an axis that may not be cut
    "b k+, 1 k+ -> b"                 `1` is a dim without an axis

Operands are the call's tensor arguments in order; operands at the end that a call leaves out may be
left out. `+` before an operand says that it is added to the result (a bias). `~` before an operand
says that the node is linear in it, `~~` that it is linear in all operands so marked together: then
partial sums may pass through.

Enters: text. Leaves: a `RuleFunction`. Patterns are parsed once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import prod

from shardwise.errors import RuleError
from shardwise.sharding.rule import Axis, Call, Dim, Dims, Localize, NodeRule, RuleFunction

TOKEN = re.compile(r"\s*(\(|\)|1|(?:[A-Za-z]\w*)?\.\.\.[+^]*|[A-Za-z]\w*[+^]*)")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parsed operand or result: dims, each a tuple of axis tokens; one may be an ellipsis."""

    dims: tuple[tuple[str, ...], ...]
    marks: str = ""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed rule."""

    text: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


@cache
def parse(text: str) -> Pattern:
    """Parse a rule; a malformed one is an error that shows the text and the place."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'", hint='"b k+, n k+ -> b n"')
    operands = tuple(_tensor(part, text) for part in left.split(","))
    results = tuple(_tensor(part, text) for part in right.split(","))
    known = {_name(a) for t in operands for dim in t.dims for a in dim}
    for tensor in results:
        for axis in (a for dim in tensor.dims for a in dim):
            if _name(axis) not in known:
                raise RuleError(f"rule {text!r}: axis {_name(axis)!r} is in no operand")
    return Pattern(text, operands, results)


def _name(token: str) -> str:
    return token.rstrip("+^")


def _tensor(part: str, text: str) -> Tensor:
    body = part.strip()
    marks = body[: len(body) - len(body.lstrip("~+"))]
    body = body.lstrip("~+")
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    position = 0
    while body[position:].strip():
        match = TOKEN.match(body, position)
        if not match:
            raise RuleError(f"rule {text!r}: cannot read {body[position:].strip()!r}")
        token, position = match.group(1), match.end()
        if token == "(":
            if group is not None:
                raise RuleError(f"rule {text!r}: '(' inside '('")
            group = []
        elif token == ")":
            if group is None:
                raise RuleError(f"rule {text!r}: ')' without '('")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            group.append(token)
        else:
            dims.append(() if token == "1" else (token,))
    if group is not None:
        raise RuleError(f"rule {text!r}: '(' without ')'")
    return Tensor(tuple(dims), marks)


def from_notation(text: str, *, localize: Localize | None = None) -> RuleFunction:
    """Return a rule function that applies the notation to a call."""
    pattern = parse(text)

    def rule(call: Call) -> NodeRule:
        return apply(pattern, call, localize)

    return rule


def apply(pattern: Pattern, call: Call, localize: Localize | None = None) -> NodeRule:
    """Match the pattern with a call's shapes."""
    shapes = call.operands
    if len(shapes) > len(pattern.operands):
        raise RuleError(
            f"rule {pattern.text!r} has {len(pattern.operands)} operands, "
            f"{call.node.op} was called with {len(shapes)} tensors",
            where=call.node.origin,
        )
    marks: dict[str, str] = {}
    sizes: dict[str, int] = {}
    operands = [
        _match(tensor, shape, sizes, marks, pattern, call)
        for tensor, shape in zip(pattern.operands, shapes, strict=False)
    ]
    results = [
        _match(tensor, shape, sizes, marks, pattern, call)
        for tensor, shape in zip(pattern.results, call.results, strict=True)
    ]
    axes = {
        name: Axis(name, size, frozen="^" in marks.get(name, "")) for name, size in sizes.items()
    }
    lacking = [n for n in axes if not all(_contains(r, n) for r in results)]
    for name in lacking:
        if "+" not in marks.get(name, ""):
            axes[name] = Axis(name, sizes[name], frozen=True)
    return NodeRule(
        axes=axes,
        operands=tuple(_drop_broadcast(o, s, axes) for o, s in zip(operands, shapes, strict=True)),
        results=tuple(results),
        linear=_linear(pattern, len(shapes)),
        additive=frozenset(i for i, t in enumerate(pattern.operands) if "+" in t.marks),
        localize=localize,
    )


def _contains(dims: Dims, name: str) -> bool:
    return any(isinstance(dim, tuple) and name in dim for dim in dims)


def _linear(pattern: Pattern, count: int) -> tuple[frozenset[int], ...]:
    given = pattern.operands[:count]
    added = frozenset(i for i, t in enumerate(given) if "+" in t.marks)
    single = [frozenset({i}) | added for i, t in enumerate(given) if t.marks == "~"]
    joint = frozenset(i for i, t in enumerate(given) if t.marks == "~~")
    return (*single, joint | added) if joint else tuple(single)


def _drop_broadcast(dims: Dims, shape: tuple[int, ...], axes: dict[str, Axis]) -> Dims:
    """Return a dim of one whose axis is larger is broadcast: it has no axis."""
    kept: list[Dim] = []
    for dim, size in zip(dims, shape, strict=True):
        large = isinstance(dim, tuple) and prod(axes[a].size for a in dim) != 1
        kept.append(() if size == 1 and large else dim)
    return tuple(kept)


def _match(
    tensor: Tensor,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    marks: dict[str, str],
    pattern: Pattern,
    call: Call,
) -> Dims:
    """Return the tensor's dims by axis name, filling in sizes."""
    expanded: list[tuple[str, ...]] = []
    for dim in tensor.dims:
        if len(dim) == 1 and "..." in dim[0]:
            stem = _name(dim[0]).removesuffix("...") or "_"
            flags = dim[0][len(_name(dim[0])) :]
            count = len(shape) - len(tensor.dims) + 1
            aligned = range(count, 0, -1)  # named from the right, as broadcasting aligns
            expanded += [(f"{stem}{number}{flags}",) for number in aligned]
        else:
            expanded.append(dim)
    if len(expanded) != len(shape):
        raise RuleError(
            f"rule {pattern.text!r}: an operand has {len(expanded)} dims, the tensor's shape is "
            f"{shape}",
            where=call.node.origin,
        )
    result: list[Dim] = []
    for dim, size in zip(expanded, shape, strict=True):
        names = tuple(_name(token) for token in dim)
        for name, token in zip(names, dim, strict=True):
            marks[name] = marks.get(name, "") + token[len(name) :]
        _solve(names, size, sizes, pattern, call)
        result.append(names)
    return tuple(result)


def _solve(
    names: tuple[str, ...], size: int, sizes: dict[str, int], pattern: Pattern, call: Call
) -> None:
    unknown = [name for name in names if name not in sizes]
    known = prod(sizes[name] for name in names if name in sizes)
    if len(unknown) == 1 and known and size % known == 0:
        sizes[unknown[0]] = size // known
    elif len(names) == 1 and sizes.get(names[0]) == 1:
        sizes[names[0]] = size  # an earlier operand was broadcast
    elif unknown or (known != size and size != 1):
        raise RuleError(
            f"rule {pattern.text!r}: dim {' '.join(names) or '1'} has size {size}, "
            f"expected {known}" + (f" with {', '.join(unknown)} unknown" if unknown else ""),
            where=call.node.origin,
        )
