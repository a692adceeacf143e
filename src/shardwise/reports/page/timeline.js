// The timeline of a step: what each class of ranks computes and communicates, and where it waits.

import { legend } from "./bars.js";
import { Chart } from "./chart.js";
import { variable } from "./colours.js";
import { choice, el, figure, name, plain, table, unfold } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { Spans } from "./spans.js";

const HEIGHTS = { compute: 22, communication: 12 };
const MAX_LISTED = 500; // spans in a table

/**
 * The rows of a timeline for a chart.
 * @param {any} timeline @param {{word?: string, tone?: string}} [options]
 * @returns {import("./lanes.js").Row[]}
 */
export function rowsOf(timeline, { word = "", tone = "" } = {}) {
  return timeline.rows.map((row) => ({
    label: row.label,
    tone,
    data: row,
    end: timeline.step_time_s,
    note: `${word}${percent(row.busy_s / (timeline.step_time_s || 1))} computing`,
    lanes: Object.entries(row.lanes).map(([lane, columns]) => laneOf(lane, columns, row, timeline)),
  }));
}

function laneOf(lane, columns, row, timeline) {
  const spans = new Spans(columns);
  const variables = timeline.kinds.map(variable);
  return {
    spans,
    height: HEIGHTS[lane] ?? 14,
    lane,
    colour: (i) => variables[spans.kind[i]],
    text: (i) => timeline.names[spans.name[i]] ?? "",
    hint: (i) => hintOf(spans, i, lane, row, timeline),
  };
}

function hintOf(spans, i, lane, row, timeline) {
  const [start, end] = [spans.start[i], spans.end[i]];
  return {
    title: `${timeline.names[spans.name[i]] ?? ""}  ${timeline.kinds[spans.kind[i]] ?? ""}`,
    lines: [
      ["duration", seconds(end - start)],
      ["from", seconds(start)],
      ["to", seconds(end)],
      ["lane", lane],
      ["on", plain(row.label, 120)],
      ...(spans.critical[i] ? [["", "on the critical path"]] : []),
    ],
  };
}

/** The kinds of spans that occur, with their colours. */
export function kindsOf(timeline) {
  const used = new Set();
  for (const row of timeline.rows)
    for (const lane of Object.values(row.lanes)) for (const k of lane.kind) used.add(k);
  const kinds = timeline.kinds.filter((_, i) => used.has(i));
  return [...kinds, "idle"].map((k) => ({
    label: k,
    value: 0,
    figure: "",
    variable: k === "idle" ? "--idle" : variable(k),
  }));
}

/** @param {HTMLElement} body @param {any} report */
export function drawTimeline(body, report) {
  const { timeline } = report;
  const rows = rowsOf(timeline);
  const marks = choice(
    "Critical path",
    [
      { value: "mark", text: "Mark critical path" },
      { value: "only", text: "Only critical path" },
      { value: "off", text: "No marks" },
    ],
    "mark",
    (value) => {
      chart.critical = value;
      chart.redraw();
    },
  );
  const chart = new Chart({
    label: "Timeline of a step",
    rows,
    extent: timeline.step_time_s,
    critical: true,
    tools: [marks],
  });
  body.append(
    criticalPath(timeline.critical),
    chart.node,
    el(
      "div",
      { class: "under" },
      legend([
        ...kindsOf(timeline),
        { label: "critical path", value: 0, figure: "", variable: "--critical" },
      ]),
      keys(),
    ),
  );
  if (timeline.folded) body.append(el("p", { class: "soft" }, name(timeline.folded)));
  body.append(
    unfold("Timeline as tables", () => tables(timeline, chart), { "data-print": "open" }),
  );
}

/** Instructions for the chart. */
export function keys() {
  return el(
    "p",
    { class: "keys soft" },
    "Drag to zoom in, double-click for the full step, Shift-drag to pan; click, then scroll to zoom. Keys: ",
    ...["←", "→", "↑", "↓"].map((k) => el("kbd", { text: k })),
    " select spans, ",
    el("kbd", { text: "Enter" }),
    " zoom to the span, ",
    el("kbd", { text: "+" }),
    el("kbd", { text: "−" }),
    " zoom, ",
    el("kbd", { text: "A" }),
    el("kbd", { text: "D" }),
    " pan, ",
    el("kbd", { text: "Esc" }),
    " full step.",
  );
}

function criticalPath(critical) {
  if (!critical) return el("p");
  return el(
    "p",
    { class: "critical-text" },
    el("b", { text: "Critical path: " }),
    name(critical.text ?? ""),
  );
}

function tables(timeline, chart) {
  const summary = timeline.rows.map((row) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name(row.label)),
      figure(seconds(row.busy_s)),
      figure(seconds(row.idle_s)),
      figure(seconds(row.exposed_s)),
      figure(count(Object.values(row.lanes).reduce((n, l) => n + l.start.length, 0))),
    ),
  );
  const list = el("div", { "aria-live": "off" });
  const pick = el(
    "select",
    { "aria-label": "Ranks whose spans are listed" },
    ...timeline.rows.map((row, i) => el("option", { value: i, text: plain(row.label, 80) })),
  );
  const fill = () =>
    list.replaceChildren(spanTable(timeline, timeline.rows[Number(pick.value)], chart.view));
  pick.addEventListener("change", fill);
  fill();
  return el(
    "div",
    {},
    table(
      "Time of each class of ranks",
      [
        "Ranks",
        ["Computing", "figure"],
        ["Idle", "figure"],
        ["Exposed communication", "figure"],
        ["Spans", "figure"],
      ],
      summary,
    ),
    el(
      "div",
      { class: "toolbar no-print" },
      el("label", {}, "Spans of ", pick),
      el("button", { type: "button", text: "List the visible spans", on: { click: fill } }),
    ),
    list,
  );
}

function spanTable(timeline, row, view) {
  const visible = [];
  for (const [lane, c] of Object.entries(row.lanes)) {
    for (let i = 0; i < c.start.length; i++)
      if (c.end[i] > view.from && c.start[i] < view.to) visible.push([lane, c, i]);
  }
  visible.sort(([, a, i], [, b, j]) => a.start[i] - b.start[j]);
  const rows = visible
    .slice(0, MAX_LISTED)
    .map(([lane, c, i]) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, name(timeline.names[c.name[i]] ?? "")),
        el("td", {}, name(timeline.kinds[c.kind[i]] ?? "")),
        el("td", { text: lane }),
        figure(seconds(c.start[i])),
        figure(seconds(c.end[i] - c.start[i])),
        el("td", { text: c.critical?.[i] ? "yes" : "" }),
      ),
    );
  const box = el(
    "div",
    { class: "short no-print" },
    table(
      `Spans of ${plain(row.label, 120)}`,
      ["Span", "Kind", "Lane", ["Start", "figure"], ["Duration", "figure"], "Critical path"],
      rows,
    ),
  );
  if (visible.length > MAX_LISTED)
    box.append(
      el("p", {
        class: "soft",
        text: `The first ${MAX_LISTED} of ${count(visible.length)} spans; zoom in to list others`,
      }),
    );
  return box;
}
