// A chart of lanes over time, with zooming, panning, hints and keyboard navigation.

import { el, name } from "./dom.js";
import { seconds } from "./format.js";
import { hide, say, sentence, show } from "./hint.js";
import { drawAxis, drawRows, place } from "./lanes.js";
import { onTheme } from "./theme.js";

const CLOSEST = 1e-9; // seconds: the shortest range that the chart shows
const PAPER = 730; // pixels of the chart when it is printed
const NEAR = 3; // pixels around a span that still select it
const KEYS =
  "Arrow keys move between spans and lanes, Enter zooms to a span, plus and minus zoom, A and D pan, Escape shows the full step.";

/** A zoomable chart. */
export class Chart {
  /**
   * @param {{label: string, rows: import("./lanes.js").Row[], extent: number, critical?: boolean, tools?: Node[]}} options
   */
  constructor({ label, rows, extent, critical = false, tools = [] }) {
    this.rows = rows;
    this.lanes = rows.flatMap((row) => row.lanes.map((lane) => ({ row, lane })));
    this.extent = extent || 1;
    this.critical = critical ? "mark" : "off";
    this.view = { from: 0, to: this.extent, scale: 1 };
    this.height = place(rows);
    this.width = 0;
    this.chosen = null; // {row, lane, index}
    this.waiting = 0;
    this.changed = [];
    this.build(label, tools);
    this.listen();
    onTheme(() => this.redraw());
    new ResizeObserver(() => this.resize()).observe(this.place);
    for (const event of ["scroll", "resize"]) {
      addEventListener(event, () => (this.at = null), { passive: true, capture: true });
    }
    addEventListener("beforeprint", () => this.print(PAPER));
    addEventListener("afterprint", () => this.print(Math.floor(this.place.clientWidth)));
  }

