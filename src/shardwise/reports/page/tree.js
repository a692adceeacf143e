// A tree with columns: a treegrid that follows the ARIA authoring practices.

import { el, plain } from "./dom.js";

/**
 * @typedef {Object} Item
 * @property {string} key
 * @property {number} level from 1
 * @property {() => Item[]} children
 * @property {boolean} parent whether it has children
 * @property {() => HTMLElement[]} cells of the columns; the toggle is inserted before the first
 * @property {string} [kind] a class of its row
 * @property {string} label for screen readers
 */

/** A treegrid whose rows are created when they first become visible. */
export class Tree {
  /** @param {{label: string, heads: HTMLElement[], roots: Item[]}} options */
  constructor({ label, heads, roots }) {
    this.open = new Set();
    this.rows = []; // {item, node}
    this.current = 0;
    this.bodyNode = el("tbody");
    this.node = el(
      "div",
      { class: "scroll tree" },
      el(
        "table",
        { role: "treegrid", "aria-label": label },
        el("thead", {}, el("tr", { role: "row" }, ...heads)),
        this.bodyNode,
      ),
    );
    this.bodyNode.addEventListener("click", (e) => this.click(e));
    this.bodyNode.addEventListener("keydown", (e) => this.key(e));
    this.show(roots);
  }

  /** Show other roots; those in `open` are expanded. @param {Item[]} roots */
  show(roots) {
    this.roots = roots;
    this.rows = [];
    const collect = (items) => {
      for (const item of items) {
        this.rows.push(this.row(item));
        if (item.parent && this.open.has(item.key)) collect(item.children());
      }
    };
    collect(roots);
    this.bodyNode.replaceChildren(...this.rows.map((r) => r.node));
    this.focusable(0);
  }

  row(item) {
    const open = this.open.has(item.key);
    const cells = item.cells();
    cells[0].style.setProperty("--level", String(item.level - 1));
    cells[0].prepend(
      el("span", { class: `twisty ${item.parent ? "" : "leaf"}`, "aria-hidden": "true" }),
    );
    for (const cell of cells)
      cell.setAttribute("role", cell.tagName === "TH" ? "rowheader" : "gridcell");
    const node = el(
      "tr",
      {
        role: "row",
        tabindex: -1,
        class: item.kind ?? null,
        "aria-level": item.level,
        "aria-expanded": item.parent ? open : null,
        "aria-label": plain(item.label, 200),
      },
      ...cells,
    );
    return { item, node };
  }

  /** Expand or collapse the row at an index. */
  toggle(index, open = !this.open.has(this.rows[index].item.key)) {
    const { item, node } = this.rows[index];
    if (!item.parent || open === this.open.has(item.key)) return;
    node.setAttribute("aria-expanded", String(open));
    if (open) {
      this.open.add(item.key);
      const added = [];
      const collect = (items) => {
        for (const child of items) {
          added.push(this.row(child));
          if (child.parent && this.open.has(child.key)) collect(child.children());
        }
      };
      collect(item.children());
      this.rows.splice(index + 1, 0, ...added);
      node.after(...added.map((r) => r.node));
    } else {
      this.open.delete(item.key);
      let end = index + 1;
      while (end < this.rows.length && this.rows[end].item.level > item.level) end += 1;
      for (const { node: child } of this.rows.splice(index + 1, end - index - 1)) child.remove();
    }
  }

  focusable(index, move = false) {
    const old = this.rows[this.current];
    if (old) old.node.tabIndex = -1;
    this.current = Math.min(Math.max(0, index), this.rows.length - 1);
    const row = this.rows[this.current];
    if (!row) return;
    row.node.tabIndex = 0;
    if (move) row.node.focus();
  }

  index(target) {
    const node = target.closest("tr");
    return this.rows.findIndex((r) => r.node === node);
  }

  click(e) {
    const index = this.index(e.target);
    if (index < 0 || e.target.closest("a, button")) return;
    this.focusable(index, true);
    this.toggle(index);
  }

  key(e) {
    const index = this.index(e.target);
    if (index < 0 || e.ctrlKey || e.metaKey || e.altKey || e.target.closest("a, button")) return;
    const { item } = this.rows[index];
    const open = this.open.has(item.key);
    const above = () => {
      let i = index;
      while (i > 0 && this.rows[i].item.level >= item.level) i -= 1;
      return i;
    };
    const act = {
      ArrowDown: () => this.focusable(index + 1, true),
      ArrowUp: () => this.focusable(index - 1, true),
      Home: () => this.focusable(0, true),
      End: () => this.focusable(this.rows.length - 1, true),
      ArrowRight: () =>
        item.parent && !open
          ? this.toggle(index, true)
          : this.focusable(index + (item.parent ? 1 : 0), true),
      ArrowLeft: () =>
        item.parent && open ? this.toggle(index, false) : this.focusable(above(), true),
      Enter: () => this.toggle(index),
      " ": () => this.toggle(index),
    }[e.key];
    if (!act) return;
    e.preventDefault();
    act();
  }
}
