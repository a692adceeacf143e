"""Write ATen calls as the Python expressions that a person would write.

An operator without an idiomatic form is written as `torch.ops.…`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.emit.quote import is_attribute, literal
from shardwise.ir.operators import signature

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "__and__": "&", "__or__": "|", "bitwise_and": "&", "bitwise_or": "|",
    "__xor__": "^", "bitwise_xor": "^", "floor_divide": "//", "remainder": "%", "matmul": "@",
}  # fmt: skip
# Written as methods of their first tensor, with the arguments of the schema.
METHODS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "flatten",
    "unflatten", "chunk", "split", "split_with_sizes", "contiguous", "clone", "neg", "abs",
    "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "erf",
    "square", "pow", "sum", "mean", "var", "std", "amax", "amin", "prod", "masked_fill",
    "cumsum", "detach", "float", "type_as", "expand_as", "gather", "index_select", "scatter",
    "scatter_add", "repeat", "repeat_interleave", "argmax", "argmin", "any", "all", "clamp",
    "clamp_min", "clamp_max", "tril", "triu", "unbind", "select", "narrow", "roll", "flip",
    "topk", "sort", "new_zeros", "new_ones", "new_full", "new_empty", "logical_and",
    "logical_or", "logical_not", "bitwise_not", "index_add", "movedim", "softmax",
    "log_softmax", "logsumexp", "round", "floor", "ceil", "t", "unfold",
}  # fmt: skip
FUNCTIONAL = {
    "linear", "gelu", "silu", "relu", "softplus", "leaky_relu", "hardtanh", "hardsigmoid",
    "hardswish", "log_sigmoid", "elu", "mish", "selu", "celu", "relu6", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "rms_norm", "glu", "avg_pool2d",
    "max_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "bilinear",
}  # fmt: skip
FACTORIES = (
    "arange", "zeros", "ones", "full", "eye", "linspace", "scalar_tensor", "empty", "rand", "randn",
    "tril_indices", "triu_indices",
)  # fmt: skip
SPELLING = {"split_with_sizes": "split", "log_sigmoid": "logsigmoid"}
KEYWORDS = {"sum": ("dim", "keepdim"), "mean": ("dim", "keepdim"), "var": ("dim",)}
REDUCTIONS = ("none", "mean", "sum")


Value = Callable[[Any], str]  # an argument as source: names for values, literals for constants
# Arguments, keyword arguments and their writer to an expression, or None for the general form.
Writer = Callable[[tuple[Any, ...], Mapping[str, Any], Value], str | None]


def render(fn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str:
    """Return the call as an expression."""
    namespace, _, name_and_overload = fn.partition(".")
    if namespace == "rt":
        return f"rt.{name_and_overload}({_listed(args, kwargs, value)})"
    if namespace == "autograd_function":
        return f"{value(UserFunction(fn))}.apply({_listed(args, kwargs, value)})"
    name = name_and_overload.split(".")[0]
    if namespace == "aten":
        special = SPECIAL.get(fn) or SPECIAL.get(f"aten.{name}")
        if special is not None:
            idiomatic = special(args, kwargs, value)
            if idiomatic is not None:
                return idiomatic
        if name in INFIX and len(args) == 2 and not kwargs:
            left, right = _operand(value(args[0])), value(args[1])
            right = right if isinstance(args[1], int | float) else _operand(right)
            return f"{left} {INFIX[name]} {right}"
        if name in METHODS and args and isinstance(args[0], int | float):
            return f"torch.{name}({_listed(args, kwargs, value)})"
        if name in METHODS and args:
            shown = SPELLING.get(name, name)
            return f"{_operand(value(args[0]))}.{shown}({_method_args(name, args, kwargs, value)})"
        if name in FUNCTIONAL:
            return f"F.{SPELLING.get(name, name)}({_listed(args, kwargs, value)})"
    called = "torch.ops"
    for part in fn.split("."):
        called = f"{called}.{part}" if is_attribute(part) else f"getattr({called}, {literal(part)})"
    return f"{called}({_listed(args, kwargs, value)})"


def _operand(text: str) -> str:
    """Parenthesize anything that is not a name, a call or an index."""
    depth = 0
    for character in text:
        depth += character in "([{"
        depth -= character in ")]}"
        if depth == 0 and character == " ":
            return f"({text})"
    return f"({text})" if text.startswith("-") else text


def _listed(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str:
    named = [
        f"{name}={value(arg)}" if is_attribute(name) else f"**{{{literal(name)}: {value(arg)}}}"
        for name, arg in kwargs.items()
    ]
    return ", ".join([*(value(arg) for arg in args), *named])


def _method_args(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str:
    remaining = args[1:]
    if name in {"view", "reshape", "permute", "expand", "repeat"} and len(remaining) >= 1:
        sizes = remaining[0]
        if isinstance(sizes, tuple) and sizes and len(remaining) == 1:
            return _listed(sizes, kwargs, value)
    if name in KEYWORDS and isinstance(remaining[0] if remaining else None, tuple | list):
        named = dict(zip(KEYWORDS[name], remaining, strict=False))
        if len(remaining) <= len(named):
            return _listed((), {**named, **kwargs}, value)
    return _listed(remaining, kwargs, value)


def bound(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by schema name, with defaults filled in."""
    return {
        name: args[i] if i < len(args) else kwargs.get(name, default)
        for i, (name, default) in enumerate(signature(op) or ())
    }


