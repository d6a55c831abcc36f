// A name of a metric, that breaks after a slash or an underscore.
import { html } from "../lib/ui.js";

export function BreakableName({ name }) {
  return name.split(/(?<=[/_.])/).map((part, index) => html`${index > 0 && html`<wbr />`}${part}`);
}
