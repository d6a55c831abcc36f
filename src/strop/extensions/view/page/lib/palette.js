// Colours of runs and of parts of a step: a colour, a dash and a number each, so that colour is not needed to tell them apart.
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 5], [5, 2, 2, 2, 2, 2], [4, 4], [1, 4], [18, 3]];

export const NUM_COLOURS = 9;

export function readColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function seriesStyle(index) {
  const number = index % NUM_COLOURS;
  return { colour: readColour(`--series-${number + 1}`), dash: DASHES[number], variable: `var(--series-${number + 1})` };
}

/** "#rrggbb" with an opacity. */
export function withOpacity(colour, opacity) {
  return colour + Math.round(opacity * 255).toString(16).padStart(2, "0");
}
