// Format numbers for people.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${Math.round(value).toLocaleString("en")} s`;
  return value >= 1 ? `${value.toFixed(2)} s` : `${+(value * 1e3).toPrecision(3)} ms`;
}

export function duration(value) {
  const total = Math.floor(value);
  for (const [size, unit, smaller, name] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (total >= size) return `${Math.floor(total / size)} ${unit} ${Math.floor((total % size) / smaller)} ${name}`;
  }
  return `${total} s`;
}

export function bytes(value) {
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(2)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
}

export function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : `${+value.toPrecision(3)}`;
}

export function plain(value) {
  return `${+value.toPrecision(5)}`;
}

export function count(value) {
  return value.toLocaleString("en");
}
