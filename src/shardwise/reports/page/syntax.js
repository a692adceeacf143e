// Simple highlighting of Python: keywords, numbers, strings and comments.

import { el, plain } from "./dom.js";

const WORDS = new Set(
  "and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield True False None".split(
    " ",
  ),
);
const TOKEN =
  /(#.*$)|((?:\b[rbfuRBFU]{1,2})?(?:"""|'''))|((?:\b[rbfuRBFU]{1,2})?(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'))|(@[\w.]+)|(\b\d[\w.]*)|([A-Za-z_]\w*)/g;
const MAX_LINE = 2000; // characters of a line that is highlighted

/**
 * The quotes of the string in which each line begins, or "".
 * @param {string[]} lines
 */
export function openings(lines) {
  let open = "";
  return lines.map((line) => {
    const begun = open;
    let remaining = line;
    if (open) {
      const end = remaining.indexOf(open);
      if (end < 0) return begun;
      remaining = remaining.slice(end + 3);
      open = "";
    }
    for (const [text, comment, quotes] of remaining.matchAll(TOKEN)) {
      if (comment) break;
      if (!quotes) continue;
      const mark = text.slice(-3);
      const after = remaining.slice(remaining.indexOf(text) + text.length);
      if (!after.includes(mark)) open = mark;
      break;
    }
    return begun;
  });
}

/** A line as highlighted nodes. @param {string} line @param {string} begun quotes that are open */
export function coloured(line, begun = "") {
  if (line.length > MAX_LINE) return [plain(line, MAX_LINE)];
  const nodes = [];
  const add = (text, kind) =>
    text &&
    nodes.push(
      kind ? el("span", { class: `s-${kind}`, text: plain(text, MAX_LINE) }) : plain(text, MAX_LINE),
    );
  let at = 0;
  if (begun) {
    const end = line.indexOf(begun);
    at = end < 0 ? line.length : end + 3;
    add(line.slice(0, at), "string");
  }
  TOKEN.lastIndex = at;
  for (let m = TOKEN.exec(line); m; m = TOKEN.exec(line)) {
    add(line.slice(at, m.index), "");
    let text = m[0];
    if (m[2]) {
      const close = line.indexOf(text.slice(-3), m.index + text.length);
      text = line.slice(m.index, close < 0 ? line.length : close + 3);
    }
    add(text, kindOf(m));
    at = m.index + text.length;
    TOKEN.lastIndex = at;
  }
  add(line.slice(at), "");
  return nodes;
}

function kindOf(m) {
  if (m[1]) return "comment";
  if (m[2] || m[3]) return "string";
  if (m[4]) return "decorator";
  if (m[5]) return "number";
  return WORDS.has(m[6]) ? "word" : "";
}
