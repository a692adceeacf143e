"""Spans are located and drawn a few per pixel for any number, order and overlap."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

pytestmark = pytest.mark.browser

CHECK = """
  let seed = 7;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const wrong = [];
  for (let round = 0; round < 60; round++) {
    const count = 1 + Math.floor(random() * 400);
    const overlap = round % 3 === 0;
    const start = [], end = [], kind = [], critical = [];
    let now = 0;
    for (let i = 0; i < count; i++) {
      now += random() < 0.3 ? random() * 20 : 0;
      const long = random() < 0.1 ? 200 * random() : random();
      start.push(now); end.push(now + long); kind.push(0); critical.push(i % 2);
      now += overlap ? long * random() : long;
    }
    const spans = new Spans({ start, end, kind, critical });
    for (let i = 0; i < 50; i++) {
      const time = random() * now;
      const index = spans.at(time);
      const exists = start.some((s, j) => s <= time && time < end[j]);
      if (exists !== index >= 0) wrong.push(["at", round, time, index]);
      const inside = index >= 0 && spans.start[index] <= time && time < spans.end[index];
      if (index >= 0 && !inside) wrong.push(["not in", round]);
    }
    const [width, from, to] = [300, now * 0.1, now * 0.9];
    const view = { from, to, scale: width / (to - from) };
    const drawn = new Set();
    let calls = 0;
    spans.visit(view, (x, w, i) => { calls += 1; if (w >= 1) drawn.add(i); });
    const wide = [...spans.start.keys()].filter(
      (i) => (spans.end[i] - spans.start[i]) * view.scale >= 1
      && spans.end[i] > from && spans.start[i] < to);
    if (!overlap && wide.some((i) => !drawn.has(i))) wrong.push(["wide", round]);
    if (calls > 2 * width + wide.length + 2) wrong.push(["calls", round, calls]);
  }
  return wrong;
"""


def test_spans_are_located_and_drawn(browser: Any) -> None:
    module = (files("shardwise.reports") / "page" / "spans.js").read_text(encoding="utf-8")
    page = browser.new_page()
    script = module.replace("export class", "class")
    assert page.evaluate(f"() => {{ {script} {CHECK} }}") == []
    page.close()
