// A metric over all steps: a line of means and a band of extremes, readable by pointer or arrow keys.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600, HEIGHT = 190, LEFT = 64, RIGHT = 10, TOP = 10, BOTTOM = 24;

export function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export class Chart {
  constructor(name, format) {
    this.name = name;
    this.format = format;
    this.at = null;
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const title = document.createElement("b");
    title.textContent = name;
    this.output = document.createElement("output");
    this.note = document.createElement("small");
    caption.append(title, this.note, this.output);
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", tabindex: "0", role: "img" });
    this.figure.append(caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // column: means, minima and maxima by step; dots: [step, value] of evaluations
  show(steps, column, dots = [], predicted = null) {
    this.steps = steps;
    this.column = column;
    this.dots = dots;
    this.predicted = predicted;
    this.width = Math.max(240, this.svg.clientWidth || WIDTH);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const notes = [dots.length ? "dots: evaluation" : "", predicted === null ? "" : `dashed: predicted ${this.format(predicted)}`];
    this.note.textContent = notes.filter(Boolean).join(", ");
    this.scale();
    this.draw();
  }

  scale() {
    const values = [...this.column.min, ...this.column.max, ...this.dots.map((dot) => dot[1])].filter((v) => v !== null);
    if (this.predicted !== null) values.push(this.predicted);
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (!values.length) [low, high] = [0, 1];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 20, high + (Math.abs(high) || 1) / 20];
    [this.low, this.high] = [low, high];
    const first = this.steps[0] ?? 0, last = this.steps[this.steps.length - 1] ?? 1;
    const inside = this.width - LEFT - RIGHT;
    this.x = (step) => LEFT + (last === first ? inside / 2 : ((step - first) / (last - first)) * inside);
    this.y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  }

  draw() {
    const parts = [];
    for (const value of [this.low, (this.low + this.high) / 2, this.high]) {
      const y = this.y(value);
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      parts.push(label(this.format(value), LEFT - 6, y + 4, "end"));
    }
    const first = this.steps[0], last = this.steps[this.steps.length - 1];
    if (first !== undefined) {
      parts.push(label(`step ${first.toLocaleString("en")}`, LEFT, HEIGHT - 6, "start"));
      if (last !== first) parts.push(label(last.toLocaleString("en"), this.width - RIGHT, HEIGHT - 6, "end"));
    }
    for (const run of this.runs()) {
      if (run.length === 1) {
        parts.push(shape("circle", { class: "single", cx: this.x(this.steps[run[0]]), cy: this.y(this.column.mean[run[0]]), r: 3 }));
        continue;
      }
      const there = run.map((i) => `${this.x(this.steps[i]).toFixed(1)},${this.y(this.column.max[i]).toFixed(1)}`);
      const back = [...run].reverse().map((i) => `${this.x(this.steps[i]).toFixed(1)},${this.y(this.column.min[i]).toFixed(1)}`);
      const means = run.map((i) => `${this.x(this.steps[i]).toFixed(1)},${this.y(this.column.mean[i]).toFixed(1)}`);
      parts.push(shape("polygon", { class: "band", points: [...there, ...back].join(" ") }));
      parts.push(shape("polyline", { class: "line", points: means.join(" ") }));
    }
    if (this.predicted !== null) {
      const y = this.y(this.predicted);
      parts.push(shape("line", { class: "predicted", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
    }
    for (const [step, value] of this.dots) parts.push(shape("circle", { class: "dot", cx: this.x(step), cy: this.y(value), r: 3.5 }));
    this.cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    parts.push(this.cursor);
    this.svg.replaceChildren(...parts);
    this.describe();
    this.choose(this.at);
  }

  // ranges of adjacent points with a value
  runs() {
    const runs = [];
    let open = null;
    this.column.mean.forEach((value, i) => {
      if (value === null) open = null;
      else if (open === null) runs.push((open = [i]));
      else open.push(i);
    });
    return runs;
  }

  describe() {
    const values = this.column.mean.filter((v) => v !== null);
    const now = values.length ? this.format(values[values.length - 1]) : "nothing yet";
    const suffix = this.predicted === null ? "" : `, predicted ${this.format(this.predicted)}`;
    const text = `${this.name}: now ${now}, from ${this.format(this.low)} to ${this.format(this.high)} over ${this.steps.length} points${suffix}`;
    this.svg.setAttribute("aria-label", text);
  }

  point(event) {
    const place = this.svg.getBoundingClientRect();
    const x = ((event.clientX - place.left) / place.width) * this.width;
    let best = null;
    this.steps?.forEach((step, i) => {
      if (best === null || Math.abs(this.x(step) - x) < Math.abs(this.x(this.steps[best]) - x)) best = i;
    });
    this.choose(best);
  }

  key(event) {
    const last = (this.steps?.length ?? 0) - 1;
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || last < 0) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, (this.at ?? last) + move)));
  }

  choose(at) {
    this.at = at !== null && at < (this.steps?.length ?? 0) ? at : null;
    if (this.at === null) {
      this.cursor?.setAttribute("visibility", "hidden");
      this.output.textContent = "";
      return;
    }
    const x = this.x(this.steps[this.at]);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.cursor.setAttribute("visibility", "visible");
    const value = this.column.mean[this.at];
    this.output.textContent = `step ${this.steps[this.at].toLocaleString("en")}: ${value === null ? "not a number" : this.format(value)}`;
  }
}

function label(text, x, y, anchor) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
