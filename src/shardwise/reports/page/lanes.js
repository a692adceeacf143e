// Draw a time axis and rows of lanes with spans on a canvas.

import { plain } from "./dom.js";
import { resolved } from "./colours.js";
import { Strips } from "./strips.js";

export const AXIS = 26; // pixels
const MAX_WIDTHS = 20000; // texts whose widths are cached
const ROW_GAP = 10;
const LANE_GAP = 2;
const HAIR = 0.6; // pixels between neighbours
const MARK = 2.5; // pixels of the line that marks the critical path
const NARROW = 4; // pixels: narrower spans are drawn as pixels
const widths = new Map();
const UNITS = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "us"],
  [1e-9, "ns"],
];

/**
 * @typedef {Object} Lane
 * @property {import("./spans.js").Spans} spans
 * @property {number} height
 * @property {(i: number) => string} colour the variable of a span's colour
 * @property {(i: number) => string} text the label of a span
 * @property {(i: number) => import("./hint.js").Hint} hint
 * @property {number} [y] from the top of the chart; set by `place`
 * @property {number} [end] of its row; set by `place`
 *
 * @typedef {Object} Row
 * @property {string} label
 * @property {string} [note]
 * @property {string} [tone] "measured"
 * @property {number} [end] of its step, if it differs from the chart's
 * @property {Lane[]} lanes
 * @property {number} [y]
 * @property {number} [height]
 */

/** Place rows and lanes and return the total height. @param {Row[]} rows */
export function place(rows) {
  let y = ROW_GAP / 2;
  for (const row of rows) {
    row.y = y;
    for (const lane of row.lanes) {
      lane.y = y;
      lane.end = row.end;
      y += lane.height + LANE_GAP;
    }
    row.height = y - row.y - LANE_GAP;
    y += ROW_GAP;
  }
  return y;
}

/** Resize a canvas to CSS pixels so that it is sharp on every screen; return its cleared context. */
export function sharp(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio || 1, 3);
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The times of ticks, about 100 pixels apart, and a function that formats them. */
export function ticks(view, width) {
  const rough = ((view.to - view.from) / Math.max(1, width)) * 100;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? rough;
  const [unit, name] = UNITS.find(([u]) => Math.max(Math.abs(view.to), step) >= u) ?? UNITS.at(-1);
  const digits = Math.max(0, Math.min(6, -Math.floor(Math.log10(step / unit) + 1e-9)));
  const times = [];
  for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to; i++) times.push(i * step);
  return {
    times,
    write: (t) => (Math.abs(t) < step / 2 ? "0" : `${(t / unit).toFixed(digits)} ${name}`),
  };
}

/** Draw the axis, with a bar for the visible part of the step. */
export function drawAxis(canvas, view, extent, width) {
  const c = sharp(canvas, width, AXIS);
  const { times, write } = ticks(view, width);
  c.font = "11px " + getComputedStyle(canvas).fontFamily;
  c.textBaseline = "middle";
  c.fillStyle = resolved("--soft");
  for (const time of times) {
    const x = (time - view.from) * view.scale;
    const text = write(time);
    const wide = c.measureText(text).width;
    c.fillText(text, Math.min(Math.max(0, x - (time === 0 ? 0 : wide / 2)), width - wide), 10);
  }
  c.fillStyle = resolved("--line");
  c.fillRect(0, AXIS - 4, width, 2);
  c.fillStyle = resolved("--accent");
  const from = (view.from / extent) * width;
  c.fillRect(from, AXIS - 4, Math.max(3, ((view.to - view.from) / extent) * width), 2);
}

/**
 * Draw all rows.
 * @param {HTMLCanvasElement} canvas @param {Row[]} rows
 * @param {{from: number, to: number, scale: number}} view
 * @param {{width: number, height: number, end: number, critical: string}} options
 */
