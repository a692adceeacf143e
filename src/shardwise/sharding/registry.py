"""The table of rules: which function describes which operator.

Enters: registrations of the rule families and of users. Leaves: `rule_for(call)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import overload

import torch

from shardwise.errors import RuleError, did_you_mean
from shardwise.sharding.notation import from_notation
from shardwise.sharding.rule import Call, Localize, NodeRule, RuleFunction, whole_rule

RULES: dict[str, RuleFunction] = {}
WHOLE: dict[str, str] = {}
REGISTERED: list[str] = []  # by users, in order
_BUILT_IN = ("aten", "prims", "prim", "quantized")  # namespaces that are complete with torch


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function for operators: `aten.view` (all overloads) or `aten.add.Tensor`."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            RULES[name] = function
        return function

    return register


def notation(text: str, *names: str, localize: Localize | None = None) -> None:
    """Register one line of notation for operators."""
    for name in names:
        RULES[name] = from_notation(text, localize=localize)


def keep_whole(reason: str, *names: str) -> None:
    """Mark operators that are never cut, with the reason that plans show."""
    for name in names:
        WHOLE[name] = reason


@overload
def register_rule(op: str, pattern: str) -> None: ...
@overload
def register_rule(op: str, pattern: None = None) -> Callable[[RuleFunction], RuleFunction]: ...
def register_rule(
    op: str, pattern: str | None = None
) -> Callable[[RuleFunction], RuleFunction] | None:
    """Tell how a user's own operator may be split.

    One line, `register_rule("mylib::op", "b k+, n k+ -> b n")`, or as a decorator of a function
    from `Call` to `NodeRule`. It replaces any rule there was. An operator of PyTorch's own must
    exist now, one of another library when a plan is made.
    """
    name = op.replace("::", ".")
    if not name or "." not in name:
        raise RuleError(f"operator {op!r} has no namespace", hint="register_rule('mylib::op', …)")
    if name.split(".")[0] in _BUILT_IN:
        require_operator(name)
    WHOLE.pop(name, None)
    REGISTERED.append(name)
    if pattern is None:
        return rule(name)
    RULES[name] = from_notation(pattern)
    return None


def require_operator(name: str) -> None:
    """Raise unless there is an operator, or an overload of one, of this name."""
    namespace, packet, *overload = name.split(".")
    if name.startswith(("autograd_function.", "shardwise.")):
        return  # not of torch.ops
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is not None and (not overload or overload[0] in found.overloads()):
        return
    if found is not None:
        known = [f"{namespace}::{packet}.{other}" for other in found.overloads()]
    else:
        known = [f"{namespace}::{other}" for other in dir(getattr(torch.ops, namespace))]
        known += [rule.replace(".", "::", 1) for rule in RULES if rule.startswith(f"{namespace}.")]
        asked = {name.replace(".", "::", 1), f"{namespace}::name"}
        known = [other for other in known if "__" not in other and other not in asked]
    text = f"{namespace}::{'.'.join([packet, *overload])}"
    raise RuleError(
        f"there is no operator {text}{did_you_mean(text, known)}",
        hint="a rule is for an operator of torch.ops; import the library that defines it first",
    )


def require_operators() -> None:
    """Raise unless every operator that a user registered a rule for exists."""
    for name in dict.fromkeys(REGISTERED):
        require_operator(name)


def rules_revision() -> int:
    """A number that changes with every rule of a user: programs made before knew other rules."""
    return len(REGISTERED)


def find_rule(op: str) -> RuleFunction | None:
    """Return the rule function of an operator: its overload's, or its packet's."""
    return RULES.get(op) or RULES.get(op.rsplit(".", 1)[0])


def whole_reason(op: str) -> str | None:
    """Why an operator is never cut, if it is not."""
    return WHOLE.get(op) or WHOLE.get(op.rsplit(".", 1)[0])


def rule_for(call: Call) -> NodeRule | None:
    """Return the rule applied to this call; None when the operator is not known."""
    op = call.node.op
    reason = whole_reason(op)
    if reason:
        return whole_rule(call, reason)
    function = find_rule(op)
    return function(call) if function else None
