// Bars of parts, their legends, and small bars in cells.

import { el, name } from "./dom.js";
import { explain } from "./hint.js";

/**
 * @typedef {Object} Part
 * @property {string} label
 * @property {number} value
 * @property {string} variable of its colour
 * @property {string} figure
 * @property {string} [pattern] "hatched"
 */

/**
 * A bar of parts; what is below a thousandth of the whole is not drawn.
 * @param {Part[]} parts @param {number} whole what the full width stands for @param {string} label
 */
export function stacked(parts, whole, label) {
  const text = `${label}: ${parts.map((p) => `${p.label} ${p.figure}`).join(", ")}`;
  const bar = el("div", { class: "stacked", role: "img", "aria-label": text });
  for (const part of parts) {
    const share = whole > 0 ? part.value / whole : 0;
    if (share <= 0.001) continue;
    const piece = el("span", {
      class: part.pattern ?? null,
      style: { width: `${Math.min(100, share * 100)}%`, "--colour": `var(${part.variable})` },
    });
    explain(piece, () => ({ title: part.label, lines: [["", part.figure]] }));
    bar.append(piece);
  }
  return bar;
}

/** Parts without figures that look alike, as one: sends and receives have a colour. */
function joined(parts) {
  const found = new Map();
  for (const part of parts) {
    const key = part.figure ? part : `${part.variable} ${part.pattern ?? ""}`;
    const known = found.get(key);
    found.set(key, known ? { ...known, label: `${known.label}, ${part.label}` } : part);
  }
  return [...found.values()];
}

/** What the colours mean, with figures where they are given. @param {Part[]} parts */
export function legend(parts) {
  return el(
    "ul",
    { class: "legend" },
    ...joined(parts).map((p) =>
      el(
        "li",
        {},
        el("i", { class: p.pattern ?? null, style: { "--colour": `var(${p.variable})` } }),
        name(p.label),
        p.figure ? el("b", { text: p.figure }) : null,
      ),
    ),
  );
}

/**
 * A cell with a figure and a small bar below it.
 * @param {string} text @param {[number, string][]} parts shares of the column's largest, with colours
 */
export function barCell(text, parts) {
  return el(
    "td",
    { class: "figure barred" },
    el("span", { text }),
    el(
      "span",
      { class: "small-bar", "aria-hidden": "true" },
      ...parts.map(([share, variable]) =>
        el("i", {
          style: {
            width: `${Math.min(100, Math.max(0, share * 100))}%`,
            "min-width": share > 0 ? "1px" : "0",
            "--colour": `var(${variable})`,
          },
        }),
      ),
    ),
  );
}
