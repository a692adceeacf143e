// The recorded run over the prediction: both timelines on one scale, and where they disagree.

import { legend } from "./bars.js";
import { Chart } from "./chart.js";
import { variable } from "./colours.js";
import { el, figure, name, table, unfold } from "./dom.js";
import { change, percent, plural, seconds, signed } from "./format.js";
import { kindsOf, keys, rowsOf } from "./timeline.js";

const FIRST = 4; // disagreements that are seen at once

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
      el("h3", { text: "Predicted, and measured below it, on one scale" }),
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

/** The largest disagreements; those that are left stand behind a line. */
function disagreements(m) {
  const found = m.disagreements ?? [];
  if (!found.length) return el("p", { class: "soft", text: "No disagreement is worth a line." });
  const most = Math.max(...found.map((d) => Math.abs(d.difference_s)), Number.MIN_VALUE);
  const words = new Map((m.causes ?? []).map((c) => [c.name, c.text]));
  const list = (some, start) =>
    el(
      "ol",
      { class: "disagreements", style: { "counter-reset": `place ${start}` } },
      ...some.map((d) => disagreement(d, most, words)),
    );
  const rest = found.slice(FIRST);
  return el(
    "div",
    {},
    list(found.slice(0, FIRST), 0),
    rest.length
      ? unfold(plural(rest.length, "smaller one"), () => list(rest, FIRST), {
          "data-print": "open",
        })
      : null,
  );
}

/** What disagrees, where, by how much, and what to do about it. */
function disagreement(d, most, words) {
  const share = (Math.abs(d.difference_s) / most) * 100;
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
    el("p", {}, name(d.text ?? "")), // both figures are in it; of a slow rank, that of its like
    d.advice ? el("p", { class: "advice" }, name(d.advice)) : null,
  );
}

function causes(m) {
  const most = Math.max(
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
          width: `${(c.predicted_s / most) * 100}%`,
          "--colour": `var(${variable(c.name)})`,
        },
      }),
      el("i", {
        style: { width: `${(c.measured_s / most) * 100}%`, "--colour": `var(${variable(c.name)})` },
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
  const left = new Set(measuredRows);
  for (const row of predictedRows) {
    rows.push(row);
    for (const other of measuredRows) {
      if (other.data.class === row.data.class && left.delete(other)) rows.push(other);
    }
  }
  rows.push(...left);
  const extent = Math.max(timeline.step_time_s, measured.timeline.step_time_s);
  const chart = new Chart({ label: "Predicted and measured timelines", rows, extent });
  const seen = new Map(
    [...kindsOf(timeline), ...kindsOf(measured.timeline)].map((k) => [k.label, k]),
  );
  return [chart.node, el("div", { class: "under" }, legend([...seen.values()]), keys())];
}
