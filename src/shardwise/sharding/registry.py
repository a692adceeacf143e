"""The registry of rules, which are functions or one line of notation.

    "b... k+, n k+, n -> b... n"      a linear layer: k is summed over, b... is any number of dims
    "b t (c h e) -> b t c h e"        a dim may be a product of axes
    "... s^ -> ... s^"                an axis that may not be sharded
    "b k+, 1 k+ -> b"                 `1` is a dim without an axis

Operands are the call's tensor arguments in order; a call may omit operands at the end. `+` marks an
operand that is added to the result (a bias). `~` marks an operand in which the node is linear, `~~`
operands in which it is linear together: partial sums may pass through them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import overload

import torch

from shardwise.errors import RuleError, did_you_mean
from shardwise.sharding.rule import Axis, Call, NodeRule, RuleFunction, replicated_rule

TOKEN = re.compile(r"\s*(\(|\)|1|(?:[A-Za-z]\w*)?\.\.\.[+^]*|[A-Za-z]\w*[+^]*)")


AxisNames = tuple[tuple[str, ...], ...]  # of each dim


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parsed operand or result: dims, each a tuple of axis tokens; one may be an ellipsis."""

    dims: AxisNames
    marks: str = ""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed rule."""

    text: str
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


@cache
def parse(text: str) -> Pattern:
    """Parse a rule; the error of a malformed one shows the text and the place."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'", hint='"b k+, n k+ -> b n"')
    operands = tuple(_tensor(part, text) for part in left.split(","))
    results = tuple(_tensor(part, text) for part in right.split(","))
    operand_axes = {_name(a) for t in operands for dim in t.dims for a in dim}
    for tensor in results:
        for axis in (a for dim in tensor.dims for a in dim):
            if _name(axis) not in operand_axes:
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


def from_notation(text: str) -> RuleFunction:
    """Return a rule function that applies the notation to a call."""
    pattern = parse(text)
    return lambda call: _Match(pattern, call).rule()


class _Match:
    """Match a pattern with a call's shapes."""

    def __init__(self, pattern: Pattern, call: Call) -> None:
        self.pattern, self.call = pattern, call
        self.sizes: dict[str, int] = {}
        self.marks: dict[str, str] = {}

    def rule(self) -> NodeRule:
        """Return the rule of the call."""
        pattern, call, shapes = self.pattern, self.call, self.call.operands
        if len(shapes) > len(pattern.operands):
            raise self._error(
                f" has {len(pattern.operands)} operands, {call.node.op} was called with "
                f"{len(shapes)} tensors"
            )
        operands = [self._dims(*pair) for pair in zip(pattern.operands, shapes, strict=False)]
        results = [self._dims(*pair) for pair in zip(pattern.results, call.results, strict=True)]
        axes: dict[str, Axis] = {}
        for name, size in self.sizes.items():
            summed = not all(any(name in dim for dim in dims) for dims in results)
            marks = self.marks[name]
            axes[name] = Axis(name, size, frozen="^" in marks or (summed and "+" not in marks))
        dims = zip(operands, shapes, strict=True)
        return NodeRule(
            axes,
            tuple(_drop_broadcast(operand, shape, axes) for operand, shape in dims),
            tuple(results),
            linear=_linear(pattern, len(shapes)),
            additive=frozenset(i for i, t in enumerate(pattern.operands) if "+" in t.marks),
        )

    def _error(self, problem: str) -> RuleError:
        return RuleError(f"rule {self.pattern.text!r}{problem}", where=self.call.node.origin)

    def _dims(self, tensor: Tensor, shape: tuple[int, ...]) -> AxisNames:
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
            raise self._error(
                f": an operand has {len(expanded)} dims, the tensor's shape is {shape}"
            )
        result: list[tuple[str, ...]] = []
        for dim, size in zip(expanded, shape, strict=True):
            names = tuple(_name(token) for token in dim)
            for name, token in zip(names, dim, strict=True):
                self.marks[name] = self.marks.get(name, "") + token[len(name) :]
            self._solve(names, size)
            result.append(names)
        return tuple(result)

    def _solve(self, names: tuple[str, ...], size: int) -> None:
        sizes = self.sizes
        unknown = [name for name in names if name not in sizes]
        known_size = prod(sizes[name] for name in names if name in sizes)
        if len(unknown) == 1 and known_size and size % known_size == 0:
            sizes[unknown[0]] = size // known_size
        elif len(names) == 1 and sizes.get(names[0]) == 1:
            sizes[names[0]] = size  # an earlier operand was broadcast
        elif unknown or (known_size != size and size != 1):
            missing = f" with {', '.join(unknown)} unknown" if unknown else ""
            raise self._error(
                f": dim {' '.join(names) or '1'} has size {size}, expected {known_size}{missing}"
            )


