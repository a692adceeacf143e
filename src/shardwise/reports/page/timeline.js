// The step over time: what each class of ranks computes and sends, and where it waits.

import { legend } from "./bars.js";
import { Chart } from "./chart.js";
import { variable } from "./colours.js";
import { choice, el, figure, name, plain, table, unfold } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { Spans } from "./spans.js";

const HEIGHTS = { compute: 22, communication: 12 };
const MOST_LISTED = 500; // spans of a table

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
      ["takes", seconds(end - start)],
      ["from", seconds(start)],
      ["to", seconds(end)],
      ["lane", lane],
      ["on", plain(row.label, 120)],
      ...(spans.critical[i] ? [["", "on the critical path"]] : []),
    ],
  };
}

/** The kinds that occur, with their colours. */
export function kindsOf(timeline) {
  const used = new Set();
  for (const row of timeline.rows)
    for (const lane of Object.values(row.lanes)) for (const k of lane.kind) used.add(k);
  const seen = timeline.kinds.filter((_, i) => used.has(i));
  return [...seen, "idle"].map((k) => ({
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

/** How the chart is used. */
export function keys() {
  return el(
    "p",
    { class: "keys soft" },
    "Drag to zoom in, double-click for the whole step, Shift and drag to move. Click, then wheel to zoom. Keys: ",
    ...["←", "→", "↑", "↓"].map((k) => el("kbd", { text: k })),
    " spans, ",
    el("kbd", { text: "Enter" }),
    " zoom to it, ",
    el("kbd", { text: "+" }),
    el("kbd", { text: "−" }),
    " zoom, ",
    el("kbd", { text: "A" }),
    el("kbd", { text: "D" }),
    " move, ",
    el("kbd", { text: "Esc" }),
    " all.",
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
      el("button", { type: "button", text: "List what the chart shows", on: { click: fill } }),
    ),
    list,
  );
}

function spanTable(timeline, row, view) {
  const found = [];
  for (const [lane, c] of Object.entries(row.lanes)) {
    for (let i = 0; i < c.start.length; i++)
      if (c.end[i] > view.from && c.start[i] < view.to) found.push([lane, c, i]);
  }
  found.sort(([, a, i], [, b, j]) => a.start[i] - b.start[j]);
  const rows = found
    .slice(0, MOST_LISTED)
    .map(([lane, c, i]) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, name(timeline.names[c.name[i]] ?? "")),
        el("td", {}, name(timeline.kinds[c.kind[i]] ?? "")),
        el("td", { text: lane }),
        figure(seconds(c.start[i])),
        figure(seconds(c.end[i] - c.start[i])),
        el("td", { text: c.critical?.[i] ? "critical" : "" }),
      ),
    );
  const box = el(
    "div",
    { class: "short no-print" },
    table(
      `Spans of ${plain(row.label, 120)}`,
      ["Span", "Kind", "Lane", ["Start", "figure"], ["Takes", "figure"], "Path"],
      rows,
    ),
  );
  if (found.length > MOST_LISTED)
    box.append(
      el("p", {
        class: "soft",
        text: `${count(found.length)} spans, the first ${MOST_LISTED} listed: zoom in to list others`,
      }),
    );
  return box;
}
