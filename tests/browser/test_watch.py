"""The live page in chromium: updates arrive, names are plain text, keys read values."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from shardwise.watch.run import Run
from shardwise.watch.server import WatchServer
from tests.browser.conftest import Opened
from tests.support.runs import add_rows, make_run, ranks_line

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u202e\"' " + "n" * 9999
)


@pytest.fixture
def watch(browser: Any) -> Iterator[Callable[..., Any]]:
    """Serve runs and open their pages, and check at the end that they had no errors."""
    opened: list[tuple[Opened, WatchServer]] = []

    def open_(folder: Path, **options: Any) -> Any:
        server = WatchServer(Run(folder))
        threading.Thread(target=server.serve, daemon=True).start()
        options = {"viewport": {"width": 1200, "height": 900}} | options
        opened.append((Opened(browser.new_page(**options)), server))
        page = opened[-1][0].page
        page.goto(server.url)
        expect(page.locator("#status")).not_to_have_text("connecting …", timeout=20_000)
        return page

    yield open_
    for page, server in opened:
        assert page.errors == []
        assert [u for u in page.requests if not u.startswith((server.url, "data:"))] == []
        assert page.page.evaluate("window.hacked") is None
        page.page.close()
        server.close()


def test_updates_arrive_and_a_truncated_run_starts_over(watch: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, 20)
    page = watch(run)
    expect(page.locator("#progress-text")).to_contain_text("step 20 of 1,000")
    assert page.locator("#charts figure").count() == 6
    add_rows(run, range(21, 31))
    (run / "ranks.jsonl").write_text(json.dumps(ranks_line(30, [0.05] * 7 + [0.09])) + "\n")
    expect(page.locator("#progress-text")).to_contain_text("step 30", timeout=10_000)
    expect(page.locator("#ranks-text")).to_contain_text("slow: rank 7 (1.80x)")
    assert page.locator("#ranks-rows tr").count() == 8
    assert page.locator("#ranks-bars rect.slow").count() == 1
    (run / "metrics.jsonl").write_text("")
    add_rows(run, range(1, 6), loss=None)
    expect(page.locator("#progress-text")).to_contain_text("step 5", timeout=10_000)
    expect(page.locator("#cards")).to_contain_text("not a number")
    make_run(run, 0, state="failed", error="TrainingError: loss is nan")
    expect(page.locator("#status")).to_have_text(
        "failed: TrainingError: loss is nan", timeout=10_000
    )


def test_hostile_names_are_plain_text(watch: Any, tmp_path: Path) -> None:
    page = watch(make_run(tmp_path, 3, model=HOSTILE, plan=HOSTILE))
    assert "<script>window.hacked=1</script>" in page.locator("#title").inner_text()
    assert page.locator("main script, main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_charts_show_values_by_keyboard_and_pointer(watch: Any, tmp_path: Path) -> None:
    page = watch(make_run(tmp_path, 20))
    chart = page.locator("figure[data-name=loss] svg")
    assert "now" in chart.get_attribute("aria-label")
    chart.focus()
    page.keyboard.press("Home")
    output = page.locator("figure[data-name=loss] output")
    expect(output).to_contain_text("step 1:")
    page.keyboard.press("ArrowRight")
    expect(output).to_contain_text("step 2:")
    page.locator("figure[data-name=step_s] svg").hover()
    expect(page.locator("figure[data-name=step_s] output")).to_contain_text("ms")


def test_updates_of_long_runs_are_small(watch: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, 0)
    add_rows(run, range(1, 20_001))
    page = watch(run)
    expect(page.locator("#progress-text")).to_contain_text("step 20,000", timeout=20_000)
    size = page.evaluate(
        "fetch('/data?generation=0&width=128&from=150').then(a => a.text()).then(t => t.length)"
    )
    assert size < 8_000


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_narrow_screens_in_both_themes(watch: Any, tmp_path: Path, theme: str) -> None:
    run = make_run(tmp_path, 200)
    (run / "ranks.jsonl").write_text(json.dumps(ranks_line(200, [0.05] * 63 + [0.07])) + "\n")
    page = watch(run, viewport={"width": 360, "height": 740}, color_scheme=theme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="Theme").click()
    assert page.locator("html").get_attribute("data-theme") == "light"