def _linear(pattern: Pattern, count: int) -> tuple[frozenset[int], ...]:
    operands = pattern.operands[:count]
    added = frozenset(i for i, t in enumerate(operands) if "+" in t.marks)
    single = [frozenset({i}) | added for i, t in enumerate(operands) if t.marks == "~"]
    joint = frozenset(i for i, t in enumerate(operands) if t.marks == "~~")
    return (*single, joint | added) if joint else tuple(single)


def _drop_broadcast(dims: AxisNames, shape: tuple[int, ...], axes: dict[str, Axis]) -> AxisNames:
    """Return the dims without the axes of broadcast ones, which have one element of many."""
    return tuple(
        () if size == 1 and prod(axes[a].size for a in dim) != 1 else dim
        for dim, size in zip(dims, shape, strict=True)
    )


# ---------------------------------------------------------------- the registry
RULES: dict[str, RuleFunction] = {}
REPLICATED: dict[str, str] = {}  # operators that are never sharded, with the reason
REGISTERED: list[str] = []  # by users, in order
_BUILT_IN = ("aten", "prims", "prim", "quantized")  # namespaces that are complete with torch


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for operators: `aten.view` (all overloads) or `aten.add.Tensor`."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            RULES[name] = function
        return function

    return register


def notation(text: str, *names: str) -> None:
    """Register one line of notation for operators."""
    rule(*names)(from_notation(text))


def keep_replicated(reason: str, *names: str) -> None:
    """Mark operators that are never sharded, with the reason that plans show."""
    REPLICATED.update(dict.fromkeys(names, reason))


@overload
def register_rule(op: str, pattern: str) -> None: ...
@overload
def register_rule(op: str, pattern: None = None) -> Callable[[RuleFunction], RuleFunction]: ...
def register_rule(
    op: str, pattern: str | None = None
) -> Callable[[RuleFunction], RuleFunction] | None:
    """Register how a user's own operator may be sharded.

    Pass one line of notation, `register_rule("mylib::op", "b k+, n k+ -> b n")`, or decorate a
    function from `Call` to `NodeRule`. It replaces any existing rule. An operator of PyTorch itself
    must exist now, one of another library when a plan is made.
    """
    name = op.replace("::", ".")
    if not name or "." not in name:
        raise RuleError(f"operator {op!r} has no namespace", hint="register_rule('mylib::op', …)")
    if name.split(".")[0] in _BUILT_IN:
        require_operator(name)
    REPLICATED.pop(name, None)
    REGISTERED.append(name)
    if pattern is None:
        return rule(name)
    RULES[name] = from_notation(pattern)
    return None


def require_operator(name: str) -> None:
    """Raise unless an operator, or an overload of one, has this name."""
    namespace, packet, *overload = name.split(".")
    if name.startswith(("autograd_function.", "shardwise.")):
        return  # not in torch.ops
    overloads = getattr(getattr(torch.ops, namespace), packet, None)
    if overloads is not None and (not overload or overload[0] in overloads.overloads()):
        return
    if overloads is not None:
        names = [f"{namespace}::{packet}.{other}" for other in overloads.overloads()]
    else:
        names = [f"{namespace}::{other}" for other in dir(getattr(torch.ops, namespace))]
        names += [rule.replace(".", "::", 1) for rule in RULES if rule.startswith(f"{namespace}.")]
        excluded = {name.replace(".", "::", 1), f"{namespace}::name"}
        names = [other for other in names if "__" not in other and other not in excluded]
    text = f"{namespace}::{'.'.join([packet, *overload])}"
    raise RuleError(
        f"there is no operator {text}{did_you_mean(text, names)}",
        hint="a rule is for an operator of torch.ops; import the library that defines it first",
    )


def require_operators() -> None:
    """Raise unless every operator that a user registered a rule for exists."""
    for name in dict.fromkeys(REGISTERED):
        require_operator(name)


def is_registered(op: str) -> bool:
    """Return whether a user registered the rule of an operator, such as `mylib.op.default`."""
    return op in REGISTERED or op.rsplit(".", 1)[0] in REGISTERED


def rules_revision() -> int:
    """Return a number that changes whenever a user registers a rule, to invalidate programs."""
    return len(REGISTERED)


def rule_for(call: Call) -> NodeRule | None:
    """Return the rule of this call's overload, or else of its packet; None if there is neither."""
    op, packet = call.node.op, call.node.op.rsplit(".", 1)[0]
    if reason := REPLICATED.get(op) or REPLICATED.get(packet):
        return replicated_rule(call, reason)
    function = RULES.get(op) or RULES.get(packet)
    return function(call) if function else None
