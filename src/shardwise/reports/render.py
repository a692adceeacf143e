"""Render a report as one self-contained HTML file.

The files of `page/` are plain HTML, CSS and ES modules without a build step. They are joined here
into one style and one script; the page's security policy allows these two by their hash and nothing
else, not even network access. The data is JSON in which no text can end its element.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.collectives.messages.program import format_ranks, parse_ranks
from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.plans import Plan
from shardwise.plans.search_result import GeneratedCode, GeneratedFile, PlanDetails
from shardwise.reports.document import Code, CodeFile, source_row

MAIN = "main"  # the module that imports all others
STYLES = ("base", "parts", "sections", "print")
UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}
HEIGHT = 760  # pixels of a report in a notebook

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_PLACE = re.compile(r"<!--\s*(\w+)\s*-->")


def render(data: Mapping[str, Any]) -> str:
    """Return the page of a report, given as JSON values."""
    style, script = "\n".join(_read(f"{name}.css") for name in STYLES), _script()
    title = str(data.get("title", "Shardwise")).encode(errors="replace").decode()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "title": f"<title>{html.escape(title)}</title>",
        "style": f"<style>{style}</style>",
        "data": f'<script type="application/json" id="report-data">{embedded(data)}</script>',
        "script": f"<script>{script}</script>",
    }
    return _PLACE.sub(lambda match: parts[match[1]], _read("page.html"))


def frame(page: str, height: int = HEIGHT) -> str:
    """Return the page as an element for a notebook, isolated from the rest of the notebook."""
    return (
        f'<iframe title="Shardwise report" sandbox="allow-scripts allow-modals" '
        f'style="width:100%;height:{height}px;border:0" srcdoc="{html.escape(page)}"></iframe>'
    )


def embedded(data: Mapping[str, Any]) -> str:
    r"""Return JSON for a script element, without characters that have a meaning in HTML.

    >>> print(embedded({"name": "</script>"}))
    {"name":"\u003c/script\u003e"}
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Unpaired surrogates cannot be encoded as UTF-8.
    text = re.sub(r"[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return text.translate(UNSAFE)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _read(name: str) -> str:
    return (files("shardwise.reports") / "page" / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """Join all modules into one script, each as a function that returns its exports."""
    parts = [_module(name) for name in _ordered(MAIN, ())]
    script = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
    assert "</script" not in script.lower()
    assert "<!--" not in script
    return script


def _ordered(name: str, above: tuple[str, ...], done: set[str] | None = None) -> Iterator[str]:
    """Yield a module after all modules that it imports."""
    assert name not in above, f"{name}.js imports itself through {above}"
    done = set() if done is None else done
    if name in done:
        return
    for _, other in _IMPORT.findall(_read(f"{name}.js")):
        yield from _ordered(other, (*above, name), done)
    done.add(name)
    yield name


def _module(name: str) -> str:
    text = _read(f"{name}.js")
    exports = ", ".join(_EXPORT.findall(text))
    body = _EXPORT.sub("", _IMPORT.sub(r"const {\1} = $\2;\n", text))
    assert not re.search(r"^(import|export)\b", body, re.MULTILINE), f"{name}.js: unknown form"
    return f"const ${name} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"


# ------------------------------------------------------------ generated code
# A comment in a generated file names the user's line behind all statements below it, up to the next
# comment or the end of the function.


MAX_NODES = 3_000  # of a graph whose code is generated in a few seconds
MAX_CHARACTERS = 400_000  # of code in a plan file
COMMENT = re.compile(r"^\s*# .*\((?P<source>[^()]+:\d+)\)\s*$")
DOCSTRING = re.compile(r'^\s*""".*\((?P<source>[^()]+:\d+)\)\."""\s*$')


def with_code(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with its generated code in the details of its figures."""
    code = generated_code(graph, plan.with_(search=None))
    details = replace(plan.figures.details, code=code, code_missing="")
    return plan.with_(search=replace(plan.figures, details=details))


def with_code_if_quick(plan: Plan, graph: Graph, target: str) -> Plan:
    """Add the code to a plan if that is fast and small, or else the command that adds it."""
    if plan.search is None:
        return plan
    why = f"Compiling {len(graph.nodes):,} nodes takes a while"
    if len(graph.nodes) <= MAX_NODES:
        try:
            result = with_code(plan, graph)
        except ShardwiseError as error:  # the plan itself is fine
            why = f"The code could not be generated ({error.message})"
        else:
            code = result.figures.details.code
            files = code.files if code else ()
            length = sum(len(file.text) for file in files)
            if length <= MAX_CHARACTERS:
                return result
            why = f"The {len(files)} generated files of {length:,} characters are too large"
    reason = f"{why}. To add the code: shardwise report plan.json {target}"
    details = replace(plan.search.details, code_missing=reason)
    return plan.with_(search=replace(plan.search, details=details))


def generated_code(graph: Graph, plan: Plan) -> GeneratedCode:
    """Return the generated files, and the text of every source line that they mention.

    Files with equal text, such as those of equal stages, are merged.
    """
    from shardwise.api.compile import compile

    merged: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (ranks, text) in compile(graph, plan).files().items():
        first, before = merged.get(text, (name, ()))
        merged[text] = (first, tuple(sorted({*before, *ranks})))
    files = tuple(
        GeneratedFile(name=name, ranks=format_ranks(ranks), text=text)
        for text, (name, ranks) in merged.items()
    )
    used = {source for file in files for source in _sources(file.text.splitlines()) if source}
    texts = {node.source: node.source_text for node in graph.nodes if node.source in used}
    return GeneratedCode(files=files, texts=texts)


def read_code(details: PlanDetails) -> Code | None:
    """Return the code in the details of a plan, if any."""
    code = details.code
    if code is None:
        return None
    numbers: dict[str, int] = {}
    files = []
    for file in code.files:
        parse_ranks(file.ranks, "search.details.code")
        lines = file.text.splitlines()
        sources = [
            numbers.setdefault(source, len(numbers)) if source else -1 for source in _sources(lines)
        ]
        files.append(
            CodeFile(name=file.name, ranks=file.ranks, lines=tuple(lines), sources=tuple(sources))
        )
    return Code(
        files=tuple(files),
        sources=tuple(source_row(source, code.texts.get(source, "")) for source in numbers),
    )


def _sources(lines: Iterable[str]) -> list[str]:
    """Return the user's line behind every generated line, or ""."""
    sources, current, depth = [], "", 0
    for line in lines:
        match = COMMENT.match(line) or DOCSTRING.match(line)
        indent = len(line) - len(line.lstrip())
        if match is not None:
            current, depth = match["source"], indent
        elif line.strip() and (indent < depth or line.lstrip().startswith(("def ", "class ", "#"))):
            current = ""
        sources.append(current)
    return sources
