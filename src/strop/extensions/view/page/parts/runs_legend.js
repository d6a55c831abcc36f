// Which line is which run.
import { html } from "../lib/ui.js";
import { linkTo } from "../lib/route.js";
import { RunSwatch } from "./run_swatch.js";

export function RunsLegend({ groups }) {
  return html`<ul class="legend">
    ${groups.map(
      (runs, index) => html`<li>
        <${RunSwatch} index=${index} />
        <span>${runs.map((run, place) => html`${place ? ", " : ""}<a href=${linkTo(["now"], { run: run.id })}>${run.name}</a>`)}
          ${runs.length > 1 && html` <span class="pale">mean of ${runs.length} seeds, lowest to highest</span>`}</span>
        ${runs.some((run) => run.live) && html`<span class="badge live">live</span>`}
      </li>`,
    )}
  </ul>`;
}
