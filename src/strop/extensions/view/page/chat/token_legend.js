// What the colours of tokens mean, with the numbers at the ends.
import { html } from "../lib/ui.js";
import { formatNumber } from "../lib/format.js";
import { LEVELS } from "./token_modes.js";

export function TokenLegend({ mode, scale, tokens }) {
  const steps = Array.from({ length: LEVELS }, (_, index) => index + 1);
  const [low, high] = mode.ends;
  const edge = (sign) => (mode.shown ? formatNumber(mode.shown(sign * scale), 3) : (sign < 0 ? "−" : "+") + formatNumber(scale, 2));
  return html`<div class="token-legend" role="group" aria-label="Legend">
    ${low && html`<span>${low}</span>`}
    <span class="scale" aria-hidden="true">
      ${low && [...steps].reverse().map((step) => html`<span class=${`low-${step}`}>${step === LEVELS ? edge(-1) : "\u00a0"}</span>`)}
      <span>${mode.shown ? 1 : 0}</span>
      ${high && steps.map((step) => html`<span class=${`high-${step}`}>${step === LEVELS ? edge(1) : "\u00a0"}</span>`)}
    </span>
    ${high && html`<span>${high}</span>`}
    <span class="tokens">${tokens.clipped && html`<span class="sample clipped">clipped</span> `}${tokens.mask && html`<span class="sample masked">masked</span> `}
      <span class="sample given">environment</span></span>
    <span class="pale">${mode.explain}</span>
  </div>`;
}
