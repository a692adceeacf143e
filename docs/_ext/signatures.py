"""Signatures of frozen dataclasses as a person would write them.

Enters: what autodoc read. Leaves: the same without the homes of types, `...` for made defaults.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

HOME = re.compile(r"~(?:\w+\.)+(\w+)")


def shorten(
    app: Sphinx, what: str, name: str, found: Any, options: Any, signature: str, result: str
) -> tuple[str, str] | None:
    """`~collections.abc.Mapping[str, int] = <factory>` is `Mapping[str, int] = ...`."""
    if not signature or "<factory>" not in signature:
        return None
    return HOME.sub(r"\1", signature).replace("<factory>", "..."), result


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True}
