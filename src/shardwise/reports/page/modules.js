// The model as a tree of modules, with their parameters and operations below them.

import { el, head } from "./dom.js";
import { count } from "./format.js";
import { say } from "./hint.js";
import { MAX_HITS, Model } from "./model_items.js";
import { Tree } from "./tree.js";

/** @param {HTMLElement} body @param {any} report */
export function drawModules(body, report) {
  const model = new Model(report.modules);
  const tree = new Tree({
    label: "Modules of the model",
    heads: heads(model.syncs),
    roots: model.roots(),
  });
  for (const key of model.opening()) {
    const index = tree.rows.findIndex((r) => r.item.key === key);
    tree.toggle(index, true);
  }
  const search = el("input", {
    type: "search",
    placeholder: "Search modules, parameters, operations",
    "aria-label": "Search modules, parameters and operations",
    spellcheck: "false",
  });
  const output = el("output", { class: "soft" });
  const start = new Set(tree.open);
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => find(tree, model, search.value.trim(), start, output), 120);
  });
  const fold = (open) => () => {
    search.value = "";
    tree.open = new Set(open ? model.parents() : []);
    tree.show(model.roots());
    output.textContent = "";
  };
  body.append(
    el(
      "div",
      { class: "toolbar" },
      search,
      output,
      el("span", { class: "space" }),
      el(
        "div",
        { class: "choice", role: "group", "aria-label": "Modules" },
        el("button", { type: "button", text: "Expand all", on: { click: fold(true) } }),
        el("button", { type: "button", text: "Collapse all", on: { click: fold(false) } }),
      ),
    ),
    tree.node,
  );
}

function heads(syncs) {
  const heads = [
    head("Module"),
    head("Layout"),
    head("Parameters", "figure"),
    head("Activations", "figure"),
    head("Forward + backward", "figure"),
    head("Communication", "figure"),
  ];
  if (syncs)
    heads.push(
      el("th", {
        scope: "col",
        class: "figure",
        text: "Sync",
        title:
          "Communication of parameters and gradients, overlapped with computing as far as possible",
      }),
    );
  return heads;
}

function find(tree, model, text, start, output) {
  if (!text) {
    tree.open = new Set(start);
    tree.show(model.roots());
    output.textContent = "";
    return;
  }
  const hits = model.search(text.toLowerCase());
  tree.open = hits.open;
  tree.show(model.roots(hits));
  output.textContent =
    hits.total > MAX_HITS
      ? `${count(hits.total)} found, showing the first ${MAX_HITS}`
      : `${count(hits.total)} found`;
  say(output.textContent);
}
