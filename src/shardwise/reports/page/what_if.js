// What if: the step time with other memory, bandwidth, compute or numbers of devices.

import { choice, el, figure, name } from "./dom.js";
import { percent, seconds, signed } from "./format.js";

const WORDS = { memory: "Memory", bandwidth: "Bandwidth", devices: "Devices", compute: "Compute" };

/** @param {HTMLElement} body @param {any} report */
export function drawWhatIf(body, report) {
  const all = report.what_if;
  const kinds = [...new Set(all.map((w) => w.kind))];
  const largest = Math.max(0.05, ...all.filter(isFeasible).map((w) => Math.abs(w.ratio - 1)));
  const rows = el("tbody");
  const now = report.verdict.step_time_s;
  const draw = (kind) =>
    rows.replaceChildren(
      ...kinds
        .filter((k) => kind === "all" || k === kind)
        .flatMap((k) =>
          all
            .filter((w) => w.kind === k)
            .map((w, i, same) => line(w, i ? null : same.length, largest)),
        ),
    );
  draw("all");
  const shown = [
    { value: "all", text: "All" },
    ...kinds.map((k) => ({ value: k, text: WORDS[k] ?? k })),
  ];
  body.append(
    el(
      "div",
      { class: "toolbar" },
      el(
        "p",
        { class: "soft" },
        "Compared with the planned step of ",
        el("b", { text: seconds(now) }),
        ".",
      ),
      el("span", { class: "space" }),
      kinds.length > 1 ? choice("Kind of change", shown, "all", draw) : null,
    ),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Changes and their effect" },
      el(
        "table",
        { class: "what-if" },
        el("caption", { class: "unseen", text: "Changes and their effect on the step" }),
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { scope: "col", text: "Resource" }),
            el("th", { scope: "col", text: "Change" }),
            el("th", { scope: "col", class: "figure", text: "Step time" }),
            el(
              "th",
              { scope: "col", class: "axis" },
              el("span", { text: "← faster" }),
              el("span", { text: "slower →" }),
            ),
            el("th", { scope: "col", class: "figure", text: "Effect" }),
            el("th", { scope: "col", text: "Note" }),
          ),
        ),
        rows,
      ),
    ),
  );
}

function isFeasible(w) {
  return w.ratio !== null && w.ratio !== undefined;
}

function line(w, span, largest) {
  const share = isFeasible(w) ? (w.ratio - 1) / largest : 0;
  const width = Math.min(1, Math.abs(share)) * 50;
  const colour = share < 0 ? "--c-faster" : "--c-slower";
  const cells = [
    el("td", {}, name(w.change)),
    isFeasible(w)
      ? figure(seconds(w.step_time_s))
      : el("td", { class: "figure bad", text: "infeasible" }),
    el(
      "td",
      { class: "diverging-cell" },
      el(
        "span",
        { class: "diverging-bar", "aria-hidden": "true" },
        el("i", {
          style: {
            left: `${share < 0 ? 50 - width : 50}%`,
            width: `${width}%`,
            "--colour": `var(${colour})`,
          },
        }),
      ),
    ),
    figure(isFeasible(w) ? effect(w.ratio) : "–", { class: w.feasible ? "" : "bad" }),
    el("td", { class: "soft" }, name(w.note ?? "")),
  ];
  if (span)
    cells.unshift(el("th", { scope: "rowgroup", rowspan: span }, name(WORDS[w.kind] ?? w.kind)));
  return el("tr", { class: w.feasible ? null : "infeasible" }, ...cells);
}

function effect(ratio) {
  return Math.abs(ratio - 1) < 0.0005 ? "none" : signed(ratio - 1, percent);
}
