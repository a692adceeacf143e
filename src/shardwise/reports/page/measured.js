// A recorded run compared with the prediction: disagreements, and both timelines on one scale.

import { legend } from "./bars.js";
import { Chart } from "./chart.js";
import { variable } from "./colours.js";
import { el, figure, name, table, unfold } from "./dom.js";
import { change, percent, plural, seconds, signed } from "./format.js";
import { kindsOf, keys, rowsOf } from "./timeline.js";

const FIRST = 4; // disagreements that are shown at first

/** @param {HTMLElement} body @param {any} report */
export function drawMeasured(body, report) {
  const m = report.measured;
  body.append(summary(m), disagreements(m));
  if (m.causes?.length)
    body.append(
      el(
        "h3",
        {},
        "By cause",
        m.where ? el("span", { class: "soft" }, ", on ", name(m.where)) : null,
      ),
      causes(m),
    );
  if (m.timeline?.rows?.length)
    body.append(
      el("h3", { text: "Predicted and measured timelines on one scale" }),
      ...both(report),
    );
  if (m.notes?.length)
    body.append(el("ul", { class: "notes" }, ...m.notes.map((n) => el("li", {}, name(n)))));
}

function summary(m) {
  return el(
    "p",
    { class: "facts" },
    "Measured ",
    el("b", { text: seconds(m.step_time_s) }),
    ", predicted ",
    el("b", { text: seconds(m.predicted_step_time_s) }),
    `: ${change(m.ratio)} over ${plural(m.steps, "step")} of ${plural(m.ranks, "rank")} in `,
    name(m.file, "strong"),
    ".",
    m.chosen ? el("span", { class: "soft" }, " ", name(capital(m.chosen)), ".") : null,
    m.slowest === null || m.slowest === undefined ? null : ` Slowest: rank ${m.slowest}.`,
    m.aggregated ? el("span", { class: "soft" }, " ", name(m.aggregated)) : null,
  );
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The largest disagreements, with the others behind a summary. */
function disagreements(m) {
  const all = m.disagreements ?? [];
  if (!all.length) return el("p", { class: "soft", text: "No large disagreements." });
  const largest = Math.max(...all.map((d) => Math.abs(d.difference_s)), Number.MIN_VALUE);
  const words = new Map((m.causes ?? []).map((c) => [c.name, c.text]));
  const list = (some, start) =>
    el(
      "ol",
      { class: "disagreements", style: { "counter-reset": `place ${start}` } },
      ...some.map((d) => disagreement(d, largest, words)),
    );
  const smaller = all.slice(FIRST);
  return el(
    "div",
    {},
    list(all.slice(0, FIRST), 0),
    smaller.length
      ? unfold(plural(smaller.length, "smaller disagreement"), () => list(smaller, FIRST), {
          "data-print": "open",
        })
      : null,
  );
}

/** A disagreement: its cause, place and size, and what to do about it. */
function disagreement(d, largest, words) {
  const share = (Math.abs(d.difference_s) / largest) * 100;
  const colour = d.difference_s > 0 ? "--c-slower" : "--c-faster";
  return el(
    "li",
    {},
    el(
      "div",
      { class: "disagreement-head" },
      name(words.get(d.cause) ?? d.cause, "strong"),
      name(d.where ?? "", "soft"),
      el("b", { text: signed(d.difference_s, seconds) }),
      el("span", { class: "soft", text: `${percent(Math.abs(d.share))} of the step` }),
    ),
    el(
      "span",
      { class: "small-bar", "aria-hidden": "true" },
      el("i", { style: { width: `${share}%`, "--colour": `var(${colour})` } }),
    ),
    el("p", {}, name(d.text ?? "")), // it has both figures
    d.advice ? el("p", { class: "advice" }, name(d.advice)) : null,
  );
}

function causes(m) {
  const longest = Math.max(
    ...m.causes.flatMap((c) => [c.predicted_s, c.measured_s]),
    Number.MIN_VALUE,
  );
  const pair = (c) =>
    el(
      "td",
      { class: "pair", "aria-hidden": "true" },
      el("i", {
        class: "predicted",
        style: {
          width: `${(c.predicted_s / longest) * 100}%`,
          "--colour": `var(${variable(c.name)})`,
        },
      }),
      el("i", {
        style: { width: `${(c.measured_s / longest) * 100}%`, "--colour": `var(${variable(c.name)})` },
      }),
    );
  const rows = m.causes.map((c) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name(c.text)),
      pair(c),
      figure(seconds(c.predicted_s)),
      figure(seconds(c.measured_s)),
      figure(signed(c.difference_s, seconds)),
    ),
  );
  return table(
    "Predicted and measured times by cause",
    [
      "Cause",
      "Predicted above, measured below",
      ["Predicted", "figure"],
      ["Measured", "figure"],
      ["Difference", "figure"],
    ],
    rows,
    "pairs",
  );
}

function both(report) {
  const { timeline, measured } = report;
  const predictedRows = rowsOf(timeline, { word: "predicted, " });
  const measuredRows = rowsOf(measured.timeline, { word: "measured, ", tone: "measured" });
  const rows = [];
  const remaining = new Set(measuredRows);
  for (const row of predictedRows) {
    rows.push(row);
    for (const other of measuredRows) {
      if (other.data.class === row.data.class && remaining.delete(other)) rows.push(other);
    }
  }
  rows.push(...remaining);
  const extent = Math.max(timeline.step_time_s, measured.timeline.step_time_s);
  const chart = new Chart({ label: "Predicted and measured timelines", rows, extent });
  const kinds = new Map(
    [...kindsOf(timeline), ...kindsOf(measured.timeline)].map((k) => [k.label, k]),
  );
  return [chart.node, el("div", { class: "under" }, legend([...kinds.values()]), keys())];
}
