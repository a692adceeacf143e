// Colours of causes, kinds of work and memory. base.css defines them for light and dark themes.

/** Causes, kinds of work and parts of memory, with the variable of each. */
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

/** The variable with the colour of a cause or kind of work. @param {string} kind */
export function variable(kind) {
  return `--c-${Object.hasOwn(KNOWN, kind) ? KNOWN[kind] : other(kind)}`;
}

/** The variable with the colour of a part of memory. @param {string} part */
export function partVariable(part) {
  return Object.hasOwn(PARTS, part)
    ? `--c-${PARTS[part]}`
    : `--c-${Object.hasOwn(KNOWN, part) ? KNOWN[part] : other(part)}`;
}

/** A colour in the form that a canvas needs. @param {string} variableName such as "--c-forward" */
export function resolved(variableName) {
  let colour = cache.get(variableName);
  if (!colour) {
    if (!probe.isConnected) {
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(${variableName})`;
    colour = getComputedStyle(probe).color;
    cache.set(variableName, colour);
  }
  return colour;
}

/** Forget the colours after a change of the theme. */
export function forget() {
  cache = new Map();
}
