// Generated code next to the user's code; selecting a line marks the matching lines.

import { el, name, plain } from "./dom.js";
import { plural } from "./format.js";
import { say } from "./hint.js";
import { coloured, openings } from "./syntax.js";

const CHUNK = 100; // lines that are created together when they become visible
const LINE = 19; // pixels

/** @param {HTMLElement} body @param {any} report */
export function drawCode(body, report) {
  const { files, sources } = report.code;
  const left = new Pane("Generated code");
  const right = new Pane("Your code");
  const pick = el(
    "select",
    { "aria-label": "Generated file" },
    ...files.map((f, i) =>
      el("option", { value: i, text: plain(`${f.name}  (ranks ${f.ranks})`, 120) }),
    ),
  );
  const order = sourceLines(sources);
  right.fill(order.map((s) => ({ number: s.line, text: s.text, title: s.title, link: s.link })));
  const open = () => {
    const file = files[Number(pick.value)];
    left.fill(file.lines.map((text, i) => ({ number: i + 1, text, link: file.sources[i] ?? -1 })));
    const used = new Set(file.sources);
    right.dim((line) => line.link >= 0 && !used.has(line.link));
    left.reveal(file.sources.findIndex((s) => s >= 0)); // names and shapes come before it
  };
  pick.value = String(
    Math.max(
      0,
      files.findIndex((f) => f.sources.some((s) => s >= 0)),
    ),
  );
  pick.addEventListener("change", open);
  left.onPick = (line) => join(line, left, right, sources);
  right.onPick = (line) => join(line, right, left, sources);
  body.append(
    el(
      "div",
      { class: "toolbar" },
      el("label", {}, "File ", pick),
      el("p", {
        class: "soft",
        text: "Click a line, or press Enter on it, to mark the matching lines on the other side.",
      }),
    ),
    el("div", { class: "panes" }, left.node, right.node),
  );
  open();
}

/** The user's lines by file, each file with its name before its first line. */
function sourceLines(sources) {
  const all = sources
    .map((s, link) => ({ ...s, link }))
    .sort((a, b) =>
      a.file < b.file ? -1 : a.file > b.file ? 1 : a.line - b.line || a.link - b.link,
    );
  const lines = [];
  let file = null;
  for (const s of all) {
    if (s.file !== file) lines.push({ title: s.file, text: "", link: -1, line: "" });
    file = s.file;
    lines.push(s);
  }
  return lines;
}

function join(line, from, to, sources) {
  from.mark((l) => l === line || (line.link >= 0 && l.link === line.link), false);
  const matches = line.link < 0 ? 0 : to.mark((l) => l.link === line.link, true);
  const source = sources[line.link];
  say(
    source
      ? `${plain(source.file, 200)} line ${source.line}: ${plural(matches, "line")} on the other side`
      : "This line does not come from a line of your code",
  );
}

/** Lines of code, created a hundred at a time. */
class Pane {
  constructor(label) {
    this.label = label;
    this.onPick = () => {};
    this.list = el("div", {
      class: "lines",
      tabindex: 0,
      role: "listbox",
      "aria-label": `${label}; arrow keys move between lines, Enter marks the matching lines`,
    });
    this.node = el("div", { class: "pane" }, el("h3", { text: label }), this.list);
    this.observer = new IntersectionObserver(
      (entries) => entries.forEach((e) => e.isIntersecting && this.make(e.target)),
      { root: this.list, rootMargin: "600px" },
    );
    this.list.addEventListener("click", (e) => this.pick(this.indexOf(e.target)));
    this.list.addEventListener("keydown", (e) => this.key(e));
    addEventListener("beforeprint", () => this.print());
    addEventListener("afterprint", () => this.unprint());
  }

  fill(lines) {
    this.lines = lines;
    this.begun = openings(lines.map((l) => l.text));
    this.at = -1;
    this.marked = new Set();
    this.dimmed = new Set();
    this.observer.disconnect();
    this.chunks = [];
    for (let i = 0; i < lines.length; i += CHUNK) {
      const count = Math.min(CHUNK, lines.length - i);
      const node = el("div", {
        class: "chunk",
        "data-first": i,
        role: "presentation",
        style: { "min-height": `${count * LINE}px` },
      });
      this.chunks.push(node);
      this.observer.observe(node);
    }
    this.list.replaceChildren(...this.chunks);
    if (this.chunks.length) this.make(this.chunks[0]);
    this.list.scrollTop = 0;
  }

