"""A report as one HTML file that needs nothing else.

Enters: a report, or the JSON it gives. Leaves: the text of a page. The files of `page/` are real
HTML, CSS and ES modules without a build step: they are joined here into one style and one script,
and the page's security policy allows these two by their hash and nothing else, no network at all.
The data stands beside them as JSON in which nothing can end its element.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

FIRST = "main"  # the module that imports all others
STYLES = ("base", "parts", "sections", "print")
UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
HEIGHT = 760  # pixels of a report in a notebook

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_PLACE = re.compile(r"<!--\s*(\w+)\s*-->")


class Document(Protocol):
    """What knows its own JSON."""

    def to_json(self) -> Mapping[str, Any]: ...


def render(document: Document | Mapping[str, Any]) -> str:
    """Return the page of a report."""
    data = document if isinstance(document, Mapping) else document.to_json()
    style, script = _style(), _script()
    title = str(data.get("title", "Shardwise")).encode(errors="replace").decode()
    parts = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">',
        "title": f"<title>{html.escape(title)}</title>",
        "style": f"<style>{style}</style>",
        "data": f'<script type="application/json" id="report-data">{embedded(data)}</script>',
        "script": f"<script>{script}</script>",
    }
    return _PLACE.sub(lambda found: parts[found[1]], _read("page.html"))


def frame(page: str, height: int = HEIGHT) -> str:
    """Return the page as an element of a notebook: it runs apart from the notebook's own page."""
    return (
        f'<iframe title="Shardwise report" sandbox="allow-scripts allow-modals" '
        f'style="width:100%;height:{height}px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    )


def embedded(data: Mapping[str, Any]) -> str:
    r"""JSON for a script element: no character of it means anything to HTML.

    >>> print(embedded({"name": "</script>"}))
    {"name":"\u003c/script\u003e"}
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate has no UTF-8 form; the file could not be written.
    text = re.sub(r"[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return text.translate(UNSAFE)


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _read(name: str) -> str:
    return (files("shardwise.reporting") / "page" / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return "\n".join(_read(f"{name}.css") for name in STYLES)


@cache
def _script() -> str:
    """All modules in one: each a function that returns its exports, after those it imports."""
    parts = [_module(name) for name in _ordered(FIRST, ())]
    script = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
    assert "</script" not in script.lower()
    assert "<!--" not in script
    return script


def _ordered(name: str, above: tuple[str, ...], seen: set[str] | None = None) -> Iterator[str]:
    """Yield a module after all that it imports."""
    assert name not in above, f"{name}.js imports itself through {above}"
    seen = set() if seen is None else seen
    if name in seen:
        return
    for _, other in _IMPORT.findall(_read(f"{name}.js")):
        yield from _ordered(other, (*above, name), seen)
    seen.add(name)
    yield name


def _module(name: str) -> str:
    text = _read(f"{name}.js")
    exports = ", ".join(_EXPORT.findall(text))
    body = _EXPORT.sub("", _IMPORT.sub(r"const {\1} = $\2;\n", text))
    assert not re.search(r"^(import|export)\b", body, re.MULTILINE), f"{name}.js: unknown form"
    return f"const ${name} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"