  build(label, tools) {
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "timeline",
      "aria-label": `${label}. ${KEYS}`,
    });
    this.axis = el("canvas", { class: "chart-axis", "aria-hidden": "true" });
    this.cursor = el("div", { class: "chart-cursor" });
    this.mark = el("div", { class: "chart-mark" });
    this.selected = el("div", { class: "chart-mark chosen" });
    this.range = el("div", { class: "chart-range", hidden: true });
    this.place = el(
      "div",
      { class: "chart-place" },
      this.canvas,
      this.cursor,
      this.range,
      this.mark,
      this.selected,
    );
    this.window = el("output", { class: "chart-window" });
    const button = (text, title, act) =>
      el("button", { type: "button", text, "aria-label": title, title, on: { click: act } });
    this.tools = el(
      "div",
      { class: "chart-tools" },
      el(
        "div",
        { class: "choice" },
        button("−", "Zoom out", () => this.zoom(2)),
        button("+", "Zoom in", () => this.zoom(0.5)),
        button("Full step", "Show the full step", () => this.look(0, this.extent)),
      ),
      ...tools,
      this.window,
    );
    const labels = el(
      "div",
      { class: "chart-labels", style: { height: `${this.height}px` } },
      ...this.rows.map((row) =>
        el(
          "div",
          {
            class: `chart-label ${row.tone ?? ""}`,
            title: row.label.slice(0, 2000),
            style: { top: `${row.y}px`, height: `${row.height}px` },
          },
          name(row.label),
          row.note ? el("small", { text: row.note }) : null,
        ),
      ),
    );
    this.node = el(
      "div",
      { class: "chart" },
      this.tools,
      el(
        "div",
        { class: "chart-body" },
        el("div", { class: "chart-corner" }),
        this.axis,
        labels,
        this.place,
      ),
    );
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("pointermove", (e) => this.point(e));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("pointerdown", (e) => this.press(e));
    canvas.addEventListener("dblclick", () => this.look(0, this.extent));
    canvas.addEventListener("keydown", (e) => this.key(e));
    canvas.addEventListener("blur", hide);
  }

  // ---- drawing

  resize() {
    const width = Math.floor(this.place.clientWidth);
    if (width && width !== this.width) {
      this.width = width;
      this.redraw();
    }
  }

  /** Draw immediately: there is no frame between the request to print and the printing. */
  print(width) {
    this.width = width;
    this.draw();
  }

  redraw() {
    this.waiting ||= requestAnimationFrame(() => {
      this.waiting = 0;
      this.draw();
    });
  }

  draw() {
    if (!this.width) return;
    const { view, width } = this;
    view.scale = width / (view.to - view.from);
    drawAxis(this.axis, view, this.extent, width);
    drawRows(this.canvas, this.rows, view, {
      width,
      height: this.height,
      end: this.extent,
      critical: this.critical,
    });
    this.outline(this.selected, this.chosen);
    this.outline(this.mark, null);
    this.window.textContent = `${seconds(view.from)} to ${seconds(view.to)}`;
    for (const f of this.changed) f(view);
  }

  /** Show a part of the step. @param {number} from @param {number} to */
  look(from, to) {
    const span = Math.min(Math.max(to - from, Math.min(CLOSEST, this.extent)), this.extent);
    const first = Math.min(Math.max(0, from), this.extent - span);
    Object.assign(this.view, { from: first, to: first + span });
    this.redraw();
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    const { from, to } = this.view;
    this.look(around - (around - from) * factor, around + (to - around) * factor);
  }

  pan(share) {
    const by = (this.view.to - this.view.from) * share;
    this.look(this.view.from + by, this.view.to + by);
  }

  time(x) {
    return this.view.from + x / this.view.scale;
  }

  // ---- the pointer

  wheel(e) {
    const sideways = Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey;
    const focused = document.activeElement === this.canvas;
    if (sideways) this.pan((e.deltaX || e.deltaY) / this.width);
    else if (focused || e.ctrlKey || e.metaKey)
      this.zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaY)) / 200), this.time(e.offsetX));
    else return; // the page scrolls unless the chart has the focus
    e.preventDefault();
    hide();
  }

  /** Return the span at a point of the canvas, or null. */
  find(x, y) {
    const near = this.lanes.find(({ lane }) => y >= lane.y && y < lane.y + lane.height);
    if (!near || !this.width) return null;
    const index = near.lane.spans.at(this.time(x), NEAR / this.view.scale);
    return index < 0 ? null : { ...near, index };
  }

  point(e) {
    if (this.pressed) return this.drag(e);
    // Cache the position of the canvas: reading it forces a layout after every change.
    this.at ??= this.canvas.getBoundingClientRect();
    const [x, y] = [e.clientX - this.at.left, e.clientY - this.at.top];
    const hit = this.find(x, y);
    this.cursor.style.visibility = "visible";
    this.cursor.style.transform = `translateX(${x}px)`;
    this.outline(this.mark, hit);
    if (!hit) return hide();
    const same =
      this.hovered && this.hovered.lane === hit.lane && this.hovered.index === hit.index;
    if (!same) this.hovered = { ...hit, hint: hit.lane.hint(hit.index) };
    return show(this.hovered.hint, e.clientX, e.clientY);
  }

  leave() {
    this.at = null;
    this.cursor.style.visibility = "hidden";
    this.outline(this.mark, null);
    hide();
  }

  press(e) {
    if (e.button) return;
    this.pressed = {
      x: e.offsetX,
      view: { ...this.view },
      pans: e.shiftKey || e.pointerType === "touch",
      moved: false,
    };
    this.canvas.setPointerCapture(e.pointerId);
    const end = (event) => {
      this.canvas.removeEventListener("pointerup", end);
      this.canvas.removeEventListener("pointercancel", end);
      this.release(event);
    };
    this.canvas.addEventListener("pointerup", end);
    this.canvas.addEventListener("pointercancel", end);
  }

  drag(e) {
    const { x, view, pans } = this.pressed;
    if (Math.abs(e.offsetX - x) > 4) this.pressed.moved = true;
    if (!this.pressed.moved) return;
    hide();
    if (pans) {
      const by = (x - e.offsetX) / this.view.scale;
      this.look(view.from + by, view.to + by);
    } else {
      this.range.hidden = false;
      this.range.style.left = `${Math.max(0, Math.min(x, e.offsetX))}px`;
      this.range.style.width = `${Math.abs(e.offsetX - x)}px`;
    }
  }

  release(e) {
    const { x, pans, moved } = this.pressed;
    this.pressed = null;
    this.range.hidden = true;
    if (moved && !pans && e.type === "pointerup") {
      const [a, b] = [this.time(x), this.time(e.offsetX)].sort((p, q) => p - q);
      this.look(Math.max(0, a), Math.min(b, this.extent));
    } else if (!moved) {
      this.choose(this.find(x, e.offsetY));
    }
  }

  /** Draw an outline around a span. */
  outline(box, hit) {
    box.style.visibility = "hidden";
    if (!hit) return;
    const { spans, y, height } = hit.lane;
    const left = Math.max(-4, (spans.start[hit.index] - this.view.from) * this.view.scale);
    const right = Math.min(
      this.width + 4,
      (spans.end[hit.index] - this.view.from) * this.view.scale,
    );
    if (right < 0 || left > this.width) return;
    box.style.visibility = "visible";
    box.style.transform = `translate(${left}px, ${y}px)`;
    box.style.width = `${Math.max(2, right - left)}px`;
    box.style.height = `${height}px`;
  }

  // ---- the keyboard

  choose(hit) {
    this.chosen = hit;
    this.outline(this.selected, hit);
  }

  key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const act = {
      ArrowRight: () => this.step(1),
      ArrowLeft: () => this.step(-1),
      ArrowDown: () => this.lane(1),
      ArrowUp: () => this.lane(-1),
      Enter: () => this.chosen && this.zoomTo(this.chosen),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      w: () => this.zoom(0.5),
      s: () => this.zoom(2),
      a: () => this.pan(-0.25),
      d: () => this.pan(0.25),
      Home: () => this.look(0, this.view.to - this.view.from),
      End: () => this.look(this.extent, this.extent * 2),
      0: () => this.look(0, this.extent),
      Escape: () => this.look(0, this.extent),
    }[e.key.length === 1 ? e.key.toLowerCase() : e.key];
    if (!act) return;
    e.preventDefault();
    act();
  }

  step(by) {
    if (!this.chosen) return this.start(0);
    const { lane, index } = this.chosen;
    return this.visit({
      ...this.chosen,
      index: Math.min(Math.max(0, index + by), lane.spans.length - 1),
    });
  }

  lane(by) {
    if (!this.chosen) return this.start(0);
    const { lane, index } = this.chosen;
    const time = (lane.spans.start[index] + lane.spans.end[index]) / 2;
    let i = this.lanes.findIndex((x) => x.lane === lane) + by;
    while (this.lanes[i] && !this.lanes[i].lane.spans.length) i += by;
    return this.lanes[i] ? this.start(i, time) : undefined;
  }

  start(i, time = this.view.from) {
    const hit = this.lanes[i];
    if (!hit?.lane.spans.length) return;
    this.visit({
      ...hit,
      index: Math.min(hit.lane.spans.firstAfter(time), hit.lane.spans.length - 1),
    });
  }

  visit(hit) {
    const { spans } = hit.lane;
    const [start, end] = [spans.start[hit.index], spans.end[hit.index]];
    const { from, to } = this.view;
    if (start < from || end > to) {
      const middle = (start + end) / 2;
      this.look(middle - (to - from) / 2, middle + (to - from) / 2);
    }
    this.choose(hit);
    const hint = hit.lane.hint(hit.index);
    say(`${hit.row.label}: ${sentence(hint)}`);
    const at = this.canvas.getBoundingClientRect();
    const x = Math.min(Math.max(0, (start - this.view.from) * this.view.scale), this.width);
    show(hint, at.left + x, at.top + hit.lane.y + hit.lane.height);
  }

  zoomTo({ lane, index }) {
    const [start, end] = [lane.spans.start[index], lane.spans.end[index]];
    const around = Math.max(end - start, CLOSEST) * 0.6;
    this.look(start - around, end + around);
  }
}
