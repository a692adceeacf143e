// Why this plan: its runners-up, with the causes of their step times as bars on one scale.

import { legend, stacked } from "./bars.js";
import { variable } from "./colours.js";
import { choice, el, figure, name, plain } from "./dom.js";
import { count, percent, seconds, signed, size } from "./format.js";

/** @param {HTMLElement} body @param {any} report */
export function drawPlans(body, report) {
  const { plans } = report;
  const texts = new Map((report.causes ?? []).map((c) => [c.name, c.text]));
  const names = [...new Set(plans.flatMap((p) => Object.keys(p.causes ?? {})))].filter((n) =>
    plans.some((p) => (p.causes?.[n] ?? 0) > 0),
  );
  const longest = Math.max(...plans.map((p) => p.step_time_s));
  const rows = el("tbody");
  const draw = (form) =>
    rows.replaceChildren(
      ...plans.flatMap((p, i) => plan(p, i, { names, texts, longest, form, plans })),
    );
  draw("whole");
  const heads = [
    ["Plan", ""],
    ["Step time", "figure"],
    ["Time by cause", "wide"],
    ["Memory", "figure"],
    ["Differences", ""],
  ];
  body.append(
    el(
      "div",
      { class: "toolbar" },
      legend(
        names.map((n) => ({
          label: texts.get(n) ?? n,
          value: 0,
          figure: "",
          variable: variable(n),
        })),
      ),
      el("span", { class: "space" }),
      choice(
        "Bars of plans",
        [
          { value: "whole", text: "Times" },
          { value: "difference", text: "Differences" },
        ],
        "whole",
        draw,
      ),
    ),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Comparison of plans" },
      el(
        "table",
        { class: "plans" },
        el("caption", { class: "unseen", text: "The plan and its runners-up" }),
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ...heads.map(([text, kind]) => el("th", { scope: "col", class: kind || null, text })),
          ),
        ),
        rows,
      ),
    ),
  );
  if (report.gap) body.append(gap(report.gap));
}

function plan(p, i, context) {
  const bars = context.form === "whole" ? times(p, context) : differences(p, context);
  const detail = el(
    "tr",
    { class: "detail", hidden: true, id: `plan-${i}` },
    el("td", { colspan: 5 }, details(p, context)),
  );
  const button = el(
    "button",
    {
      type: "button",
      class: "quiet twist",
      "aria-expanded": "false",
      "aria-controls": `plan-${i}`,
    },
    el("span", { class: "twisty", "aria-hidden": "true" }),
    name(p.what, "strong"),
    p.chosen ? el("span", { class: "badge good", text: "chosen" }) : null,
  );
  button.addEventListener("click", () => {
    detail.hidden = !detail.hidden;
    button.setAttribute("aria-expanded", String(!detail.hidden));
  });
  const row = el(
    "tr",
    { class: p.chosen ? "chosen" : null },
    el("th", { scope: "row" }, button),
    el(
      "td",
      { class: "figure" },
      el("b", { text: seconds(p.step_time_s) }),
      el("small", { class: "soft block", text: p.chosen ? "" : `×${p.ratio.toFixed(3)}` }),
    ),
    el("td", { class: "wide" }, bars),
    el(
      "td",
      { class: "figure" },
      el("span", { text: size(p.peak_bytes) }),
      el("small", {
        class: `block ${p.peak_bytes > p.limit_bytes ? "bad" : "soft"}`,
        text: `${percent(p.peak_bytes / p.limit_bytes)} of limit`,
      }),
    ),
    el("td", { class: "why" }, ...different(p)),
  );
  return [row, detail];
}

function times(p, { names, texts, longest }) {
  const parts = names.map((n) => ({
    label: texts.get(n) ?? n,
    value: p.causes?.[n] ?? 0,
    variable: variable(n),
    figure: seconds(p.causes?.[n] ?? 0),
  }));
  return stacked(parts, longest, `Time of ${plain(p.what, 80)}`);
}

/** The difference of each cause from the chosen plan; slower is to the right. */
function differences(p, { names, texts, plans }) {
  const largest = Math.max(
    ...plans.flatMap((q) => Object.values(q.differences_s ?? {}).map(Math.abs)),
    Number.MIN_VALUE,
  );
  const shown = names
    .map((n) => [n, p.differences_s?.[n] ?? 0])
    .filter(([, s]) => Math.abs(s) > largest / 500);
  if (!shown.length)
    return el("span", {
      class: "soft",
      text: p.chosen ? "the other plans are compared with this one" : "no difference in time",
    });
  return el(
    "div",
    { class: "diverging" },
    ...shown.map(([n, s]) =>
      el(
        "div",
        { class: "diverging-row" },
        el("span", { title: plain(texts.get(n) ?? n, 200) }, name(texts.get(n) ?? n)),
        el(
          "span",
          { class: "diverging-bar", "aria-hidden": "true" },
          el("i", { style: place(s / largest, variable(n)) }),
        ),
        el("b", { text: signed(s, seconds) }),
      ),
    ),
  );
}

/** A bar from the middle for a share between -1 and 1. */
function place(share, colour) {
  const width = Math.abs(share) * 50;
  return {
    left: `${share < 0 ? 50 - width : 50}%`,
    width: `${width}%`,
    "--colour": `var(${colour})`,
  };
}

/** The decisions that differ, in the chosen plan and in this one. */
function different(p) {
  if (p.chosen) return [];
  const changed = Object.values(p.words ?? {});
  if (!changed.length) return [el("span", { text: "layouts only" })];
  return changed.map(([before, after]) =>
    el("span", { class: "change" }, name(before), " → ", el("b", {}, name(after))),
  );
}

function details(p, { names, texts }) {
  const rows = names.map((n) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name(texts.get(n) ?? n)),
      figure(seconds(p.causes?.[n] ?? 0)),
      figure(p.chosen ? "" : signed(p.differences_s?.[n] ?? 0, seconds)),
    ),
  );
  return el(
    "div",
    { class: "plan-detail" },
    el(
      "div",
      {},
      el("h3", { text: p.chosen ? "The chosen plan" : "Why not this plan" }),
      el(
        "p",
        { class: "soft" },
        name(p.text || (p.chosen ? "the other plans are compared with it" : "")),
      ),
      p.chosen
        ? null
        : el("p", { text: `peak memory ${signed(p.memory_difference_bytes ?? 0, size)}` }),
    ),
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col", text: "Cause" }),
          el("th", { scope: "col", class: "figure", text: "Time" }),
          el("th", { scope: "col", class: "figure", text: p.chosen ? "" : "Difference" }),
        ),
      ),
      el("tbody", {}, ...rows),
    ),
  );
}

function gap(g) {
  const parts = [];
  if (g.points !== undefined)
    parts.push(
      `${count(g.points)} plans were considered and ${count(g.simulated ?? 0)} simulated.`,
    );
  if (g.layouts !== undefined && g.layouts !== null)
    parts.push(
      `The layouts are within ${percent(g.layouts)} of the optimum of the cost model`,
      g.search === undefined || g.search === null
        ? "."
        : `, and the search within ${percent(g.search)}.`,
    );
  return el("p", { class: "soft", text: parts.join(" ").replace(" ,", ",").replace(" .", ".") });
}
