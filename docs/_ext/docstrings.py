"""Signatures and docstrings as a person would read them.

Shorten the signatures that autodoc reads (types without their modules, `...` for default factories)
and show indented tables of docstrings as they are written.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

HOME = re.compile(r"~(?:\w+\.)+(\w+)")
ANNOTATED = re.compile(r"Annotated\[(\w+), [^\[\]]*\]")


def shorten(
    app: Sphinx, what: str, name: str, documented: Any, options: Any, signature: str, result: str
) -> tuple[str, str] | None:
    """`~collections.abc.Mapping[str, int] = <factory>` is `Mapping[str, int] = ...`."""
    if not signature or "<factory>" not in signature:
        return None
    short = HOME.sub(r"\1", signature).replace("<factory>", "...")
    return ANNOTATED.sub(r"\1", short), result


def keep_tables(
    app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]
) -> None:
    """Mark indented paragraphs by `::`, so that reStructuredText shows them as they are."""
    shown: list[str] = []
    for before, line in zip(["", *lines], lines, strict=False):
        is_block = shown and shown[-1].startswith("    ")
        if line.startswith("    ") and not before.strip() and not is_block:
            last = next((text for text in reversed(shown) if text.strip()), "")
            if not last.startswith(("    ", "::")):
                shown += ["::", ""]
        shown.append(line)
    lines[:] = shown


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions above; Sphinx calls this."""
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", keep_tables)
    return {"parallel_read_safe": True}
