"""Damaged files: the same for the same seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

DEEP = 50_000


def hostile_strings(count: int, sentinel: str, seed: int = 0) -> list[str]:
    """Strings that would make the file `sentinel`, or break out of wherever they stand."""
    code = f"__import__('pathlib').Path('{sentinel}').touch()"
    shell = f"touch {sentinel}"
    quotes = ('"""', "'''", '"', "'", "", "\\", '\\"', "\\'", '"""\\')
    ends = (
        "\n",
        "\r",
        "\x0b",
        "\x0c",
        "\x85",
        "\u2028",
        "\u2029",
        "\r\n",
        ";",
        "\n\n\n",
        "\t\n",
        "\0",
    )
    shapes = (
        "{q}{e}{code}{e}{q}",
        "{q}){e}{code}{e}#",
        "{q} + {code} + {q}",
        "{q}]{e}{code} #",
        "{q}}}{e}{code} #",
        "{{{code}}}",
        "{{q!r}}{{{code}!r:>{{{code}}}}}",
        "{q}:{e}    {code}{e}",
        "${{{code}}}",
        "\ufeff{q}{e}{code}",
        "\u202e{q}{e}{code}\u202c",
        "x{e}import os{e}os.system('{shell}'){e}",
        "$({shell})",
        "`{shell}`",
        "{q}; {shell} #",
        "| {shell}",
        "!!python/object/apply:os.system ['{shell}']",
        "!!python/name:os.system",
        "<script>{code}</script>",
        "--><img src=x onerror='{code}'>",
        "%({code})s",
        "\ud800{q}{e}{code}",
        "c__builtin__{e}exec{e}(S'{code}'{e}tR.",
        "../../../../{sentinel}",
        "{sentinel}",
        "tests.support.trainer:{code}",
        "os:system",
    )
    chance = random.Random(seed)
    words = (
        "class",
        "self",
        "rt",
        "torch",
        "outputs",
        "block",
        "eval",
        "__import__",
        "lambda",
        "def",
    )
    made: dict[str, None] = {}
    for shape in shapes:
        for quote in quotes:
            end = chance.choice(ends)
            made[shape.format(q=quote, e=end, code=code, shell=shell, sentinel=sentinel)] = None
    for quote in quotes:
        for end in ends:
            made[shapes[0].format(q=quote, e=end, code=code, shell=shell, sentinel=sentinel)] = None
    made |= dict.fromkeys(words)
    while len(made) < count:
        pieces = [chance.choice([*made][:400]) for _ in range(2)]
        cut = chance.randrange(1, 1 + len(pieces[0]))
        made[pieces[0][:cut] + chance.choice(ends) + pieces[1]] = None
    listed = list(made)
    chance.shuffle(listed)
    return listed[:count]


VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 64, 10**6, 2**31, 2**31 - 1, 2**53, 2**63, 2**64, 10**30,
    -(2**63), 0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), "", "x", "0", "-1", "1e999",
    "0-1000000000", "gpu[0-999999999]", "²", "class", "../../etc/passwd", "/dev/zero", "\ud800",
    "\x1b[2J", [], {}, [[]], [{}], {"a": 1}, [1] * 1000, ["x"] * 1000, "x" * 100_000,
    {str(i): i for i in range(1000)},
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of a value and of every value inside it."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], (*path, index))


def text_places(value: Any) -> list[tuple[Any, ...]]:
    """Return the paths of texts: of values, and of keys followed by `None`."""
    paths = []
    for path in places(value):
        inner = at(value, path)
        if isinstance(inner, str):
            paths.append(path)
        if path and isinstance(path[-1], str):
            paths.append((*path, None))
    return paths


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path."""
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at a path; a `None` at its end means the key itself."""
    if not path:
        return new
    value = copy.deepcopy(value)
    if path[-1] is None:
        owner = at(value, path[:-2])
        renamed = {new if key == path[-2] else key: inner for key, inner in owner.items()}
        owner.clear()
        owner.update(renamed)
        return value
    at(value, path[:-1])[path[-1]] = new
    return value


