// The page: sections in order, drawn in one task each, so that the verdict appears first.

import { drawCluster } from "./cluster.js";
import { drawCode } from "./code.js";
import { el, name } from "./dom.js";
import { amount, percent, seconds, size } from "./format.js";
import { drawMeasured } from "./measured.js";
import { drawMemory } from "./memory.js";
import { drawModules } from "./modules.js";
import { drawPlans } from "./plans.js";
import { drawSchedule } from "./schedule.js";
import { setUpTheme } from "./theme.js";
import { drawTimeline } from "./timeline.js";
import { drawVerdict } from "./verdict.js";
import { drawWhatIf } from "./what_if.js";

/** Sections: the `key` of their data in the report, their texts, and the function that draws them. */
const SECTIONS = [
  { id: "verdict", key: "verdict", title: "Verdict", lead: "", draw: drawVerdict },
  {
    id: "model",
    key: "modules",
    title: "Model",
    lead: "One rank's share of a step. Equal modules share a row: figures are per module, bars are for all of them.",
    draw: drawModules,
  },
  {
    id: "cluster",
    key: "cluster",
    title: "Cluster",
    lead: "Ranks on their devices; the fill of a device shows its peak memory, the colour its stage.",
    draw: drawCluster,
  },
  {
    id: "memory",
    key: "memory",
    title: "Memory",
    lead: "The peak memory of each class of ranks, and its parts.",
    draw: drawMemory,
  },
  {
    id: "timeline",
    key: "timeline",
    title: "Timeline",
    lead: "A step of each class of ranks, with computing above communication.",
    draw: drawTimeline,
  },
  {
    id: "schedule",
    key: "schedule",
    title: "Pipeline schedule",
    lead: "",
    none: "The plan has no pipeline: every rank runs all layers.",
    draw: drawSchedule,
  },
  {
    id: "plans",
    key: "plans",
    title: "Why this plan",
    lead: "The plan and its runners-up on a common scale.",
    draw: drawPlans,
  },
  { id: "what-if", key: "what_if", title: "What if", lead: "", draw: drawWhatIf },
  {
    id: "code",
    key: "code",
    title: "Generated code",
    lead: "The code that runs, next to the lines of your code that it comes from.",
    draw: drawCode,
  },
  {
    id: "measured",
    key: "measured",
    title: "Predicted and measured",
    lead: "A recorded run compared with the prediction, with the largest disagreements first.",
    draw: drawMeasured,
  },
];

function missing(text) {
  const at = text.search(/shardwise [a-z]+ /);
  if (at < 0) return el("p", { class: "missing" }, name(text));
  return el(
    "p",
    { class: "missing" },
    name(text.slice(0, at).trim()),
    " ",
    el("code", { class: "command" }, name(text.slice(at))),
  );
}

/** The frame of a section, without its content. */
function frame({ id, title, lead }) {
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title`, tabindex: -1, text: title }),
    lead ? el("p", { class: "lead", text: lead }) : null,
  );
}

function fillSection(section, { key, draw, none = "This report does not have this section." }, report) {
  const data = report[key];
  const empty = data === null || data === undefined || (Array.isArray(data) && !data.length);
  if (empty) {
    section.classList.add("empty");
    section.append(missing(report.missing?.[key] ?? none));
    return;
  }
  try {
    draw(section, report);
  } catch (error) {
    console.error(error); // the other sections are still useful
    section.append(
      el("p", { class: "missing", text: `This section could not be drawn: ${error.message}` }),
    );
  }
}

/** Follow links within the page: in a notebook's frame, an address would leave the frame. */
function follow(e) {
  const link = e.target.closest?.('a[href^="#"]');
  if (!link) return;
  e.preventDefault();
  const target = document.getElementById(link.getAttribute("href").slice(1));
  target?.scrollIntoView({ block: "start" });
  (target?.matches("section") ? target.querySelector("h2") : target)?.focus({
    preventScroll: true,
  });
}

function watchContents(links) {
  const observer = new IntersectionObserver(
    (entries) => {
      for (const e of entries)
        if (e.isIntersecting)
          for (const [id, a] of links) a.toggleAttribute("aria-current", id === e.target.id);
    },
    { rootMargin: "-10% 0px -75% 0px" },
  );
  for (const id of links.keys()) observer.observe(document.getElementById(id));
}

function main() {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  document.getElementById("report-title").replaceChildren(name(report.title));
  setUpTheme(document.getElementById("theme"));
  document.getElementById("print").addEventListener("click", () => window.print());
  document.addEventListener("click", follow);
  const links = new Map(SECTIONS.map((s) => [s.id, el("a", { href: `#${s.id}`, text: s.title })]));
  document.querySelector("#contents ol").append(...[...links.values()].map((a) => el("li", {}, a)));
  const content = document.getElementById("content");
  const sections = SECTIONS.map((s) => ({ ...s, node: frame(s) }));
  content.prepend(
    el("h1", { class: "unseen" }, name(report.title)),
    ...sections.map((s) => s.node),
  );
  fillSection(sections[0].node, sections[0], report);
  const remaining = sections.slice(1);
  const next = () => {
    const s = remaining.shift();
    if (!s) {
      watchContents(links);
      document.documentElement.dataset.ready = "true";
      return;
    }
    fillSection(s.node, s, report);
    setTimeout(next);
  };
  requestAnimationFrame(() => setTimeout(next));
}

window.shardwise = Object.freeze({ format: Object.freeze({ amount, percent, seconds, size }) });
main();
