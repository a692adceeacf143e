// Poll the server for new data and show it. The data has only text and numbers.

import { Chart, shape } from "./chart.js";
import { bytes, count, duration, plain, rate, seconds } from "./format.js";

const percent = (v) => `${(v * 100).toFixed(1)}%`;
const POLL_MS = 1000, IDLE_POLL_MS = 5000, SLOW = 1.1;
const FIGURES = {
  loss: ["Loss", plain], tokens_per_s: ["Tokens per second", rate], samples_per_s: ["Samples per second", rate],
  step_s: ["Step time", seconds], memory_bytes: ["Memory of rank 0", bytes], gradient_norm: ["Gradient norm", plain],
  learning_rate: ["Learning rate", plain], mfu: ["Model FLOPs utilization", percent],
  staleness: ["Staleness in steps", plain], compression_error: ["Part of messages omitted by compression", percent],
};
const byId = (id) => document.getElementById(id);
const charts = new Map();
let series = { generation: -1, width: 0, step: [], columns: {} };

function merge(data) {
  const { from, width, step, ...columns } = data.history;
  const first = data.generation === series.generation && width === series.width ? from : 0;
  series.step = [...series.step.slice(0, first), ...step];
  for (const [name, column] of Object.entries(columns)) {
    const before = series.columns[name] ?? { mean: Array(first).fill(null), min: Array(first).fill(null), max: Array(first).fill(null) };
    for (const part of ["mean", "min", "max"]) before[part] = [...before[part].slice(0, first), ...column[part]];
    series.columns[name] = before;
  }
  for (const name of Object.keys(series.columns)) if (!(name in columns)) delete series.columns[name];
  series.generation = data.generation;
  series.width = width;
}

function text(id, value) {
  const place = byId(id);
  if (place.textContent !== value) place.textContent = value;
}

function showProgress(data) {
  text("title", data.title);
  document.title = `${data.step}${data.total ? `/${data.total}` : ""} ${data.title}`.slice(0, 120);
  text("folder", data.folder);
  text("status", data.status);
  byId("status").dataset.state = data.state;
  const bar = byId("progress");
  bar.hidden = data.total === null;
  if (data.total !== null) bar.value = Math.min(1, data.step / data.total);
  const of = data.total === null ? "" : ` of ${count(data.total)}`;
  const left = data.seconds_left === null ? "" : `, about ${duration(data.seconds_left)} left`;
  const skipped = data.skipped ? `, ${count(data.skipped)} steps skipped` : "";
  text("progress-text", `step ${count(data.step)}${of}, epoch ${count(data.epoch)}${left}${skipped}`);
}

function cardRows(data) {
  const now = data.latest, rows = [];
  const add = (name, value, note = "") => rows.push([name, value, note]);
  if ("loss" in now) add("loss", now.loss === null ? "not a number" : plain(now.loss));
  if (now.evaluation_loss !== undefined && now.evaluation_loss !== null) add("evaluation loss", plain(now.evaluation_loss));
  if (now.tokens_per_s !== undefined && now.tokens_per_s !== null) add("tokens/s", rate(now.tokens_per_s));
  else if (now.samples_per_s !== undefined && now.samples_per_s !== null) add("samples/s", rate(now.samples_per_s));
  if (data.step_s !== null) {
    const predicted = data.predicted_step_s;
    const guess = data.guess ? ", an estimate" : "";
    add("step time", seconds(data.step_s), predicted ? `${(data.step_s / predicted).toFixed(2)} times the predicted ${seconds(predicted)}${guess}` : "");
  }
  const memory = data.ranks?.memory_bytes;
  if (memory) add("memory", bytes(memory.max), data.ranks.ranks > 1 ? `maximum of ${count(data.ranks.ranks)} ranks; minimum ${bytes(memory.min)}` : "");
  else if (now.memory_bytes) add("memory", bytes(now.memory_bytes));
  const load = data.ranks?.expert_load;
  if (load) add("load of experts", load.max.toFixed(2), "most loaded rank, relative to the mean");
  if (now.learning_rate !== undefined && now.learning_rate !== null) add("learning rate", plain(now.learning_rate));
  if (now.gradient_norm !== undefined && now.gradient_norm !== null) add("gradient norm", plain(now.gradient_norm));
  if (now.staleness !== undefined && now.staleness !== null) add("staleness", `${count(now.staleness)} steps`);
  if (now.compression_error !== undefined && now.compression_error !== null) add("omitted by compression", percent(now.compression_error));
  return rows;
}

function showCards(data) {
  const list = byId("cards");
  const rows = cardRows(data);
  while (list.children.length > rows.length) list.lastElementChild.remove();
  rows.forEach(([name, value, note], i) => {
    let card = list.children[i];
    if (!card) {
      card = document.createElement("div");
      const about = document.createElement("dd");
      about.className = "note";
      card.append(document.createElement("dt"), document.createElement("dd"), about);
      list.append(card);
    }
    [name, value, note].forEach((part, k) => {
      if (card.children[k].textContent !== part) card.children[k].textContent = part;
    });
    card.children[2].hidden = !note;
  });
}

