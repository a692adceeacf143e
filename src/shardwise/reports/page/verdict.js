// The verdict: step time, throughput, free memory, and what limits the step.

import { legend, stacked } from "./bars.js";
import { variable } from "./colours.js";
import { code, el, name } from "./dom.js";
import { amount, change, money, percent, seconds, size } from "./format.js";

/** @param {HTMLElement} body @param {any} report */
export function drawVerdict(body, report) {
  const v = report.verdict;
  body.append(
    el("div", { class: "figures" }, stepTime(v), throughput(v), memory(v, report), limit(v)),
    ...timeByCause(report),
    setting(v),
  );
  if (v.notes?.length)
    body.append(el("ul", { class: "notes" }, ...v.notes.map((n) => el("li", {}, name(n)))));
}

function cell(label, large, ...below) {
  return el(
    "div",
    { class: "big" },
    el("h3", { text: label }),
    el("p", { class: "large" }, ...large),
    ...below.map((b) => b && el("p", { class: "below" }, b)),
  );
}

/** A figure with its unit in smaller type. @param {string} text */
function split(text) {
  const at = text.lastIndexOf(" ");
  return at < 0
    ? [text]
    : [text.slice(0, at), el("span", { class: "unit", text: ` ${text.slice(at + 1)}` })];
}

function stepTime(v) {
  const m = v.measured;
  const against =
    m &&
    el(
      "a",
      { href: "#measured" },
      `measured ${seconds(m.step_time_s)}, ${change(1 + m.difference)}`,
    );
  return cell("Step time, predicted", split(seconds(v.step_time_s)), against);
}

function throughput(v) {
  const rows = `${amount(v.rows_per_s)} samples/s`;
  if (v.tokens_per_s === null || v.tokens_per_s === undefined)
    return cell(
      "Throughput",
      [amount(v.rows_per_s), el("span", { class: "unit", text: " samples/s" })],
      price(v.price),
    );
  return cell(
    "Throughput",
    [amount(v.tokens_per_s), el("span", { class: "unit", text: " tokens/s" })],
    rows,
    price(v.price),
  );
}

function memory(v, report) {
  const m = v.memory;
  const group = report.groups?.find((g) => g.id === m.group);
  const over = m.free_bytes < 0;
  const large = split(size(Math.abs(m.free_bytes)));
  const share = m.limit_bytes ? m.peak_bytes / m.limit_bytes : 0;
  return el(
    "div",
    { class: `big ${over ? "bad" : ""}` },
    el("h3", { text: over ? "Missing memory" : "Memory headroom" }),
    el("p", { class: "large" }, ...large),
    el(
      "span",
      { class: "gauge", role: "img", "aria-label": `${percent(share)} of the limit` },
      el("i", { style: { width: `${Math.min(100, share * 100)}%` } }),
    ),
    el(
      "p",
      { class: "below" },
      `${size(m.peak_bytes)} of ${size(m.limit_bytes)}`,
      group ? ", highest on " : null,
      group ? name(ranks(group)) : null,
    ),
  );
}

function ranks(group) {
  return group.num_ranks === 1 ? `rank ${group.ranks}` : `ranks ${group.ranks}`;
}

function limit(v) {
  const large = v.limit?.text ?? "";
  return el(
    "div",
    { class: "big limit" },
    el("h3", { text: "Limited by" }),
    el("p", { class: "large words" }, name(large)),
    el("p", {
      class: `below badge ${v.fits ? "good" : "bad"}`,
      text: v.fits ? "fits in memory" : "does not fit in memory",
    }),
  );
}

function price(p) {
  if (!p) return null;
  const perMillion =
    p.per_million_rows === null || p.per_million_rows === undefined
      ? ""
      : `, ${money(p.per_million_rows)} per million samples`;
  return `price ${money(p.per_hour)} per hour${perMillion}`;
}

function timeByCause(report) {
  const causes = (report.causes ?? []).filter((c) => c.share > 1e-6);
  if (!causes.length) return [];
  const parts = causes.map((c) => ({
    label: c.text,
    value: c.seconds,
    variable: variable(c.name),
    figure: `${seconds(c.seconds)} · ${percent(c.share)}`,
  }));
  const total = causes.reduce((sum, c) => sum + c.seconds, 0);
  return [
    el("h3", { text: "Time of a step by cause, on the slowest ranks" }),
    stacked(parts, total, "Time of a step by cause"),
    legend(parts),
  ];
}

function setting(v) {
  const pairs = [
    ["Model", code(v.model)],
    [
      "Plan",
      el(
        "span",
        {},
        code(v.plan),
        v.plan_name && v.plan_name !== v.plan
          ? el("span", { class: "soft" }, " (", name(v.plan_name), ")")
          : null,
      ),
    ],
    ["Cluster", code(v.cluster)],
    ["Ranks", amount(v.num_ranks)],
  ];
  return el(
    "dl",
    { class: "setting" },
    ...pairs.map(([k, x]) => el("div", {}, el("dt", { text: k }), el("dd", {}, x))),
  );
}
