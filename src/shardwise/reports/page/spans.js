// Spans of time in a lane, with search and drawing that skip invisible spans.

/**
 * @typedef {Object} Columns
 * @property {number[]} start
 * @property {number[]} end
 * @property {number[]} kind
 * @property {number[]} [name]
 * @property {number[]} [critical]
 */

/** The first index at which a sorted array exceeds a value. */
function above(values, value, from = 0) {
  let low = from;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Columns sorted by start. @param {Columns} columns */
function ordered(columns) {
  const { start } = columns;
  if (start.every((value, i) => i === 0 || start[i - 1] <= value)) return columns;
  const order = start.map((_, i) => i).sort((a, b) => start[a] - start[b] || a - b);
  return Object.fromEntries(
    Object.entries(columns).map(([key, values]) => [
      key,
      Array.isArray(values) ? order.map((i) => values[i]) : values,
    ]),
  );
}

/** The spans of one lane, sorted by start. */
export class Spans {
  /** @param {Columns} columns */
  constructor(columns) {
    const sorted = ordered(columns);
    this.length = sorted.start.length;
    this.start = Float64Array.from(sorted.start);
    this.end = Float64Array.from(sorted.end);
    this.kind = sorted.kind;
    this.name = sorted.name ?? [];
    this.critical = sorted.critical ?? [];
    this.columns = sorted;
    this.reach = new Float64Array(this.length); // the latest end up to each span, sorted
    this.busy = new Float64Array(this.length + 1); // seconds of all earlier spans
    this.marked = new Uint32Array(this.length + 1); // number of earlier critical spans
    let latest = -Infinity;
    for (let i = 0; i < this.length; i++) {
      latest = Math.max(latest, this.end[i]);
      this.reach[i] = latest;
      this.busy[i + 1] = this.busy[i] + this.end[i] - this.start[i];
      this.marked[i + 1] = this.marked[i] + (this.critical[i] ? 1 : 0);
    }
  }

  /** The span at a time, or the closest within a tolerance, or -1. */
  at(time, tolerance = 0) {
    const last = above(this.start, time + tolerance) - 1;
    let best = -1;
    let distance = tolerance;
    for (
      let i = last, steps = 0;
      i >= 0 && this.reach[i] >= time - tolerance && steps < 2000;
      i--, steps++
    ) {
      if (this.start[i] <= time && time < this.end[i]) return i;
      const away = time < this.start[i] ? this.start[i] - time : time - this.end[i];
      if (away >= 0 && away <= distance) {
        distance = away;
        best = i;
      }
    }
    return best;
  }

  /** The first span that ends after a time. */
  firstAfter(time) {
    return above(this.reach, time);
  }

  /**
   * Call `draw(x, width, index, fill, critical)` for all visible spans. Spans narrower than a pixel
   * are drawn together, so that the number of calls is limited to a few per pixel.
   * @param {{from: number, to: number, scale: number}} view `scale` is pixels per second
   */
  visit(view, draw) {
    const { from, to, scale } = view;
    const pixel = 1 / scale;
    let i = above(this.reach, from);
    while (i < this.length && this.start[i] < to) {
      const x = (this.start[i] - from) * scale;
      const width = (this.end[i] - this.start[i]) * scale;
      if (width >= 1) {
        draw(x, width, i, 1, this.critical[i] === 1);
        i += 1;
        continue;
      }
      const edge = from + (Math.floor(x) + 1) * pixel;
      let j = Math.max(i + 1, above(this.start, edge, i + 1));
      if (j - 1 > i && this.end[j - 1] - this.start[j - 1] >= pixel) j -= 1; // wide enough to be drawn separately
      const fill = (this.busy[j] - this.busy[i]) * scale;
      draw(Math.floor(x), 1, (i + j) >> 1, Math.min(1, fill), this.marked[j] > this.marked[i]);
      i = j;
    }
  }
}
