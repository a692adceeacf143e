"""The page of a report is self-contained, and data never becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.reports.render import embedded, frame, render

PAGE = Path(str(files("shardwise.reports") / "page"))
SCRIPTS = sorted(PAGE.glob("*.js"))
NAMES = st.text(st.characters(exclude_categories=()), max_size=40)


def _between(page: str, start: str, end: str) -> str:
    return page.split(start, 1)[1].split(end, 1)[0]


@given(NAMES)
def test_any_text_is_embedded_safely(text: str) -> None:
    page = render({"title": text, "name": text})
    data = _between(page, 'id="report-data">', "</script>")
    assert not set("<>&\u2028\u2029") & set(data)
    assert json.loads(data) == {"title": text, "name": text}
    assert page.encode()  # it can be written to a file
    assert page.count("<title>") == page.count("</title>") == 1


def test_the_policy_allows_only_the_script_and_style() -> None:
    page = render({"title": "x"})
    policy = _between(page, 'Content-Security-Policy" content="', '"')
    for tag in ("script", "style"):
        text = _between(page, f"<{tag}>", f"</{tag}>")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_does_not_use_the_network() -> None:
    page = render({"title": "x"}).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|\.innerHTML|eval\(", page)


def test_infinite_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embedded({"step_time_s": float("nan")})


def test_a_notebook_shows_the_page_in_a_sandboxed_frame() -> None:
    page = render({"title": 'a "quoted" title'})
    framed = frame(page)
    assert html.unescape(_between(framed, 'srcdoc="', '"')) == page
    assert 'sandbox="allow-scripts allow-modals"' in framed


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_small_modules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    assert text.startswith("// ")
    if path.name != "main.js":
        assert "window.shardwise" not in text


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_scripts_are_valid() -> None:
    script = _between(render({"title": "x"}), "<script>", "</script>")
    node = ["node", "--check", "-"]
    done = subprocess.run(node, input=script, text=True, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
