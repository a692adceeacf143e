"""One chromium for all tests of pages; a page notes what it asks for and what it complains of."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from shardwise.reports.render import render

if importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test-browser` installs it

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
READY = "html[data-ready]"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.fail("chromium is not installed: make test-browser installs it")
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM)
        yield opened
        opened.close()


class Opened:
    """A page, with what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda said: self.errors.append(said.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a report as a file; at the end, nothing may have gone wrong in it."""
    opened: list[Opened] = []

    def open_(document: Mapping[str, Any], **options: Any) -> Any:
        path = tmp_path / f"report_{len(opened)}.html"
        path.write_text(render(document), encoding="utf-8")
        options = {"viewport": {"width": 1360, "height": 900}} | options
        opened.append(Opened(browser.new_page(**options)))
        page = opened[-1].page
        page.goto(path.as_uri())
        page.wait_for_selector(READY, timeout=30_000)
        return page

    yield open_
    for each in opened:
        assert each.errors == []
        assert [u for u in each.requests if not u.startswith(("file:", "data:"))] == []
        assert len([u for u in each.requests if u.startswith("file:")]) == 1
        assert each.page.evaluate("window.hacked") is None
        each.page.close()
