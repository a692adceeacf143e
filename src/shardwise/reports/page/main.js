// The page: sections in order, one task each, so that the verdict is seen at once.

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

/** Sections: what is in the report under `key`, and what one sees there. */
const SECTIONS = [
  { id: "verdict", key: "verdict", title: "Verdict", lead: "", draw: drawVerdict },
  {
    id: "model",
    key: "modules",
    title: "Model",
    lead: "One rank's share of a step. Equal modules stand once: the figures are those of one, the bars those of all.",
    draw: drawModules,
  },
  {
    id: "cluster",
    key: "cluster",
    title: "Cluster",
    lead: "Ranks on their devices; the fill of a device is its peak of memory, its colour its stage.",
    draw: drawCluster,
  },
  {
    id: "memory",
    key: "memory",
    title: "Memory",
    lead: "The peak of a device of each class of ranks, and what it is made of.",
    draw: drawMemory,
  },
  {
    id: "timeline",
    key: "timeline",
    title: "Timeline",
    lead: "A step of each class of ranks: computing above, communication below.",
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
    lead: "The plan and its runners-up, on one scale.",
    draw: drawPlans,
  },
  { id: "what-if", key: "what_if", title: "What if", lead: "", draw: drawWhatIf },
  {
    id: "code",
    key: "code",
    title: "Generated code",
    lead: "What runs, beside the lines of yours that it comes from.",
    draw: drawCode,
  },
  {
    id: "measured",
    key: "measured",
    title: "Predicted and measured",
    lead: "A recorded run, laid over the prediction; the largest disagreements first.",
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

/** The frame of a section, empty as yet. */
function frame({ id, title, lead }) {
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title`, tabindex: -1, text: title }),
    lead ? el("p", { class: "lead", text: lead }) : null,
  );
}

function fillSection(section, { key, draw, none = "This report does not have it." }, report) {
  const found = report[key];
  const empty = found === null || found === undefined || (Array.isArray(found) && !found.length);
  if (empty) {
    section.classList.add("empty");
    section.append(missing(report.missing?.[key] ?? none));
    return;
  }
  try {
    draw(section, report);
  } catch (error) {
    console.error(error); // the other sections are worth seeing all the same
    section.append(
      el("p", { class: "missing", text: `This section could not be drawn: ${error.message}` }),
    );
  }
}

/** Links within the page: in a notebook's frame, an address would lead out of it. */
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
  const seen = new IntersectionObserver(
    (entries) => {
      for (const e of entries)
        if (e.isIntersecting)
          for (const [id, a] of links) a.toggleAttribute("aria-current", id === e.target.id);
    },
    { rootMargin: "-10% 0px -75% 0px" },
  );
  for (const id of links.keys()) seen.observe(document.getElementById(id));
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
  const rest = sections.slice(1);
  const next = () => {
    const s = rest.shift();
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
