// Hints about the element under the pointer or with the focus: a tooltip, and text for screen readers.

import { el, name, plain } from "./dom.js";

const box = document.getElementById("hint");
const spoken = document.getElementById("spoken");
const GAP = 14; // pixels between the pointer and the tooltip
let shown = null;
let middle = { x: innerWidth / 2, y: innerHeight / 2 };

/**
 * @typedef {Object} Hint
 * @property {string} title
 * @property {[string, string][]} lines names and figures
 */

/** Show a hint at a point of the window. @param {Hint} hint @param {number} x @param {number} y */
export function show(hint, x, y) {
  if (hint !== shown) {
    shown = hint;
    box.replaceChildren(
      el("strong", {}, name(hint.title)),
      el(
        "dl",
        {},
        ...hint.lines.flatMap(([key, value]) => [
          el("dt", { text: key }),
          el("dd", {}, name(value)),
        ]),
      ),
    );
    box.style.visibility = "visible"; // unlike display, this causes no layout
  }
  // Towards the middle of the window, where there is space without measuring anything.
  const left = x > middle.x ? `calc(${x - GAP}px - 100%)` : `${x + GAP}px`;
  const top = y > middle.y ? `calc(${y - GAP}px - 100%)` : `${y + GAP}px`;
  box.style.transform = `translate(${left}, ${top})`;
}

/** Hide the hint. */
export function hide() {
  shown = null;
  box.style.visibility = "hidden";
}

/** Announce a text to screen readers. @param {string} text */
export function say(text) {
  spoken.textContent = plain(text);
}

/** A hint as one sentence. @param {Hint} hint */
export function sentence(hint) {
  return [plain(hint.title, 120), ...hint.lines.map(([key, value]) => `${key} ${value}`)].join(
    ", ",
  );
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
addEventListener("resize", () => (middle = { x: innerWidth / 2, y: innerHeight / 2 }));
addEventListener("scroll", hide, { passive: true, capture: true });
