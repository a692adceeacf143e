// The implementations of collectives and their predicted times: a part of the cluster's section.

import { el, figure, name, table } from "./dom.js";
import { count, percent, plural, seconds, size } from "./format.js";

/** @param {HTMLElement} body @param {any} report */
export function drawCollectives(body, report) {
  if (report.verdict.num_ranks === 1) return; // no communication
  const collectives = report.collectives ?? [];
  body.append(el("h3", { text: "Implementations of collectives" }));
  if (!collectives.length) {
    body.append(el("p", { class: "soft", text: "All collectives use the library." }));
    return;
  }
  body.append(
    el("p", {
      class: "soft",
      text:
        "Collectives that do not use the library, and the predicted times of both; " +
        "all others use the library.",
    }),
    table(
      "Implementations of collectives",
      [
        "Operation",
        "Ranks",
        "Implementation",
        ["Data", "figure"],
        ["Time", "figure"],
        ["Library", "figure"],
        ["Saved", "figure"],
      ],
      collectives.map(row),
      "implementations",
    ),
  );
}

function row(c) {
  const { [c.uses]: own, library } = c.predicted_s ?? {};
  const groups = c.num_groups > 1 ? `${plural(c.num_groups, "group")} of ` : "";
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, name(c.operation)),
    el(
      "td",
      {},
      name(c.groups),
      el("small", { class: "soft block", text: `${groups}${count(c.group_ranks)} ranks` }),
    ),
    el("td", {}, name(c.implementation)),
    figure(size(c.reference_bytes)),
    figure(time(own)),
    figure(time(library)),
    figure(own && library ? percent(c.saved_share) : "–"),
  );
}

/** A time as text; an edited plan may have none. */
function time(value) {
  return value === undefined || value === null ? "unknown" : seconds(value);
}
