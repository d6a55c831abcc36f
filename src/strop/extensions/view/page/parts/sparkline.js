// A curve the size of a word.
import { html } from "../lib/ui.js";
import { seriesStyle } from "../lib/palette.js";
import { leastSpan } from "../lib/series.js";

export function Sparkline({ x, y, index }) {
  if (x.length < 2) return null;
  const [left, right] = [x[0], x.at(-1)];
  const [low, high] = [y.reduce((a, b) => Math.min(a, b)), y.reduce((a, b) => Math.max(a, b))];
  const stride = Math.max(Math.floor(x.length / 150), 1);
  const points = x
    .map((place, at) => [place, y[at]])
    .filter((_, at) => at % stride === 0 || at === x.length - 1)
    .map(([place, value]) => {
      const height = high > low ? 0.5 + (value - (low + high) / 2) / Math.max(high - low, leastSpan(low, high)) : 0.5;
      return `${(((place - left) / (right - left || 1)) * 100).toFixed(1)},${(22 - height * 20).toFixed(1)}`;
    });
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">
    <polyline points=${points.join(" ")} fill="none" stroke-width="1.6" vector-effect="non-scaling-stroke" style=${{ stroke: seriesStyle(index).variable }} />
  </svg>`;
}
