// Which colour stands for what. The colours themselves are in base.css, for light and dark.

/** Names of causes, kinds of work and parts of memory, and the variable of each. */
const KNOWN = {
  compute: "forward",
  forward: "forward",
  F: "forward",
  backward: "backward",
  B: "backward",
  I: "backward",
  weight: "weight",
  W: "weight",
  recompute: "recompute",
  optimizer: "optimizer",
  update: "update",
  collectives: "collectives",
  collective: "collectives",
  communication: "collectives",
  parameters: "gather",
  gather: "gather",
  gradients: "reduce",
  reduce: "reduce",
  sync: "reduce",
  "reduce-scatter": "reduce",
  send: "send",
  receive: "send",
  transfer: "send",
  bubble: "waiting",
  waiting: "waiting",
  idle: "waiting",
  process: "waiting",
  free: "waiting",
  more: "waiting",
};
const PARTS = {
  parameters: "forward",
  gradients: "send",
  optimizer: "optimizer",
  activations: "weight",
  temporary: "backward",
  buffers: "recompute",
};
const OTHERS = 4;
const probe = document.createElement("i");
let cache = new Map();

/** @param {string} text */
function other(text) {
  let hash = 7;
  for (let i = 0; i < Math.min(text.length, 40); i++) hash = (hash * 31 + text.charCodeAt(i)) >>> 0;
  return `other-${(hash % OTHERS) + 1}`;
}

/** The variable that a cause or kind of work is drawn in. @param {string} kind */
export function variable(kind) {
  return `--c-${Object.hasOwn(KNOWN, kind) ? KNOWN[kind] : other(kind)}`;
}

/** The variable that a part of memory is drawn in. @param {string} part */
export function partVariable(part) {
  return Object.hasOwn(PARTS, part)
    ? `--c-${PARTS[part]}`
    : `--c-${Object.hasOwn(KNOWN, part) ? KNOWN[part] : other(part)}`;
}

/** A colour as a canvas wants it. @param {string} variableName such as "--c-forward" */
export function resolved(variableName) {
  let found = cache.get(variableName);
  if (!found) {
    if (!probe.isConnected) {
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(${variableName})`;
    found = getComputedStyle(probe).color;
    cache.set(variableName, found);
  }
  return found;
}

/** Forget the colours: the page has become light or dark. */
export function forget() {
  cache = new Map();
}
