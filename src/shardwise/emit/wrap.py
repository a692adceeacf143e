"""Breaks lines that are too long at the arguments of their outermost call."""

from __future__ import annotations

from collections.abc import Iterator

WIDTH = 96


def wrap(line: str) -> str:
    """Return the line, or several if it is longer than the limit.

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
    # A comma would make a tuple of a group, and of an index.
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
    """Yield the characters outside of quotes, with their places."""
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