function showCharts(data) {
  const shown = Object.keys(FIGURES).filter((name) => name in series.columns && !(name === "samples_per_s" && "tokens_per_s" in series.columns));
  for (const [name, chart] of charts) {
    if (!shown.includes(name)) {
      chart.figure.remove();
      charts.delete(name);
    }
  }
  for (const name of shown) {
    if (!charts.has(name)) {
      const chart = new Chart(...FIGURES[name]);
      chart.figure.dataset.name = name;
      charts.set(name, chart);
      const after = shown.slice(shown.indexOf(name) + 1).find((other) => charts.has(other));
      byId("charts").insertBefore(chart.figure, after ? charts.get(after).figure : null);
    }
    const dots = name === "loss" ? evaluations(data) : [];
    charts.get(name).show(series.step, series.columns[name], dots, name === "step_s" && data.predicted_step_s && !data.guess ? data.predicted_step_s : null);
  }
}

function evaluations(data) {
  const losses = data.evaluations.evaluation_loss;
  if (!losses) return [];
  return data.evaluations.step.map((step, i) => [step, losses.mean[i]]).filter((dot) => dot[1] !== null);
}

function showRanks(ranks) {
  if (!ranks) return;
  const slow = ranks.slowest.filter((row) => row.ratio >= SLOW);
  const slowText = slow.length ? `slow: ${slow.slice(0, 5).map((row) => `rank ${row.rank} (${row.ratio.toFixed(2)}x)`).join(", ")}` : "no rank is slow";
  text("ranks-text", ranks.ranks === 1
    ? `One rank works ${seconds(ranks.own_s.max)} in a step of ${seconds(ranks.step_s.max)}.`
    : `At step ${count(ranks.step)}, ${count(ranks.ranks)} ranks work from ${seconds(ranks.own_s.min)} to ${seconds(ranks.own_s.max)} in a step of ${seconds(ranks.step_s.max)}; ${slowText}.`);
  byId("ranks-table").hidden = ranks.ranks === 1;
  byId("ranks-rows").replaceChildren(...ranks.slowest.map((row) => {
    const line = document.createElement("tr");
    line.className = row.ratio >= SLOW ? "slow" : "";
    for (const value of [row.rank, seconds(row.own_s), `${row.ratio.toFixed(2)}x`, bytes(row.memory_bytes)]) {
      const cell = document.createElement("td");
      cell.textContent = value;
      line.append(cell);
    }
    return line;
  }));
  showBars(ranks);
}

function showBars(ranks) {
  const times = ranks.each?.own_s;
  if (!times || times.length < 2) {
    byId("ranks-bars").replaceChildren();
    return;
  }
  const slow = new Set(ranks.slowest.filter((row) => row.ratio >= SLOW).map((row) => row.rank));
  const longest = Math.max(...times) || 1, width = 600 / times.length;
  const svg = shape("svg", { viewBox: "0 0 600 120", preserveAspectRatio: "none", role: "img", "aria-label": `Own work of ${times.length} ranks, in order; the table lists the slowest` });
  times.forEach((value, rank) => {
    const height = (value / longest) * 108;
    const bar = shape("rect", { class: slow.has(rank) ? "bar slow" : "bar", x: rank * width + width * 0.1, width: width * 0.8, y: 120 - height, height });
    const title = shape("title", {});
    title.textContent = `rank ${rank}: ${seconds(value)}`;
    bar.append(title);
    svg.append(bar);
  });
  byId("ranks-bars").replaceChildren(svg);
}

function show(data) {
  if (data.error) {
    text("status", data.error);
    byId("status").dataset.state = "failed";
    return;
  }
  merge(data);
  showProgress(data);
  showCards(data);
  showCharts(data);
  showRanks(data.ranks);
}

async function poll() {
  let wait = document.hidden ? IDLE_POLL_MS : POLL_MS;
  try {
    const since = new URLSearchParams({ generation: Math.max(0, series.generation), width: series.width, from: Math.max(0, series.step.length - 1) });
    const response = await fetch(`/data?${since}`, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    const data = await response.json();
    show(data);
    if (data.ended) wait = IDLE_POLL_MS;
  } catch {
    text("status", "the server does not respond; the data is out of date");
    byId("status").dataset.state = "silent";
    wait = IDLE_POLL_MS;
  }
  setTimeout(poll, wait);
}

const THEMES = [["", "system"], ["light", "light"], ["dark", "dark"]];
let theme = 0;
byId("theme").addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  document.documentElement.dataset.theme = THEMES[theme][0];
  byId("theme").textContent = `Theme: ${THEMES[theme][1]}`;
});
addEventListener("resize", () => {
  for (const chart of charts.values()) chart.show(chart.steps, chart.column, chart.dots, chart.predicted);
});
poll();
