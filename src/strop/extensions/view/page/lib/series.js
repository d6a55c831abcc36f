// What is done with a series before it is drawn: smoothing, time axes, means over seeds.

/** A running mean with weight `smoothing` on the past, corrected for its start. Nulls stay null. */
export function smooth(values, smoothing) {
  if (!smoothing) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

/** What an axis spans at least, so that a curve that moves by 1 % does not fill it. */
export function leastSpan(low, high) {
  return Math.max(Math.abs(low), Math.abs(high)) / 10;
}

/** Leave out the places where a series has no value: {x, y, low, high}. */
export function compact({ x, y, low, high }) {
  const places = y.map((value, index) => index).filter((index) => y[index] !== null && y[index] !== undefined && x[index] !== null);
  const pick = (column) => (column ? places.map((index) => column[index]) : null);
  return { x: pick(x), y: pick(y), low: pick(low), high: pick(high) };
}

/** The mean of several series at each x, with the lowest and the highest of those that have a value there. */
export function meanOf(series) {
  const at = new Map();
  for (const { x, y } of series) {
    x.forEach((place, index) => {
      if (y[index] === null) return;
      if (!at.has(place)) at.set(place, []);
      at.get(place).push(y[index]);
    });
  }
  const x = [...at.keys()].sort((a, b) => a - b);
  return {
    x,
    y: x.map((place) => at.get(place).reduce((sum, value) => sum + value, 0) / at.get(place).length),
    low: x.map((place) => Math.min(...at.get(place))),
    high: x.map((place) => Math.max(...at.get(place))),
  };
}

/** Runs whose configurations differ in seeds and places alone, together: [[run, ...], ...]. One that has no step yet stands alone. */
export function groupBySeed(runs, configs) {
  const groups = new Map();
  for (const run of runs) {
    const values = configs[run.id];
    const key = values && run.step > 0 ? JSON.stringify(Object.entries(values).filter(([name]) => !isIncidental(name)).sort()) : run.id;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(run);
  }
  return [...groups.values()];
}

/** Keys that say which seed a run has, or where it writes, and nothing of how it learns. */
export function isIncidental(key) {
  return /(^|[._])seed$/.test(key) || /(^|\.)(logger\.log_dir|checkpointing\.checkpoint_dir|logger\.wandb\.\w+|save_path)$/.test(key);
}

/** The part of a name before the last slash groups metrics: "train/rewards/a" -> "train". */
export function sectionOf(name) {
  const [first, second, third] = name.split("/");
  if (first === "timing" && second) return `${first}/${second}`;
  return third ? `${first}/${second}` : second ? first : "other";
}

/** Names that contain every word of a search, or match /a regular expression/. */
export function searchNames(names, search) {
  const text = search.trim();
  if (!text) return names;
  if (text.startsWith("/") && text.endsWith("/") && text.length > 2) {
    try {
      const pattern = new RegExp(text.slice(1, -1), "i");
      return names.filter((name) => pattern.test(name));
    } catch {
      return []; // half typed
    }
  }
  const words = text.toLowerCase().split(/\s+/);
  return names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
}
