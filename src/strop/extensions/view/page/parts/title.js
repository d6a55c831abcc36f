// The head of a view: its name, a line about it, and what belongs to the right.
import { html, useEffect } from "../lib/ui.js";
import { focusHeading } from "../lib/focus.js";

export function Title({ text, note, children }) {
  useEffect(focusHeading);
  return html`<div class="title"><h1 tabindex="-1">${text}</h1>${note && html`<p>${note}</p>`}<span class="grow"></span>${children}</div>`;
}