export function drawRows(canvas, rows, view, options) {
  const { width, height } = options;
  const c = sharp(canvas, width, height);
  const font = getComputedStyle(canvas).fontFamily;
  const ink = {
    on: resolved("--on-colour"),
    dark: resolved("--on-light"),
    line: resolved("--line"),
    mark: resolved("--critical"),
  };
  c.fillStyle = ink.line;
  c.globalAlpha = 0.5;
  for (const time of ticks(view, width).times)
    c.fillRect(Math.round((time - view.from) * view.scale), 0, 1, height);
  c.globalAlpha = 1;
  const lanes = rows.flatMap((row) => row.lanes);
  const strips = new Strips(width, 2 * lanes.length); // of spans, and of their marks
  lanes.forEach((lane, line) => {
    c.fillStyle = resolved("--idle");
    const end = ((lane.end ?? options.end) - view.from) * view.scale;
    c.fillRect(0, lane.y, Math.max(0, Math.min(width, end)), lane.height);
    drawLane(c, lane, view, {
      ...options,
      ink,
      font,
      paint: (...pixels) => strips.paint(line, ...pixels),
      mark: (...pixels) => strips.paint(lanes.length + line, ...pixels),
    });
  });
  strips.draw(c, [
    ...lanes,
    ...lanes.map((lane) => ({ y: lane.y + lane.height - MARK, height: MARK })),
  ]);
}

function drawLane(c, lane, view, { width, critical, ink, font, paint, mark }) {
  const size = Math.min(11.5, lane.height - 5);
  c.font = `${size}px ${font}`;
  c.textBaseline = "middle";
  lane.spans.visit(view, (x, w, i, fill, marked) => {
    const variable = lane.colour(i);
    const faded = critical === "only" && !marked ? 0.22 : 1;
    if (w < NARROW) {
      // Align to pixels: spans that share a pixel would mix their colours.
      const left = Math.round(x);
      const right = Math.max(left + 1, Math.round(x + w));
      paint(left, right, resolved(variable), faded * (0.25 + 0.75 * fill));
      if (marked && critical !== "off") mark(left, right, ink.mark, 1);
      return;
    }
    const left = Math.max(0, x);
    const right = Math.min(width, x + w);
    c.fillStyle = resolved(variable);
    c.globalAlpha = faded;
    c.fillRect(left, lane.y, right - left - HAIR, lane.height);
    if (marked && critical !== "off") {
      c.globalAlpha = 1;
      c.fillStyle = ink.mark;
      c.fillRect(left, lane.y + lane.height - MARK, right - left, MARK);
    }
    if (right - left > 14 && lane.height >= 13) {
      c.globalAlpha = faded === 1 ? 1 : 0.5;
      write(
        c,
        lane.text(i),
        left,
        right - HAIR,
        lane.y + lane.height / 2 + 0.5,
        size,
        ink,
        variable,
      );
    }
  });
  c.globalAlpha = 1;
}

/** The displayed form of a text and its width. */
function measured(c, text, size) {
  const key = `${size} ${text}`;
  let entry = widths.get(key);
  if (!entry) {
    const shown = plain(text, 60);
    if (widths.size > MAX_WIDTHS) widths.clear();
    widths.set(key, (entry = [shown, c.measureText(shown).width]));
  }
  return entry;
}

/** Write a text in the middle of its span, shortened if necessary. */
function write(c, text, left, right, y, size, ink, variable) {
  if (!text) return;
  const room = right - left - 1;
  const [full, width] = measured(c, text, size);
  const letters = Math.floor((room / width) * full.length) - 1;
  if (width > room && letters < 2) return;
  const shown = width > room ? `${full.slice(0, letters)}…` : full;
  c.fillStyle = PALE.has(variable) ? ink.dark : ink.on;
  c.fillText(shown, left + (right - left - Math.min(width, room)) / 2, y);
}

const PALE = new Set([
  "--c-backward",
  "--c-recompute",
  "--c-waiting",
  "--c-send",
  "--c-gather",
  "--c-backward-2",
  "--c-forward-2",
  "--c-weight-2",
]);
