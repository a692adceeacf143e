"""A chromium for all tests of pages, and pages that record their requests and errors."""

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
    """A page with its errors and requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open reports as files, and check at the end that they had no errors."""
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
    for page in opened:
        assert page.errors == []
        assert [u for u in page.requests if not u.startswith(("file:", "data:"))] == []
        assert len([u for u in page.requests if u.startswith("file:")]) == 1
        assert page.page.evaluate("window.hacked") is None
        page.page.close()
