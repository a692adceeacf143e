// The pipeline schedule as a grid of micro-batches, in the colours of their passes.

import { legend } from "./bars.js";
import { Chart } from "./chart.js";
import { el, figure, name, table, unfold } from "./dom.js";
import { percent, plural, seconds } from "./format.js";
import { Spans } from "./spans.js";

const WORDS = { F: "forward", B: "backward", I: "backward of inputs", W: "backward of weights" };
const COLOURS = { F: "--c-forward", B: "--c-backward", I: "--c-backward", W: "--c-weight" };
const MAX_ORDER = 4000; // characters of an order in the table

/** @param {HTMLElement} body @param {any} report */
export function drawSchedule(body, report) {
  const { schedule } = report;
  const rows = schedule.rows.map((row) => ({
    label: row.label,
    note: note(row),
    lanes: [laneOf(row, schedule)],
  }));
  const extent = schedule.rows.reduce(
    (latest, row) => row.end.reduce((a, b) => Math.max(a, b), latest),
    0,
  );
  const kinds = [...new Set(schedule.rows.flatMap((row) => [...new Set(row.kind)]))];
  const chart = new Chart({ label: `Schedule ${schedule.name}`, rows, extent });
  body.append(
    el(
      "p",
      { class: "facts" },
      name(schedule.name, "strong"),
      `: ${plural(schedule.stages, "stage")}, ${plural(schedule.num_microbatches, "micro-batch", "micro-batches")}, `,
      el("b", { text: percent(schedule.bubble_fraction) }),
      " of the time is idle",
    ),
    chart.node,
    el(
      "div",
      { class: "under" },
      legend([
        ...kinds.map((k) => ({
          label: WORDS[k] ?? k,
          value: 0,
          figure: "",
          variable: COLOURS[k] ?? "--c-other-1",
        })),
        { label: "idle", value: 0, figure: "", variable: "--idle" },
      ]),
      el("p", {
        class: "soft",
        text: chunks(schedule)
          ? "The number is the micro-batch; paler passes belong to later stages of the same ranks."
          : "The number is the micro-batch.",
      }),
    ),
    unfold("Schedule as a table", () => asTable(schedule)),
  );
}

function note(row) {
  const stages = [...new Set(row.stage)].sort((a, b) => a - b);
  return stages.length === 1
    ? `stage ${stages[0]}`
    : `stages ${stages.slice(0, 4).join(", ")}${stages.length > 4 ? "…" : ""}`;
}

function chunks(schedule) {
  return schedule.rows.some((row) => new Set(row.stage).size > 1);
}

function laneOf(row, schedule) {
  const spans = new Spans({
    start: row.start,
    end: row.end,
    kind: row.kind,
    stage: row.stage,
    microbatch: row.microbatch,
  });
  const { stage, microbatch } = spans.columns;
  const order = [...new Set(row.stage)].sort((a, b) => a - b);
  const later = new Set(order.filter((_, i) => i % 2));
  return {
    spans,
    height: 26,
    colour: (i) =>
      (COLOURS[spans.kind[i]] ?? "--c-other-1") +
      (later.has(stage[i]) && COLOURS[spans.kind[i]] ? "-2" : ""),
    text: (i) => String(microbatch[i]),
    hint: (i) => ({
      title: `${WORDS[spans.kind[i]] ?? spans.kind[i]} of micro-batch ${microbatch[i]}`,
      lines: [
        ["stage", `${stage[i]} of ${schedule.stages}`],
        ["duration", seconds(spans.end[i] - spans.start[i])],
        ["from", seconds(spans.start[i])],
        ["on", row.label],
      ],
    }),
  };
}

function asTable(schedule) {
  const rows = schedule.rows.map((row) => {
    const order = row.kind.map((kind, i) => `${row.stage[i]}${kind}${row.microbatch[i]}`).join(" ");
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, name(row.label)),
      figure(String(row.kind.length)),
      el(
        "td",
        { class: "order" },
        el("code", { text: order.length > MAX_ORDER ? `${order.slice(0, MAX_ORDER)}…` : order }),
      ),
    );
  });
  return table(
    "Order of actions, as stage, pass and micro-batch",
    ["Ranks", ["Actions", "figure"], "Order (stage, pass, micro-batch)"],
    rows,
  );
}
