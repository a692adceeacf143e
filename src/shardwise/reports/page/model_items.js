// Modules, parameters and operations as items of a tree, and the search for them.

import { barCell } from "./bars.js";
import { el, name } from "./dom.js";
import { count, plural, seconds, size } from "./format.js";

export const MAX_HITS = 300; // rows that a search shows
const CHUNK = 200; // operations that are shown together
const MAX_NAME = 120; // characters of a name in a cell
const OPEN_ROWS = 30; // about as many as the tree shows at first

/** The rows of the data as items of a tree. */
export class Model {
  constructor(data) {
    this.rows = data.rows;
    this.nodes = data.nodes ?? { module: [] };
    this.sources = data.sources ?? [];
    this.below = this.groups(this.rows.map((r) => r.parent ?? -1));
    this.parameters = this.groups((data.parameters ?? []).map((p) => p.module));
    this.list = data.parameters ?? [];
    this.operations = this.groups(this.nodes.module);
    const tops = this.rows.filter((r) => r.parent === null || r.parent === undefined);
    const largest = (f) => Math.max(...tops.map(f), Number.MIN_VALUE);
    this.largest = {
      bytes: largest((r) => r.parameter_bytes),
      activations: largest((r) => r.activation_bytes),
      time: largest((r) => r.forward_s + r.backward_s),
      communication: largest((r) => r.communication_s),
      synced: largest((r) => r.sync_s ?? 0),
    };
    this.syncs = this.rows.some((r) => r.sync_s > 0);
    this.byId = new Map(this.rows.map((r) => [r.id, r]));
    this.copies = new Map(); // number of each module in the model: figures are per module
    for (const r of this.rows)
      this.copies.set(r.id, (r.count ?? 1) * (this.copies.get(r.parent) ?? 1));
  }

  /** Indices by the value of a column. @param {number[]} keys @returns {Map<number, number[]>} */
  groups(keys) {
    const result = new Map();
    keys.forEach((key, i) => (result.has(key) ? result.get(key).push(i) : result.set(key, [i])));
    return result;
  }

  roots(only = null) {
    return (this.below.get(-1) ?? [])
      .filter((i) => !only || only.rows.has(this.rows[i].id))
      .map((i) => this.module(i, 1, only));
  }

  parents() {
    return this.rows.filter((r) => this.below.has(r.id)).map((r) => `m${r.id}`);
  }

  /** The modules that are open at first: from the top until there are enough rows. */
  opening() {
    const result = [];
    let level = this.below.get(-1) ?? [];
    let shown = level.length;
    while (level.length) {
      const next = [];
      for (const i of level) {
        const below = this.below.get(this.rows[i].id) ?? [];
        if (!below.length || (shown > 1 && shown + below.length > OPEN_ROWS)) continue;
        shown += below.length;
        result.push(`m${this.rows[i].id}`);
        next.push(...below);
      }
      level = next;
    }
    return result;
  }

  module(i, level, only) {
    const row = this.rows[i];
    const modules = (this.below.get(row.id) ?? []).filter(
      (j) => !only || only.rows.has(this.rows[j].id),
    );
    const parameters = (this.parameters.get(row.id) ?? []).filter(
      (j) => !only || only.parameters.has(j),
    );
    const operations = (this.operations.get(row.id) ?? []).filter(
      (j) => !only || only.operations.has(j),
    );
    return {
      key: `m${row.id}`,
      level,
      label: `${row.name}, ${row.kind}`,
      kind: "module",
      parent: modules.length + parameters.length + operations.length > 0,
      children: () => [
        ...modules.map((j) => this.module(j, level + 1, only)),
        ...parameters.map((j) => this.parameter(j, level + 1)),
        ...this.someOperations(row, operations, level + 1, modules.length > 0 && !only),
      ],
      cells: () => this.moduleCells(row),
    };
  }

  moduleCells(row) {
    const { largest } = this;
    const copies = this.copies.get(row.id);
    const title = heading(
      name(row.name || "(model)", "strong", MAX_NAME),
      name(row.kind, "soft", MAX_NAME),
      row.count > 1
        ? el("span", {
            class: "count",
            text: `×${row.count}`,
            title: "equal modules; figures are per module, bars are for all of them",
          })
        : null,
      row.stages?.length && this.stagesDiffer(row)
        ? el("span", { class: "soft stage", text: stages(row.stages) })
        : null,
    );
    return [
      title,
      layout(row.layout),
      barCell(size(row.parameter_bytes), [
        [(row.parameter_bytes * copies) / largest.bytes, "--c-forward"],
      ]),
      barCell(size(row.activation_bytes), [
        [(row.activation_bytes * copies) / largest.activations, "--c-weight"],
      ]),
      barCell(seconds(row.forward_s + row.backward_s), [
        [(row.forward_s * copies) / largest.time, "--c-forward"],
        [(row.backward_s * copies) / largest.time, "--c-backward"],
      ]),
      barCell(seconds(row.communication_s), [
        [(row.communication_s * copies) / largest.communication, "--c-collectives"],
      ]),
      this.syncs &&
        barCell(seconds(row.sync_s), [[(row.sync_s * copies) / largest.synced, "--c-reduce"]]),
    ].filter(Boolean);
  }

