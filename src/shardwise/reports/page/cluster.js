// The cluster: nodes, devices and their ranks, traffic of the links, and collectives.

import { drawCollectives } from "./collectives.js";
import { el, figure, name, plain, table } from "./dom.js";
import { percent, plural, seconds, size } from "./format.js";
import { explain } from "./hint.js";

const MAX_NODES = 16; // drawn at first
const STAGES = 8; // colours of groups

/** @param {HTMLElement} body @param {any} report */
export function drawCluster(body, report) {
  const { nodes, links } = report.cluster;
  const groups = new Map((report.groups ?? []).map((g) => [g.id, g]));
  const grid = el("div", { class: "nodes" });
  const add = (some) => grid.append(...some.map((node) => drawNode(node, links, groups)));
  add(nodes.slice(0, MAX_NODES));
  if (groups.size > 1) body.append(placement([...groups.values()]));
  body.append(grid);
  if (nodes.length > MAX_NODES) body.append(more(nodes, add));
  const between = links.filter((l) => l.kind !== "inside" && l.traffic_bytes);
  if (between.length)
    body.append(el("div", { class: "link-rows" }, ...between.slice(0, MAX_NODES).map((l) => drawLink(l))));
  body.append(linkTable(links));
  drawCollectives(body, report);
}

/** All ranks in order: the width of a group is its number of ranks, the colour its stage. */
function placement(groups) {
  const bar = el("div", {
    class: "stacked",
    role: "img",
    "aria-label": `Groups of ranks: ${groups.map((g) => `ranks ${g.ranks}: ${stagesOf(g)}`).join("; ")}`,
  });
  const all = groups.reduce((sum, g) => sum + g.num_ranks, 0);
  for (const g of groups) {
    const piece = el(
      "span",
      { style: { width: `${(g.num_ranks / all) * 100}%`, "--colour": colour(g) } },
      name(g.ranks),
    );
    explain(piece, () => ({
      title: `ranks ${g.ranks}`,
      lines: [
        ["", stagesOf(g)],
        ["mesh", g.mesh ?? ""],
        ["ranks", String(g.num_ranks)],
      ],
    }));
    bar.append(piece);
  }
  return el(
    "div",
    { class: "placement" },
    el("h3", { text: "Groups of ranks and their stages" }),
    bar,
  );
}

function stagesOf(group) {
  const stages = group.stages ?? [];
  return `${stages.length === 1 ? "stage" : "stages"} ${stages.slice(0, 8).join(", ")}${stages.length > 8 ? "…" : ""}`;
}

function colour(group) {
  return `var(--g-${((group.stages?.[0] ?? 0) % STAGES) + 1})`;
}

function more(nodes, add) {
  const button = el("button", {
    type: "button",
    text: `Show ${plural(nodes.length - MAX_NODES, "more node")}`,
  });
  button.addEventListener("click", () => {
    add(nodes.slice(MAX_NODES));
    button.remove();
  });
  return button;
}

function drawNode(node, links, groups) {
  const own = links.filter((l) => l.kind === "inside" && l.nodes?.includes(node.name));
  return el(
    "article",
    { class: "node" },
    el(
      "h3",
      {},
      name(node.name),
      node.copies > 1 ? el("span", { class: "count", text: `×${node.copies}` }) : null,
      name(node.kind ?? "", "soft"),
    ),
    el(
      "ul",
      { class: "devices", style: { "--across": across(node.devices.length) } },
      ...node.devices.map((d) => device(d, groups.get(d.group))),
    ),
    ...own.map((l) => drawLink(l)),
  );
}

/** The number of devices per row: a node of eight has two rows. */
function across(count) {
  return count <= 4 ? count : count <= 8 ? 4 : 8;
}

function device(d, group) {
  const ranks = Array.isArray(d.ranks) ? d.ranks.join(", ") : String(d.ranks ?? "");
  const share = d.memory_bytes && d.peak_bytes ? d.peak_bytes / d.memory_bytes : 0;
  const stages = group?.stages ?? [];
  const idle = ranks === "";
  const box = el(
    "li",
    {
      class: `device ${idle ? "unused" : ""}`,
      tabindex: 0,
      "aria-label": plain(describe(d, ranks, group, share)),
    },
    el("span", { class: "device-memory", style: { height: `${Math.min(100, share * 100)}%` } }),
    el("b", {}, name(idle ? "–" : ranks.split(",")[0])),
  );
  if (group) box.style.setProperty("--colour", colour(group));
  explain(box, () => ({
    title: idle ? `${d.name}: not used` : `rank ${ranks}`,
    lines: [
      ["device", d.name],
      ...(group
        ? [
            ["group", `${group.id}: ranks ${group.ranks}`],
            ["mesh", group.mesh ?? ""],
            ["stages", stages.join(", ")],
          ]
        : []),
      ["memory", `${size(d.peak_bytes)} of ${size(d.memory_bytes)}, ${percent(share)}`],
    ],
  }));
  return box;
}

function describe(d, ranks, group, share) {
  const where = group ? `, stage ${(group.stages ?? []).join(", ")}` : "";
  return ranks === ""
    ? `${d.name}, not used`
    : `${d.name}, rank ${ranks}${where}, ${percent(share)} of memory`;
}

/** A link as a line: the busier, the thicker. */
function drawLink(link) {
  const share = link.share ?? 0;
  return el(
    "div",
    { class: `link-row ${link.kind}` },
    el(
      "span",
      {
        class: "link-line",
        "aria-hidden": "true",
        style: { height: `${2 + Math.min(1, share) * 8}px` },
      },
      el("i", { style: { width: `${Math.min(100, share * 100)}%` } }),
    ),
    el(
      "span",
      { class: "link-text" },
      name(link.name),
      link.count > 1 ? el("span", { class: "count", text: `×${link.count}` }) : null,
      el("b", {
        text: link.traffic_bytes
          ? `${size(link.traffic_bytes)} per step, busy ${percent(share)}`
          : "no traffic",
      }),
    ),
  );
}

function linkTable(links) {
  const rows = [...links]
    .sort((a, b) => (b.share ?? 0) - (a.share ?? 0))
    .map((l) =>
      el(
        "tr",
        {},
        el(
          "th",
          { scope: "row" },
          name(l.name),
          l.count > 1 ? el("span", { class: "count", text: `×${l.count}` }) : null,
          l.busiest && l.busiest !== l.name
            ? el("small", { class: "soft block" }, "busiest: ", name(l.busiest))
            : null,
        ),
        el("td", {}, name(l.kind)),
        figure(
          l.bytes_per_s === null || l.bytes_per_s === undefined
            ? "unlimited"
            : `${size(l.bytes_per_s)}/s`,
        ),
        figure(size(l.traffic_bytes)),
        figure(seconds(l.busy_s)),
        figure(percent(l.share ?? 0)),
        el(
          "td",
          { class: "what" },
          ...Object.entries(l.what ?? {})
            .sort((a, b) => b[1] - a[1])
            .map(([k, v]) => el("span", {}, name(k), ` ${size(v)}`)),
        ),
      ),
    );
  return table(
    "Links and their traffic",
    [
      "Link",
      "Kind",
      ["Bandwidth", "figure"],
      ["Traffic per step", "figure"],
      ["Busy", "figure"],
      ["Share of the step", "figure"],
      "Purpose",
    ],
    rows,
    "links",
  );
}
