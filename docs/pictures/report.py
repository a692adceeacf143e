"""Takes the pictures of reports: `python docs/pictures/report.py gpt.html 3d.html 1024.html`.

Enters: reports, as `shardwise report` writes them; a fourth is one of a recorded run. Leaves:
`report_*.png` beside this file, with 256 colours. Needs chromium, Pillow and `shardwise[browser]`.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
WIDTH = 1280
# Name, which file, what is at the top, its theme, its height.
PICTURES = (
    ("report_gpt", 0, "verdict", "light", 1000),
    ("report_gpt_code", 0, "code", "light", 620),
    ("report_3d", 1, "timeline", "light", 1020),
    ("report_3d_dark", 1, "verdict", "dark", 1000),
    ("report_1024", 2, "timeline", "light", 900),
    ("report_measured", 3, "measured", "light", 1370),
)


def main(files: list[str]) -> None:
    """Open each report and take its pictures."""
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium")
        for name, index, section, theme, height in PICTURES:
            if index >= len(files):
                continue
            page = browser.new_page(viewport={"width": WIDTH, "height": height}, color_scheme=theme)
            page.goto(Path(files[index]).resolve().as_uri())
            page.wait_for_selector("html[data-ready]")
            show(page, section)
            save(page.screenshot(), HERE / f"{name}.png")
            page.close()
        browser.close()


def show(page: Any, section: str) -> None:
    """Bring a section to the top, and do in it what a reader would."""
    if section == "code":
        page.locator("#code .lines").last.locator(".line:not(.dimmed, .file)").nth(3).click()
    page.evaluate(f"document.getElementById({section!r}).scrollIntoView()")
    page.wait_for_timeout(300)
    if section == "timeline":
        canvas = page.locator("#timeline .chart-place canvas")
        canvas.hover(position={"x": 300, "y": 16})
    page.wait_for_timeout(200)


def save(png: bytes, path: Path) -> None:
    """Write a screenshot with its 256 most frequent colours: areas keep theirs exactly."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(np.int32)
    found, places, many = np.unique(
        pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    weights = many * (1 + np.ptp(found, axis=1) / 8)  # greys of letters would take all places
    palette = found[np.argsort(-weights)[:256]]
    nearest = ((found[:, None] - palette[None]) ** 2).sum(2).argmin(1).astype(np.uint8)
    picture = Image.fromarray(nearest[places].reshape(pixels.shape[:2]), "P")
    picture.putpalette(palette.astype(np.uint8).tobytes())
    picture.save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
