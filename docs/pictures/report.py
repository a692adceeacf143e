"""Take screenshots of reports: `python docs/pictures/report.py gpt.html 3d.html 1024.html`.

The arguments are files of `shardwise report`; an optional fourth one includes a recorded run. The
script writes `report_*.png` next to itself, with 256 colors. It needs chromium, Pillow and
`shardwise[browser]`.
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
# Name, index of the file, section at the top, theme, height.
PICTURES = (
    ("report_gpt", 0, "verdict", "light", 1000),
    ("report_gpt_code", 0, "code", "light", 620),
    ("report_3d", 1, "timeline", "light", 1020),
    ("report_3d_dark", 1, "verdict", "dark", 1000),
    ("report_1024", 2, "timeline", "light", 900),
    ("report_measured", 3, "measured", "light", 1370),
)


def main(files: list[str]) -> None:
    """Open each report and take its screenshots."""
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
    """Scroll a section to the top and open its details."""
    if section == "code":
        page.locator("#code .lines").last.locator(".line:not(.dimmed, .file)").nth(3).click()
    page.evaluate(f"document.getElementById({section!r}).scrollIntoView()")
    page.wait_for_timeout(300)
    if section == "timeline":
        canvas = page.locator("#timeline .chart-place canvas")
        canvas.hover(position={"x": 300, "y": 16})
    page.wait_for_timeout(200)


def save(png: bytes, path: Path) -> None:
    """Write a screenshot with its 256 most frequent colors, so that areas stay exact."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(np.int32)
    colors, indices, counts = np.unique(
        pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    # Greys of antialiased letters would fill the palette: prefer saturated colors.
    weights = counts * (1 + np.ptp(colors, axis=1) / 8)
    palette = colors[np.argsort(-weights)[:256]]
    nearest = ((colors[:, None] - palette[None]) ** 2).sum(2).argmin(1).astype(np.uint8)
    picture = Image.fromarray(nearest[indices].reshape(pixels.shape[:2]), "P")
    picture.putpalette(palette.astype(np.uint8).tobytes())
    picture.save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
