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
 * A bar of parts; parts below a thousandth of the total are not drawn.
 * @param {Part[]} parts @param {number} total value of the full width @param {string} label
 */
export function stacked(parts, total, label) {
  const text = `${label}: ${parts.map((p) => `${p.label} ${p.figure}`).join(", ")}`;
  const bar = el("div", { class: "stacked", role: "img", "aria-label": text });
  for (const part of parts) {
    const share = total > 0 ? part.value / total : 0;
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

/** Merge parts without figures that have the same colour, such as sends and receives. */
function joined(parts) {
  const byColour = new Map();
  for (const part of parts) {
    const key = part.figure ? part : `${part.variable} ${part.pattern ?? ""}`;
    const first = byColour.get(key);
    byColour.set(key, first ? { ...first, label: `${first.label}, ${part.label}` } : part);
  }
  return [...byColour.values()];
}

/** A legend of the colours, with figures if there are any. @param {Part[]} parts */
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
