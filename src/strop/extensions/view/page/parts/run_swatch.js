// A short piece of a run's line: its colour and its dashes.
import { html } from "../lib/ui.js";
import { seriesStyle } from "../lib/palette.js";

export function RunSwatch({ index }) {
  if (index < 0) return html`<span class="swatch"></span>`;
  const { dash, variable } = seriesStyle(index);
  return html`<svg class="swatch" viewBox="0 0 24 10" aria-hidden="true">
    <line x1="0" x2="24" y1="5" y2="5" stroke-width="3" style=${{ stroke: variable }} stroke-dasharray=${dash.join(" ")} />
  </svg>`;
}
