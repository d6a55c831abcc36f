// A choice of a few, as buttons side by side: options [[value, text]].
import { html } from "../lib/ui.js";

export function Segments({ label, options, value, onChange }) {
  return html`<span class="segments" role="group" aria-label=${label}>
    ${options.map(
      ([each, text]) => html`<button type="button" aria-pressed=${each === value ? "true" : "false"} onClick=${() => onChange(each)}>${text}</button>`,
    )}
  </span>`;
}