  make(chunk) {
    if (chunk.childElementCount) return;
    const first = Number(chunk.dataset.first);
    chunk.append(
      ...this.lines.slice(first, first + CHUNK).map((line, i) => this.line(line, first + i)),
    );
  }

  line(line, i) {
    if (line.title !== undefined)
      return el("div", { class: "line file", "data-i": i }, name(line.title));
    const node = el(
      "div",
      {
        class: "line",
        role: "option",
        "data-i": i,
        id: `${this.label[0]}-${i}`,
        "aria-selected": this.marked.has(i),
      },
      el("span", { class: `number ${line.link >= 0 ? "linked" : ""}`, text: line.number }),
      el("code", { dir: "ltr" }, ...coloured(line.text, this.begun[i])),
    );
    if (this.dimmed.has(i)) node.classList.add("dimmed");
    return node;
  }

  indexOf(target) {
    const node = target.closest(".line");
    return node ? Number(node.dataset.i) : -1;
  }

  nodeOf(i) {
    const chunk = this.chunks[Math.floor(i / CHUNK)];
    if (!chunk) return null;
    this.make(chunk);
    return chunk.children[i % CHUNK];
  }

  /** Print from the line that is at the top now, as paper does not scroll. */
  print() {
    this.scrolled = this.list.scrollTop;
    const top = Math.floor(this.scrolled / LINE);
    const first = Math.floor(top / CHUNK);
    for (const chunk of this.chunks.slice(0, first)) chunk.hidden = true;
    for (const chunk of this.chunks.slice(first, first + 2)) this.make(chunk);
    for (let i = first * CHUNK; i < top; i++) this.nodeOf(i).hidden = true;
    this.list.scrollTop = 0;
  }

  unprint() {
    for (const chunk of this.chunks) {
      chunk.hidden = false;
      for (const node of chunk.children) node.hidden = false;
    }
    this.list.scrollTop = this.scrolled;
  }

  /** Scroll a line into the upper part of the view. */
  reveal(i) {
    const node = this.nodeOf(i);
    if (node) this.list.scrollTop = Math.max(0, node.offsetTop - this.list.clientHeight / 4);
  }

  /** Mark lines and return their number; scroll to the first one if asked. */
  mark(test, scroll) {
    for (const i of this.marked) this.nodeOf(i)?.setAttribute("aria-selected", "false");
    this.marked = new Set(
      this.lines.flatMap((line, i) => (line.title === undefined && test(line) ? [i] : [])),
    );
    for (const i of this.marked) this.nodeOf(i)?.setAttribute("aria-selected", "true");
    const [first] = this.marked;
    if (scroll && first !== undefined) this.reveal(first);
    return this.marked.size;
  }

  dim(test) {
    this.dimmed = new Set(this.lines.flatMap((line, i) => (test(line) ? [i] : [])));
    for (const chunk of this.chunks)
      for (const node of chunk.children)
        node.classList.toggle("dimmed", this.dimmed.has(Number(node.dataset.i)));
  }

  pick(i) {
    if (i < 0 || this.lines[i]?.title !== undefined) return;
    this.go(i);
    this.onPick(this.lines[i]);
  }

  go(i) {
    this.nodeOf(this.at)?.classList.remove("current");
    this.at = i;
    const node = this.nodeOf(i);
    node.classList.add("current");
    if (node.id) this.list.setAttribute("aria-activedescendant", node.id);
    const top = node.offsetTop;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (top + LINE > this.list.scrollTop + this.list.clientHeight)
      this.list.scrollTop = top + LINE - this.list.clientHeight;
  }

  key(e) {
    const last = this.lines.length - 1;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[e.key];
    if (by) this.go(Math.min(Math.max(0, this.at + by), last));
    else if (e.key === "Home") this.go(0);
    else if (e.key === "End") this.go(last);
    else if (e.key === "Enter" || e.key === " ") this.pick(this.at);
    else return;
    e.preventDefault();
  }
}