  /** Whether the stages of a module differ from those of its parent. */
  stagesDiffer(row) {
    const above = this.byId.get(row.parent)?.stages;
    return above ? above.join() !== row.stages.join() : row.stages.length > 1;
  }

  parameter(j, level) {
    const p = this.list[j];
    const note = [`[${p.shape.join(", ")}]`, p.dtype, p.zero ? `zero ${p.zero}` : ""]
      .filter(Boolean)
      .join(" ");
    return {
      key: `p${j}`,
      level,
      label: `parameter ${p.name}`,
      parent: false,
      children: () => [],
      kind: "parameter",
      cells: () => [
        heading(tag("param"), name(p.name, "", MAX_NAME), name(note, "soft", MAX_NAME)),
        layout(p.layout),
        el(
          "td",
          { class: "figure" },
          el("span", { text: size(p.local_bytes) }),
          p.local_bytes === p.bytes
            ? null
            : el("small", { class: "soft", text: ` of ${size(p.bytes)}` }),
        ),
        ...this.blank(3),
      ],
    };
  }

  /** Empty cells for columns without a figure. */
  blank(count) {
    return Array.from({ length: count + (this.syncs ? 1 : 0) }, () => el("td"));
  }

  /** Operations, in a separate group if there are modules next to them. */
  someOperations(row, indices, level, apart) {
    if (!indices.length) return [];
    if (apart)
      return [this.bundle(`o${row.id}`, plural(indices.length, "operation"), indices, level)];
    if (indices.length <= CHUNK) return indices.map((j) => this.operation(j, level));
    const chunks = [];
    for (let i = 0; i < indices.length; i += CHUNK) {
      const some = indices.slice(i, i + CHUNK);
      chunks.push(
        this.bundle(
          `o${row.id}.${i}`,
          `operations ${count(i + 1)} to ${count(i + some.length)}`,
          some,
          level,
        ),
      );
    }
    return chunks;
  }

  bundle(key, text, indices, level) {
    return {
      key,
      level,
      label: text,
      parent: true,
      kind: "bundle",
      children: () =>
        indices.length <= CHUNK
          ? indices.map((j) => this.operation(j, level + 1))
          : this.someOperations({ id: key }, indices, level + 1, false),
      cells: () => [
        el("th", { scope: "row" }, el("span", { class: "cell-name soft", text })),
        ...this.blank(5),
      ],
    };
  }

  operation(j, level) {
    const n = this.nodes;
    const source = n.source?.[j] >= 0 ? this.sources[n.source[j]] : null;
    return {
      key: `n${j}`,
      level,
      label: `operation ${n.name[j]}, ${n.op[j]}`,
      parent: false,
      children: () => [],
      kind: "operation",
      cells: () => [
        heading(
          tag("op"),
          name(n.name[j], "", MAX_NAME),
          name(n.op[j], "soft", MAX_NAME),
          source
            ? el("span", { class: "soft source" }, name(`${source.file}:${source.line}`, "", MAX_NAME))
            : null,
        ),
        layout(n.layout[j]),
        el("td"),
        el("td", { class: "figure", text: size(n.bytes[j]) }),
        el("td", { class: "figure", text: seconds(n.forward_s[j] + n.backward_s[j]) }),
        el("td", { class: "figure", text: seconds(n.communication_s[j]) }),
        ...this.blank(0),
      ],
    };
  }

  /** Items that contain the text, with all modules above them. */
  search(text) {
    const has = (...values) => values.some((v) => v && v.toLowerCase().includes(text));
    const hits = {
      rows: new Set(),
      parameters: new Set(),
      operations: new Set(),
      open: new Set(),
      total: 0,
    };
    const include = (id, open) => {
      for (
        let row = this.byId.get(id), own = open;
        row;
        row = this.byId.get(row.parent), own = true
      ) {
        if (own) hits.open.add(`m${row.id}`);
        hits.rows.add(row.id);
      }
    };
    const addHit = (set, value, id) => {
      hits.total += 1;
      if (hits.total > MAX_HITS) return;
      set.add(value);
      include(id, set !== hits.rows);
    };
    for (const r of this.rows) if (has(r.name, r.path, r.kind)) addHit(hits.rows, r.id, r.id);
    this.list.forEach((p, j) => has(p.name, p.path) && addHit(hits.parameters, j, p.module));
    this.nodes.module.forEach(
      (id, j) => has(this.nodes.name[j], this.nodes.op[j]) && addHit(hits.operations, j, id),
    );
    return hits;
  }
}

/** The first cell of a row, with its name. */
function heading(...parts) {
  return el("th", { scope: "row" }, el("span", { class: "cell-name" }, ...parts));
}

function tag(text) {
  return el("span", { class: "tag", text });
}

function layout(text) {
  return el("td", { class: "layout" }, text ? name(text, "", MAX_NAME) : null);
}

function stages(list) {
  const last = list.at(-1);
  const run = list.length > 2 && last - list[0] === list.length - 1;
  return list.length === 1
    ? `stage ${list[0]}`
    : `stages ${run ? `${list[0]}–${last}` : list.slice(0, 8).join(", ") + (list.length > 8 ? "…" : "")}`;
}