def _removed(value: Any, path: tuple[Any, ...]) -> Any:
    value = copy.deepcopy(value)
    if path:
        del at(value, path[:-1])[path[-1]]
    return value


def mutated_value(value: Any, chance: random.Random) -> Any:
    """Return the value with one to three changes."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        all_places = list(places(value))
        path = chance.choice(all_places)
        kind = chance.randrange(8)
        if kind == 0:
            value = _removed(value, path)
        elif kind == 1 and path and isinstance(path[-1], str):
            value = put(value, (*path, None), chance.choice(("", "x", f"{path[-1]}s", "class")))
        elif kind == 2:
            value = put(value, path, copy.deepcopy(at(value, chance.choice(all_places))))
        elif kind == 3 and isinstance(at(value, path), int | float):
            number = at(value, path)
            value = put(value, path, number * chance.choice((-1, 2, 1000, 10**9, 0)))
        elif kind == 4 and isinstance(at(value, path), list) and at(value, path):
            items = at(value, path)
            value = put(value, path, items * chance.choice((2, 50)))
        elif kind == 5 and isinstance(at(value, path), str):
            text = list(at(value, path) or "x")
            text[chance.randrange(len(text))] = chance.choice('"\\\n\0:[]{},*&!é²-.9')
            value = put(value, path, "".join(text))
        else:
            value = put(value, path, copy.deepcopy(chance.choice(VALUES)))
    return value


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes flipped, cut, doubled, moved, encoded otherwise, or nested."""
    size = max(1, len(data))
    first, second = sorted((chance.randrange(size), chance.randrange(size)))
    noise = bytes(chance.randrange(256) for _ in range(chance.choice((1, 4, 64))))
    opener = chance.choice((b"[", b'{"a":', b"- ", b"((", b"\n  a:"))
    flipped = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20))):
        if flipped:
            flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: bytes(flipped),
        lambda: data[:first],
        lambda: data[:first] + data[second:],
        lambda: data[:second] + data[first:],
        lambda: data[:first] + noise + data[first:],
        lambda: data.decode("utf-8", "replace").encode(chance.choice(("utf-16", "utf-32"))),
        lambda: data[:first] + opener * DEEP + data[first:],
        lambda: opener * DEEP,
        lambda: data * 2,
        lambda: data[:first] + b"9" * 5000 + data[first:],
        lambda: b"",
        lambda: b"\0" * size,
    )
    return kinds[chance.choice((0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11))]()


def bomb(chance: random.Random) -> bytes:
    """Return YAML whose aliases stand for billions of values, or for themselves."""
    width, depth = chance.randrange(5, 20), chance.randrange(8, 30)
    lines = ["a0: &a0 [x, x]"]
    for level in range(depth):
        uses = ", ".join([f"*a{level}"] * width)
        shape = chance.choice((f"[{uses}]", f"{{<<: [{uses}]}}", f"{{k: [{uses}]}}"))
        lines.append(f"a{level + 1}: &a{level + 1} {shape}")
    if chance.random() < 0.3:
        lines.append(f"self: &s [*s, *a{depth}]")
    return "\n".join(lines).encode()


def as_text(value: Any, kind: str) -> bytes:
    """Return a value as JSON or YAML; what YAML cannot write stands as JSON."""
    if kind == "yaml":
        try:
            return yaml.safe_dump(value, sort_keys=False).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, UnicodeError):
            pass
    return json.dumps(value).encode()


def doubled_key(value: Any, chance: random.Random) -> bytes:
    """Return JSON in which a key is given twice."""
    text = json.dumps(value)
    key = chance.choice(list(value)) if isinstance(value, dict) and value else "a"
    return text.replace(
        f"{json.dumps(key)}:", f"{json.dumps(key)}: 1, {json.dumps(key)}:", 1
    ).encode()