def _embedding(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str:
    a = bound("aten.embedding.default", args, kwargs)
    padding = "" if a["padding_idx"] in (-1, None) else f", {a['padding_idx']}"
    sparse = ", sparse=True" if a["sparse"] else ""
    return f"F.embedding({value(a['indices'])}, {value(a['weight'])}{padding}{sparse})"


def _function(name: str, *positional: str, op: str = "", named: tuple[str, ...] = ()) -> Writer:
    """Write a function of `F`, with the arguments in `named` that differ from their defaults."""
    op = f"aten.{op or name}.default"

    def written(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str:
        a, defaults = bound(op, args, kwargs), dict(signature(op) or ())
        arguments = [value(a[n]) for n in positional]
        for n in named:
            if a[n] is not None and a[n] != defaults[n]:
                shown = REDUCTIONS[a[n]] if n == "reduction" else a[n]
                arguments.append(f"{n}={value(shown)}")
        return f"F.{name}({', '.join(arguments)})"

    return written


def _slice(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str | None:
    a = bound("aten.slice.Tensor", args, kwargs)
    dim, start, end, step = a["dim"] or 0, a["start"] or 0, a["end"], a["step"] or 1
    if dim < 0 or dim > 3:
        return None
    first = "" if start == 0 else str(start)
    last = "" if end is None or end >= 2**62 else str(end)
    stride = "" if step == 1 else f":{step}"
    return f"{_operand(value(a['self']))}[{':, ' * dim}{first}:{last}{stride}]"


def _select(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str | None:
    a = bound("aten.select.int", args, kwargs)
    if a["dim"] < 0 or a["dim"] > 3:
        return None
    return f"{_operand(value(a['self']))}[{':, ' * a['dim']}{a['index']}]"


def _sequence(name: str) -> Writer:
    def written(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str | None:
        items = ", ".join(value(item) for item in args[0])
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return f"torch.{name}([{items}], dim={dim})"

    return written


def _factory(name: str) -> Writer:
    def written(args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Value) -> str | None:
        return f"torch.{name}({_listed(args, {**kwargs, 'device': Own('device')}, value)})"

    return written


@dataclass(frozen=True, slots=True)
class Own:
    """Placeholder for the module's own attribute `device` or `rng` in arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class UserFunction:
    """Placeholder for a user's `autograd.Function`, by its operator's name."""

    op: str


SPECIAL: dict[str, Writer] = {
    "aten.embedding": _embedding,
    "aten.layer_norm": _function(
        "layer_norm", "input", "normalized_shape", "weight", "bias", "eps"
    ),
    "aten.group_norm": _function("group_norm", "input", "num_groups", "weight", "bias", "eps"),
    "aten.scaled_dot_product_attention": _function(
        "scaled_dot_product_attention",
        *("query", "key", "value"),
        named=("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
    ),
    "aten.cross_entropy_loss": _function(
        "cross_entropy",
        *("self", "target"),
        op="cross_entropy_loss",
        named=("weight", "ignore_index", "reduction", "label_smoothing"),
    ),
    "aten.to.dtype": lambda args, _, value: f"{_operand(value(args[0]))}.to({value(args[1])})",
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.cat": _sequence("cat"),
    "aten.stack": _sequence("stack"),
    "aten.where.self": lambda args, kwargs, value: (
        f"torch.where({_listed(args, kwargs, value)})" if len(args) == 3 else None
    ),
    **{f"aten.{name}": _factory(name) for name in FACTORIES},
}


# ---------------------------------------------------------------- long lines
WIDTH = 96


def wrap(line: str) -> str:
    """Break a line that is too long at the arguments of its outermost call.

    >>> print(wrap("x = f(" + "a" * 60 + ", " + "b" * 60 + ")"))  # doctest: +ELLIPSIS
    x = f(
        aaa...,
        bbb...,
    )
    """
    if len(line) <= WIDTH or "\n" in line or line.lstrip().startswith("#"):
        return line
    opened = _outermost(line)
    if opened is None:
        return line
    start, stop = opened
    indent = " " * (len(line) - len(line.lstrip()))
    pieces = _arguments(line[start + 1 : stop])
    called = start > 0 and (line[start - 1].isalnum() or line[start - 1] in "_])")
    # A trailing comma would turn a parenthesized expression, or an index, into a tuple.
    comma = "," if (called and line[start] == "(") or len(pieces) > 1 else ""
    inner = [wrap(f"{indent}    {piece.strip()}{comma}") for piece in pieces if piece.strip()]
    return "\n".join([line[: start + 1], *inner, f"{indent}{line[stop:]}"])


def _outermost(line: str) -> tuple[int, int] | None:
    """Return the longest bracket pair at depth one."""
    depth, start = 0, 0
    best: tuple[int, int] | None = None
    for index, character in _unquoted(line):
        if character in "([{":
            start = index if depth == 0 else start
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and (best is None or index - start > best[1] - best[0]):
                best = (start, index)
    return best if best and best[1] - best[0] > 20 else None


def _arguments(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    pieces, depth, begin = [], 0, 0
    for index, character in _unquoted(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append(text[begin:index])
            begin = index + 1
    return [*pieces, text[begin:]]


def _unquoted(text: str) -> Iterator[tuple[int, str]]:
    """Yield the characters outside of quotes, with their positions."""
    quote, escaped = "", False
    for index, character in enumerate(text):
        if quote:
            ends = character == quote and not escaped
            escaped = character == "\\" and not escaped
            quote = "" if ends else quote
        elif character in "\"'":
            quote = character
        else:
            yield index, character
