// Memory of each class of ranks: the parts of its peak, its limit, and its course over the step.

import { legend, stacked } from "./bars.js";
import { partVariable } from "./colours.js";
import { choice, el, figure, name, svg, table, unfold } from "./dom.js";
import { percent, seconds, size } from "./format.js";
import { hide, show } from "./hint.js";

const WIDTH = 400; // in units of the chart
const HEIGHT = 64;
const FIRST = 8; // classes that are shown at first, those closest to their limits
const SMALL = 0.25; // of the limit; smaller peaks are compared with each other

/** @param {HTMLElement} body @param {any} report */
export function drawMemory(body, report) {
  const uses = report.memory;
  const names = [
    ...new Set(uses.flatMap((u) => [...Object.keys(u.parts), ...Object.keys(u.others ?? {})])),
  ];
  const others = new Set(uses.flatMap((u) => Object.keys(u.others ?? {})));
  const largest = Math.max(...uses.map((u) => u.peak_bytes));
  const limit = Math.max(...uses.map((u) => u.limit_bytes));
  const list = el("div", { class: "memories" });
  let scale = largest < SMALL * limit ? "largest" : "limit";
  let shownCount = uses.length > FIRST + 2 ? FIRST : uses.length;
  const draw = () => {
    const total = scale === "limit" ? Math.max(limit, largest) : largest * 1.05;
    const shown =
      shownCount < uses.length
        ? [...uses]
            .sort((a, b) => b.peak_bytes / b.limit_bytes - a.peak_bytes / a.limit_bytes)
            .slice(0, shownCount)
        : uses;
    list.replaceChildren(...shown.map((u) => drawUse(u, total, report)));
  };
  const all =
    shownCount < uses.length &&
    el("button", {
      type: "button",
      class: "more",
      text: `Show all ${uses.length} classes of ranks, not only the fullest`,
      on: {
        click: () => {
          shownCount = uses.length;
          all.remove();
          draw();
        },
      },
    });
  const tools = choice(
    "Scale of memory",
    [
      { value: "limit", text: "Relative to the limit" },
      { value: "largest", text: "Relative to the largest peak" },
    ],
    scale,
    (value) => {
      scale = value;
      draw();
    },
  );
  const key = names.map((n) => ({
    label: n,
    value: 0,
    variable: partVariable(n),
    figure: "",
    pattern: others.has(n) ? "hatched" : "",
  }));
  body.append(
    el("div", { class: "toolbar" }, legend(key), el("span", { class: "space" }), tools),
    list,
  );
  if (all) body.append(all);
  body.append(
    unfold("Memory as a table", () => asTable(uses, names, report), {
      class: "unfold",
      "data-print": "open",
    }),
  );
  draw();
}

function parts(use) {
  const partsOf = (entries, pattern) =>
    entries.map(([label, value]) => ({
      label,
      value,
      variable: partVariable(label),
      figure: size(value),
      pattern,
    }));
  return [
    ...partsOf(Object.entries(use.parts), ""),
    ...partsOf(Object.entries(use.others ?? {}), "hatched"),
  ].filter((p) => p.value > 0);
}

function drawUse(use, total, report) {
  const over = use.peak_bytes > use.limit_bytes;
  const at = (use.limit_bytes / total) * 100;
  const bar = el(
    "div",
    { class: "memory-bar" },
    stacked(parts(use), total, `Peak of ${label(use, report)}`),
    at <= 100
      ? el("span", {
          class: "limit-line",
          style: { left: `${at}%` },
          title: `limit ${size(use.limit_bytes)}`,
        })
      : null,
  );
  return el(
    "div",
    { class: `memory ${over ? "bad" : ""}` },
    el(
      "div",
      { class: "memory-label" },
      name(label(use, report), "strong"),
      el("small", { class: "soft", text: `peak at ${use.when}` }),
    ),
    el(
      "div",
      {},
      bar,
      el(
        "p",
        { class: "memory-text" },
        el("b", { text: size(use.peak_bytes) }),
        ` of ${size(use.limit_bytes)}, ${percent(use.peak_bytes / use.limit_bytes)}`,
        use.host_bytes ? `, ${size(use.host_bytes)} in host memory` : null,
      ),
    ),
    overTime(use, total, report),
  );
}

function label(use, report) {
  const rankClass = (report.classes ?? []).find((c) => c.groups?.includes(use.group));
  return rankClass?.label ?? `ranks ${use.ranks}`;
}

/** The memory over the step as an area chart. */
function overTime(use, total, report) {
  const { times, over_time: values } = use;
  if (!values?.length) return el("div");
  const end = report.timeline?.step_time_s ?? times.at(-1);
  const x = (t) => ((t / (end || 1)) * WIDTH).toFixed(1);
  const y = (v) => (HEIGHT - (v / total) * (HEIGHT - 2)).toFixed(1);
  let path = `M${x(times[0])},${HEIGHT}`;
  values.forEach((v, i) => (path += `L${x(times[i] ?? 0)},${y(v)}H${x(times[i + 1] ?? end)}`));
  const limit =
    use.limit_bytes <= total
      ? svg("path", { class: "limit-path", d: `M0,${y(use.limit_bytes)}H${WIDTH}` })
      : null;
  const picture = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `Memory of ${label(use, report)} over the step: from ${size(values[0])} to ${size(values.reduce((a, b) => Math.max(a, b)))}`,
    },
    svg("path", { class: "area", d: `${path}V${HEIGHT}Z` }),
    limit,
  );
  picture.addEventListener("pointermove", (e) => {
    const at = picture.getBoundingClientRect();
    const time = ((e.clientX - at.left) / at.width) * end;
    let i = times.findIndex((t) => t > time);
    i = i < 0 ? values.length - 1 : Math.max(0, i - 1);
    show(
      {
        title: label(use, report),
        lines: [
          ["at", seconds(time)],
          ["memory", size(values[i])],
        ],
      },
      e.clientX,
      e.clientY,
    );
  });
  picture.addEventListener("pointerleave", hide);
  return el(
    "div",
    { class: "memory-time" },
    picture,
    el(
      "small",
      { class: "soft ends" },
      el("span", { text: "0" }),
      el("span", { text: "over the step" }),
      el("span", { text: seconds(end) }),
    ),
  );
}

function asTable(uses, names, report) {
  const rows = uses.map((u) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, name(label(u, report))),
      ...names.map((n) => figure(size(u.parts[n] ?? u.others?.[n] ?? 0))),
      figure(size(u.peak_bytes)),
      figure(size(u.limit_bytes)),
      figure(size(u.limit_bytes - u.peak_bytes)),
    ),
  );
  return table(
    "Memory by part",
    [
      "Ranks",
      ...names.map((n) => [n, "figure"]),
      ["Peak", "figure"],
      ["Limit", "figure"],
      ["Free", "figure"],
    ],
    rows,
  );
}
