"""Reports in chromium: all sections are complete and interactive, and names are plain text."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import expect

from shardwise import formatting
from shardwise.reports.render import frame, render
from tests.browser.documents import HOSTILE, hostile, report, sparse

pytestmark = pytest.mark.browser

SECTIONS = (
    "verdict", "model", "cluster", "memory", "timeline", "schedule", "plans", "what-if", "code",
    "measured",
)  # fmt: skip
Show = Callable[..., Any]


def point(target: Any, text: str, **place: float) -> None:
    """Point at an element after the page has settled, as scrolling hides hints."""
    target.scroll_into_view_if_needed()
    target.page.wait_for_timeout(100)
    target.hover(position=place or None)
    expect(target.page.locator("#hint")).to_contain_text(text)


def test_sections_are_complete_and_in_order(show: Show) -> None:
    page = show(report(measured=True))
    assert page.locator("main > section").evaluate_all("all => all.map(s => s.id)") == [*SECTIONS]
    assert page.locator("section.empty").count() == 0
    assert "28.62 ms" in page.locator("#verdict .large").first.inner_text()
    assert page.locator("#verdict").get_by_text("waiting for other stages: 31%").is_visible()


def test_a_missing_section_shows_the_reason_and_a_command(show: Show) -> None:
    document = report()
    for key in ("modules", "cluster", "schedule", "plans", "what_if", "code"):
        document[key] = None
        document["missing"][key] = f"No {key}. shardwise report plan.json model.py:build"
    page = show(document)
    assert page.locator("section.empty .command").count() == 7
    command = page.locator("#code .command").inner_text()
    assert command == "shardwise report plan.json model.py:build"


def test_a_sparse_report_is_drawn_without_invalid_figures(show: Show) -> None:
    page = show(sparse())
    assert page.locator("#verdict").get_by_text("does not fit in memory").is_visible()
    assert "16.0 GiB" in page.locator("#verdict .big.bad").inner_text()
    page.locator("#timeline canvas").last.press("ArrowRight")
    page.get_by_text("Memory as a table").click()
    text = page.locator("main").inner_text()
    assert "could not be drawn" not in text
    for word in ("NaN", "undefined", "null", "Infinity"):
        assert word not in text


def test_figures_have_the_format_of_the_command_line(show: Show) -> None:
    page = show(report())
    values = [0, 1.23456, 0.0123, 4.2e-5, 80 * 2**30, 3 * 2**20, 100, 1234.5, 4.2e7, 0.1234, 12.0]
    values += [3.1e9, 99.96, 123456.7, 1e-9, 2**31 * 1.37, 999.9, 1023.9, 235.5, 0.125, 4.35, 128]
    values += [math.exp(k / 7) for k in range(-60, 180)]
    for name in ("seconds", "size", "amount"):
        values = [v for v in values if name != "amount" or v == 0 or v > 1e-4]
        written = page.evaluate(f"all => all.map(window.shardwise.format.{name})", values)
        assert written == [getattr(formatting, name)(value) for value in values]


def test_the_tree_opens_closes_and_searches(show: Show) -> None:
    page = show(report())
    tree = page.get_by_role("treegrid")
    first = tree.locator("tbody tr").first
    shown = tree.locator("tbody tr").count()
    first.focus()
    page.keyboard.press("ArrowLeft")
    assert first.get_attribute("aria-expanded") == "false"
    assert tree.locator("tbody tr").count() == 1
    page.keyboard.press("ArrowRight")
    assert tree.locator("tbody tr").count() == shown
    page.keyboard.press("ArrowRight")
    assert "embedding" in page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    assert tree.locator("tr.parameter").count() == 1
    assert tree.locator("tr.operation").count() == 6
    page.keyboard.press("ArrowLeft")
    assert tree.locator("tr.operation").count() == 0
    page.get_by_role("searchbox").fill("linear_7")
    expect(page.locator("#model output")).to_have_text("1 found")
    assert tree.locator("tr.operation").count() == 1
    page.get_by_role("button", name="Collapse all").click()
    assert tree.locator("tbody tr").count() == 1


def test_the_timeline_reacts_to_pointer_wheel_and_keys(show: Show) -> None:
    page = show(report())
    canvas = page.locator("#timeline .chart-place canvas")
    window = page.locator("#timeline .chart-window")
    point(canvas, "0F0", x=12, y=14)
    box = canvas.bounding_box()
    full = window.inner_text()
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 14, steps=4)
    page.mouse.up()
    expect(window).not_to_have_text(full)
    zoomed = window.inner_text()
    canvas.click(position={"x": 200, "y": 15})
    page.mouse.wheel(0, -240)
    expect(window).not_to_have_text(zoomed)
    page.keyboard.press("Escape")
    expect(window).to_have_text(full)
    canvas.press("ArrowRight")
    canvas.press("ArrowDown")
    canvas.press("ArrowRight")
    assert "communication" in page.locator("#spoken").inner_text()
    canvas.press("Enter")
    expect(window).not_to_have_text(full)
    page.get_by_role("button", name="Only critical path").click()
    page.get_by_text("Timeline as tables").click()
    expect(page.locator("#timeline details table")).to_have_count(2)


def test_other_sections_are_interactive(show: Show) -> None:
    page = show(report(measured=True))
    point(page.locator("#cluster .device").nth(3), "rank 3")
    widths = "all => all.map(e => e.style.width)"
    before = page.locator("#memory .stacked span").evaluate_all(widths)
    page.get_by_role("button", name="Relative to the largest peak").click()
    assert page.locator("#memory .stacked span").evaluate_all(widths) != before
    point(page.locator("#schedule .chart-place canvas"), "micro-batch 0", x=8, y=12)
    page.get_by_role("button", name="Differences").click()
    assert page.locator("#plans .diverging-row").count() > 3
    page.locator("#plans .twist").nth(1).click()
    assert page.locator("#plans tr.detail").nth(1).is_visible()
    page.locator("#what-if").get_by_role("button", name="Bandwidth").click()
    assert page.locator("#what-if tbody tr").count() == 2
    assert page.locator("#measured .disagreements li").count() == 2
    assert page.locator("#measured .chart-label.measured").count() == 4


def test_a_legend_has_each_colour_once(show: Show) -> None:
    document = report(measured=True)
    kinds = document["measured"]["timeline"]["kinds"]
    document["measured"]["timeline"]["kinds"] = ["receive" if k == "send" else k for k in kinds]
    page = show(document)
    legend = page.locator("#measured .legend li")
    assert "send, receive" in legend.all_inner_texts()
    colours = legend.locator("i").evaluate_all("all => all.map(i => i.style.cssText)")
    assert len(set(colours)) == len(colours)


def test_implementations_of_collectives_are_part_of_the_cluster(show: Show) -> None:
    rows = show(report()).locator("#cluster .implementations tbody tr")
    cells = rows.evaluate_all("all => all.map(r => [...r.cells].map(c => c.innerText))")
    assert cells[0][:3] == ["all_reduce", "0-7\n8 ranks", "solved from 64 KiB on"]
    assert cells[0][3:] == ["16.0 MiB", "3.00 ms", "4.00 ms", "25%"]
    assert cells[1][1] == "0-1 | 2-3 | 4-5 | 6-7 | … 60 more\n64 groups of 2 ranks"
    assert cells[2][4:6] == ["unknown", "unknown"]  # of an edited plan
    cluster = show(report() | {"collectives": None}).locator("#cluster")
    assert cluster.get_by_text("All collectives use the library").is_visible()


def test_a_line_of_code_marks_its_source_and_back(show: Show) -> None:
    page = show(report())
    left, right = page.locator("#code .lines").first, page.locator("#code .lines").last
    left.locator(".line").nth(7).click()
    assert "part_2(x)" in right.locator("[aria-selected=true]").inner_text()
    right.focus()
    right.press("End")
    right.press("Enter")
    chosen = left.locator("[aria-selected=true]")
    assert chosen.count() == 3
    assert "part_39" in chosen.first.inner_text()
    page.get_by_label("Generated file").select_option("1")
    assert left.locator(".line").count() == 20
    assert left.locator(".linked").first.is_visible()


def test_hostile_names_are_text(show: Show) -> None:
    page = show(hostile())
    page.get_by_role("button", name="Expand all").click()
    for summary in page.locator("summary").all():
        summary.click()
    for section in SECTIONS:
        canvas = page.locator(f"#{section} canvas").last
        if canvas.count():
            canvas.hover(position={"x": 20, "y": 15})
    text = page.locator("body").inner_text()
    assert HOSTILE["tag"] in text
    assert HOSTILE["close"] in text
    assert HOSTILE["quotes"] in text
    assert "safe\u27e8U+202E\u27e9gnp.exe" in text
    assert "(10,240 characters)" in text
    assert page.locator("main img, main script, main iframe").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_the_page_never_scrolls_horizontally(show: Show, width: int) -> None:
    page = show(report(measured=True), viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_themes_and_print(show: Show) -> None:
    page = show(report(), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    button = page.locator("#theme")
    assert button.inner_text() == "Theme: system"
    button.click()
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    button.click()
    assert page.evaluate(background) == dark
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgba(0, 0, 0, 0)"
    assert not page.locator("#contents").is_visible()


def test_everything_is_reachable_by_keyboard(show: Show) -> None:
    page = show(report(measured=True))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    reached = set()
    for _ in range(140):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('section')?.id ?? ''"))
    assert set(SECTIONS) - {"verdict"} <= reached
    unnamed = """() => [...document.querySelectorAll(
        'button, select, input, canvas[tabindex], [role=img]')].filter(
            e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.title)).length"""
    assert page.evaluate(unnamed) == 0
    levels = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(h => +h.tagName[1])")
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_links_stay_within_the_frame_of_a_notebook(browser: Any) -> None:
    page = browser.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_content(f"<h1>notebook</h1>{frame(render(report()), height=500)}")
    inside = page.frame_locator("iframe")
    inside.locator("html[data-ready]").wait_for(state="attached")
    inside.get_by_role("link", name="Timeline").click()
    assert "Timeline" in inside.locator("section#timeline h2:focus").inner_text()
    inside.locator("#theme").click()
    assert page.locator("h1").inner_text() == "notebook"
    assert errors == []
    page.close()
