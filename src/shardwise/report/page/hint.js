// What the pointer or the keyboard is at: one box beside the pointer, one line for screen readers.

import { el, name, plain } from "./dom.js";

const box = document.getElementById("hint");
const spoken = document.getElementById("spoken");
const GAP = 14; // pixels between the pointer and the box
let width = 0;
let height = 0;
let shown = null;

/**
 * @typedef {Object} Hint
 * @property {string} title
 * @property {[string, string][]} lines names and figures
 */

/** Show a hint at a place of the window. @param {Hint} hint @param {number} x @param {number} y */
export function show(hint, x, y) {
  if (hint !== shown) {
    shown = hint;
    box.replaceChildren(
      el("strong", {}, name(hint.title)),
      el("dl", {}, ...hint.lines.flatMap(([key, value]) => [el("dt", { text: key }), el("dd", {}, name(value))])));
    box.hidden = false;
    ({ offsetWidth: width, offsetHeight: height } = box);
  }
  const left = x + GAP + width > innerWidth ? Math.max(4, x - GAP - width) : x + GAP;
  const top = y + GAP + height > innerHeight ? Math.max(4, y - GAP - height) : y + GAP;
  box.style.transform = `translate(${left}px, ${top}px)`;
}

/** Hide it. */
export function hide() {
  shown = null;
  box.hidden = true;
}

/** Say a text to those who hear the page. @param {string} text */
export function say(text) {
  spoken.textContent = plain(text);
}

/** A hint as one sentence. @param {Hint} hint */
export function sentence(hint) {
  return [plain(hint.title, 120), ...hint.lines.map(([key, value]) => `${key} ${value}`)].join(", ");
}

/**
 * Show a hint while the pointer is over an element or it has the focus.
 * @param {HTMLElement} node @param {() => Hint} make
 */
export function explain(node, make) {
  let made = null;
  const hint = () => (made ??= make());
  node.addEventListener("pointermove", (e) => show(hint(), e.clientX, e.clientY));
  node.addEventListener("pointerleave", hide);
  node.addEventListener("blur", hide);
  node.addEventListener("focus", () => {
    if (!node.matches(":focus-visible")) return;
    const at = node.getBoundingClientRect();
    show(hint(), at.left + Math.min(at.width, 40), at.bottom);
    say(sentence(hint()));
  });
}

addEventListener("keydown", (e) => {
  if (e.key === "Escape") hide();
});
addEventListener("scroll", hide, { passive: true, capture: true });
