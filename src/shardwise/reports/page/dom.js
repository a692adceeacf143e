// Elements from plain data. Text is only inserted as text: this page does not use innerHTML.

const MAX_NAME = 400; // characters of a name; longer ones are cut and show their length
const MAX_TITLE = 2000; // characters of a name in its tooltip
const SVG = "http://www.w3.org/2000/svg";
// Control characters and those that change the direction of text are shown by number.
const HIDDEN =
  /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2028\u2029\u2060-\u2069\ufeff]/g;

/**
 * @typedef {Object} Props
 * @property {string} [class]
 * @property {string} [text]
 * @property {Object<string, string|number>} [style]
 * @property {Object<string, (event: any) => void>} [on]
 */

/**
 * An element; other properties are its attributes.
 * @param {string} tag
 * @param {Props & Object<string, any>} [props]
 * @param {...(Node|string|null|undefined|false)} children
 * @returns {HTMLElement}
 */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An element of SVG. @returns {SVGElement} */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || (value === false && !key.startsWith("aria-")))
      continue;
    if (key === "text") node.textContent = value;
    else if (key === "style")
      for (const [name, v] of Object.entries(value)) node.style.setProperty(name, String(v));
    else if (key === "on")
      for (const [name, f] of Object.entries(value)) node.addEventListener(name, f);
    else node.setAttribute(key, value === true && !key.startsWith("aria-") ? "" : String(value));
  }
  for (const child of children) if (child) node.append(child);
  return node;
}

/**
 * A text of unknown origin in a form that can be shown on one line.
 * @param {string} text @param {number} [limit]
 */
export function plain(text, limit = MAX_NAME) {
  const full = String(text);
  const shown =
    full.length > limit
      ? `${full.slice(0, limit)}… (${full.length.toLocaleString("en")} characters)`
      : full;
  return shown.replace(
    HIDDEN,
    (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
}

/**
 * A name, isolated from the direction of the text around it; its tooltip shows more if it is cut.
 * @param {string} text @param {string} [kind] @param {number} [limit] characters
 */
export function name(text, kind = "", limit = MAX_NAME) {
  const title = String(text).length > limit ? plain(text, MAX_TITLE) : null;
  return el("bdi", { class: kind || null, title, text: plain(text, limit) });
}

/** A name in the typeface of code. @param {string} text */
export function code(text) {
  return el("code", {}, name(text));
}

/** A cell of figures. @param {string} text @param {Props & Object<string, any>} [props] */
export function figure(text, props = {}) {
  return el("td", { ...props, class: `figure ${props.class ?? ""}`, text });
}

/** The head of a column. @param {string} text @param {string} [kind] */
export function head(text, kind = "") {
  return el("th", { scope: "col", class: kind || null, text });
}

/**
 * A table with heads and a caption for screen readers.
 * @param {string} caption @param {(string|[string, string])[]} heads @param {HTMLElement[]} rows @param {string} [kind]
 */
export function table(caption, heads, rows, kind = "") {
  const cells = heads.map((h) => (Array.isArray(h) ? head(h[0], h[1]) : head(h)));
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      { class: kind },
      el("caption", { class: "unseen", text: caption }),
      el("thead", {}, el("tr", {}, ...cells)),
      el("tbody", {}, ...rows),
    ),
  );
}

/**
 * A row of buttons, one of which is pressed.
 * @param {string} label @param {{value: string, text: string}[]} choices @param {string} chosen
 * @param {(value: string) => void} change
 */
export function choice(label, choices, chosen, change) {
  const buttons = choices.map(({ value, text }) =>
    el("button", {
      type: "button",
      "aria-pressed": value === chosen,
      "data-value": value,
      text,
      on: {
        click: () => {
          for (const b of buttons)
            b.setAttribute("aria-pressed", String(b.dataset.value === value));
          change(value);
        },
      },
    }),
  );
  return el("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
}

/**
 * Details behind a summary; their content is created when they are first opened.
 * With `data-print` they are open on paper.
 */
export function unfold(summary, make, props = {}) {
  const box = el("details", { class: "unfold", ...props }, el("summary", { text: summary }));
  const open = () => {
    if (box.open && box.childElementCount === 1) box.append(make());
  };
  box.addEventListener("toggle", open);
  if (props["data-print"]) {
    let before = false;
    addEventListener("beforeprint", () => {
      before = box.open;
      box.open = true;
      open(); // the toggle event would come after the printing
    });
    addEventListener("afterprint", () => (box.open = before));
  }
  return box;
}
