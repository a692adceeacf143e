// Format figures like `shardwise.formatting`.

/**
 * Format with digits after the point like Python, which rounds ties to even, while `toFixed` rounds up.
 * Only sums of halves, quarters and so on can be ties.
 * @param {number} value @param {number} digits
 */
function digitsOf(value, digits) {
  const scaled = value * 10 ** digits;
  const tie = Number.isInteger(value * 2 ** (digits + 1)) && Math.abs(scaled % 1) === 0.5;
  return (tie ? (2 * Math.round(scaled / 2)) / 10 ** digits : value).toFixed(digits);
}

/** A number with thousands separated. @param {number} value @param {number} digits */
function fixed(value, digits) {
  const [integer, fraction] = digitsOf(value, digits).split(".");
  const grouped = integer.replace(/\B(?=(\d{3})+$)/g, ",");
  return fraction ? `${grouped}.${fraction}` : grouped;
}

/** A time with its unit. @param {number} value seconds */
export function seconds(value) {
  if (!value) return "0";
  const size = Math.abs(value);
  if (size >= 100) return `${fixed(value, 1)} s`;
  if (size >= 1) return `${digitsOf(value, 3)} s`;
  return size >= 1e-3 ? `${digitsOf(value * 1e3, 2)} ms` : `${digitsOf(value * 1e6, 1)} us`;
}

/** Bytes with their unit. @param {number} value */
export function size(value) {
  if (!value) return "0";
  for (const [unit, bytes] of [
    ["GiB", 2 ** 30],
    ["MiB", 2 ** 20],
    ["KiB", 2 ** 10],
  ]) {
    if (Math.abs(value) >= bytes) return `${fixed(value / bytes, 1)} ${unit}`;
  }
  return `${digitsOf(value, 0)} B`;
}

/** A count or rate with three significant digits. @param {number} value */
export function amount(value) {
  if (Math.abs(value) >= 1e9) return `${digitsOf(value / 1e9, 1)} G`;
  if (Math.abs(value) >= 1e7) return `${digitsOf(value / 1e6, 1)} M`;
  return Math.abs(value) >= 100 ? fixed(value, 0) : String(Number(value.toPrecision(3)));
}

/** A price. @param {number} value */
export function money(value) {
  return fixed(value, 2);
}

/** A share as a percentage, with a decimal if it is small. @param {number} share */
export function percent(share) {
  const value = share * 100;
  if (value === 0) return "0%";
  if (Math.abs(value) < 0.1) return value < 0 ? "> −0.1%" : "< 0.1%";
  return `${value.toFixed(Math.abs(value) < 10 ? 1 : 0).replace("-", "−")}%`;
}

/** A change with its sign. @param {number} value @param {(value: number) => string} form */
export function signed(value, form) {
  if (!value) return "0";
  return (value > 0 ? "+" : "−") + form(Math.abs(value));
}

/** The change of a time in percent, or as a factor if it is large. @param {number} ratio */
export function change(ratio) {
  return ratio >= 2 ? `×${digitsOf(ratio, 1)}` : signed(ratio - 1, percent);
}

/** An integer with thousands separated. @param {number} value */
export function count(value) {
  return fixed(value, 0);
}

/** A number with its noun. @param {number} value @param {string} one @param {string} [many] */
export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}
