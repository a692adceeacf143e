// Which way each collective takes, and the times that decided: a part of the cluster's section.

import { el, figure, name, table } from "./dom.js";
import { count, percent, plural, seconds, size } from "./format.js";

/** @param {HTMLElement} body @param {any} report */
export function drawCollectives(body, report) {
  if (report.verdict.num_ranks === 1) return; // nobody to talk to
  const ways = report.collectives ?? [];
  body.append(el("h3", { text: "Ways of collectives" }));
  if (!ways.length) {
    body.append(el("p", { class: "soft", text: "All collectives are the library's." }));
    return;
  }
  body.append(
    el("p", {
      class: "soft",
      text:
        "What is used in place of the library, and what both would take; " +
        "all other collectives are the library's.",
    }),
    table(
      "Ways of collectives",
      [
        "Operation",
        "Ranks",
        "Way",
        ["Data", "figure"],
        ["This way", "figure"],
        ["The library", "figure"],
        ["Saves", "figure"],
      ],
      ways.map(row),
      "ways",
    ),
  );
}

function row(w) {
  const { [w.uses]: mine, library } = w.predicted_s ?? {};
  const groups = w.num_groups > 1 ? `${plural(w.num_groups, "group")} of ` : "";
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, name(w.operation)),
    el(
      "td",
      {},
      name(w.groups),
      el("small", { class: "soft block", text: `${groups}${count(w.group_ranks)} ranks` }),
    ),
    el("td", {}, name(w.way)),
    figure(size(w.reference_bytes)),
    figure(known(mine)),
    figure(known(library)),
    figure(mine && library ? percent(w.saved_share) : "–"),
  );
}

/** An edited plan need not have times. */
function known(time) {
  return time === undefined || time === null ? "not known" : seconds(time);
}
