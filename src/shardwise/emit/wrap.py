"""Breaks lines that are too long at the arguments of their outermost call."""

from __future__ import annotations

WIDTH = 96


def wrap(line: str) -> str:
    """The line, or several if it is longer than the limit.

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
    comma = "," if called or len(pieces) > 1 else ""  # a comma would make a group a tuple
    inner = [wrap(f"{indent}    {piece.strip()}{comma}") for piece in pieces if piece.strip()]
    return "\n".join([line[: start + 1], *inner, f"{indent}{line[stop:]}"])


def _outermost(line: str) -> tuple[int, int] | None:
    """The longest bracket pair at depth one."""
    depth, start = 0, 0
    best: tuple[int, int] | None = None
    quote = ""
    for index, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            start = index if depth == 0 else start
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and (best is None or index - start > best[1] - best[0]):
                best = (start, index)
    return best if best and best[1] - best[0] > 20 else None


def _arguments(text: str) -> list[str]:
    """Split at commas outside brackets and quotes."""
    pieces, depth, current, quote = [], 0, "", ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and not quote:
            pieces.append(current)
            current = ""
        else:
            current += character
    return [*pieces, current]
