// The light or dark theme, of the system or of the button. Print is always light.

import { forget } from "./colours.js";

const KEY = "shardwise-theme";
const ORDER = ["auto", "light", "dark"];
const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
let chosen = "auto";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // the frame in a notebook has no storage
  }
}

function store(value) {
  try {
    localStorage.setItem(KEY, value);
  } catch {
    // without storage, the choice lasts as long as the page
  }
}

function apply(value) {
  if (value === "auto") delete root.dataset.theme;
  else root.dataset.theme = value;
  forget();
  for (const f of listeners) f();
}

/** Call a function when the colours change. @param {() => void} f */
export function onTheme(f) {
  listeners.push(f);
}

/** Set up the button. @param {HTMLElement} button */
export function setUpTheme(button) {
  const label = () => {
    button.textContent = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[
      chosen
    ];
  };
  chosen = ORDER.includes(stored()) ? stored() : "auto";
  button.addEventListener("click", () => {
    chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
    store(chosen);
    apply(chosen);
    label();
  });
  dark.addEventListener("change", () => apply(chosen));
  addEventListener("beforeprint", () => apply("light"));
  addEventListener("afterprint", () => apply(chosen));
  label();
  apply(chosen);
}
