"""Pages with code and what it prints; `python -m tests.support.pages docs/tour.md` writes that.

A fenced `python` block that a `text` (or bare) block follows must print that block. Blocks of a
page share their names. Relative errors are rounding, so their digits are not compared.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path

BLOCK = re.compile(
    r"```python\n(?P<code>.*?)```\n(?P<between>\s*)(?:```(?:text)?\n(?P<out>.*?)```)?", re.S
)
ERROR = re.compile(r"\d\.\de-\d+")


def run_page(text: str, limit: int | None = None) -> str:
    """The page with the outputs that its code prints now."""
    names: dict[str, object] = {}

    def fill(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(match["code"], names)
        if match["out"] is None:
            return match[0]
        start, end = (p - match.start() for p in match.span("out"))
        return match[0][:start] + printed.getvalue() + match[0][end:]

    return BLOCK.sub(fill, text, count=limit or 0)


def without_errors(text: str) -> str:
    """The text with every relative error as one word."""
    return ERROR.sub("ERROR", text)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument)
        page.write_text(run_page(page.read_text(), limit=1 if page.name == "README.md" else None))
