"""Quote text from outside that enters emitted code: literals, comments and names.

Text from plan files, module paths, batch keys, file names and class names ends up in emitted code,
which is executed. All of it passes through these functions, so that none can escape: a literal
stays inside its quotes, a comment on its line, a docstring between its quotes, and a name is a
plain ASCII identifier that shadows nothing.
"""

import builtins
import dataclasses
import keyword
import math
import re
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.errors import ProgramError

# Names that emitted functions use themselves, so that no value may have them.
RESERVED = {
    *keyword.kwlist, *dir(builtins), "torch", "nn", "F", "rt", "self", "math", "mesh",
    "checkpoint", "outputs", "block", "FUNCTIONS",
}  # fmt: skip
# Names at the head of emitted files, so that no class may have them.
TABLES = {"PARAMETERS", "BUCKET_BYTES", "BUFFERS", "INPUTS", "PRECOMPUTED", "RECEIVED", "SENT"}
LONGEST = 60  # characters of a name
_RECOMPUTED = re.compile(r"recomputed_\d+")  # functions that backward calls again
_ATTRIBUTE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def literal(value: Any) -> str:
    """Return a constant as Python source.

    >>> literal((1, float("-inf"), torch.float32))
    '(1, -math.inf, torch.float32)'
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, str):
        return f'"{_escape_all(value)}"'
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.device):
        return literal(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "math.nan" if math.isnan(value) else ("math.inf" if value > 0 else "-math.inf")
    if isinstance(value, tuple | list):
        inner = ", ".join(literal(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, int):  # a subclass may print as anything
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, dict):
        return mapping(value.items())
    if isinstance(value, slice):
        return f"slice{literal((value.start, value.stop, value.step))}"
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if value is ...:
        return "..."
    if dataclasses.is_dataclass(value):
        return described(value)
    raise ProgramError(
        f"a constant of type {type(value).__name__} cannot be written as Python code",
        hint="use numbers, strings, None, and tuples and dicts of them; make tensors inputs or "
        "buffers",
    )


def described(value: Any, *always: str) -> str:
    """Return a description for the runtime as Python source, without fields that are the default.

    The fields in `always` are written in any case.
    """
    values = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    given = [(f.name, v) for f, v in values if f.name in always or v != f.default]
    return f"rt.{type(value).__name__}({', '.join(f'{n}={literal(v)}' for n, v in given)})"


def mapping(items: Iterable[tuple[Any, Any]]) -> str:
    """Return a dict of constants as Python source."""
    return "{" + ", ".join(f"{literal(key)}: {literal(value)}" for key, value in items) + "}"


def in_fstring(text: str) -> str:
    """Escape text for an f-string with double quotes."""
    return _escape_all(text).replace("{", "{{").replace("}", "}}")


def _escape_all(text: str) -> str:
    r"""Escape characters that could end a literal or be displayed as something else.

    >>> _escape_all('a"b' + chr(10))
    'a\\x22b\\x0a'
    """
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character.isprintable() and character not in "\"'":
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\U{code:08x}"


def comment(text: str) -> str:
    """Return text for a comment or a docstring, which it can neither end nor reverse.

    >>> comment("blocks.0 (model.py:3)"), comment('a"b')
    ('blocks.0 (model.py:3)', "a'b")
    """
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return shown.replace("\\", "/").replace('"', "'")


def identifier(text: str) -> str:
    """Return a valid Python name for any text.

    >>> identifier("layers.0"), identifier("sum")
    ('layers_0', 'sum_')
    """
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")[:LONGEST] or "x"
    if name[0].isdigit():
        name = f"x{name}"
    return f"{name}_" if name in RESERVED or _RECOMPUTED.fullmatch(name) else name


def unused(name: str, taken: Iterable[str]) -> str:
    """Return the name, with the first number that makes it unique if it is taken.

    >>> unused("Block", {"Block", "Block2"})
    'Block3'
    """
    taken, stem, count = set(taken), name, 1
    while name in taken:
        count += 1
        name = f"{stem}{count}"
    return name


def is_attribute(text: str) -> bool:
    """Return whether `self.text` is the attribute of exactly that name.

    Python normalizes names that are not ASCII, and mangles private names inside a class.

    >>> [is_attribute(text) for text in ("attn", "0", "for", "a-b", "__secret")]
    [True, False, False, False, False]
    """
    if not _ATTRIBUTE.fullmatch(text) or keyword.iskeyword(text):
        return False
    return not text.startswith("__") or text.endswith("__")


def is_importable(module: str, name: str) -> bool:
    """Return whether `from module import name` is valid code that imports only this name."""
    pieces = (*module.split("."), name)
    return all(_ATTRIBUTE.fullmatch(p) and not keyword.iskeyword(p) for p in pieces)
