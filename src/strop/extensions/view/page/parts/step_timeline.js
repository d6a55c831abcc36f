// What the samples of a step waited for, when, and what the learner did meanwhile.
import { html, useMemo } from "../lib/ui.js";
import { SAVED, useApi } from "../lib/api.js";
import { formatCount, formatDuration, formatNumber } from "../lib/format.js";
import { useMetrics } from "../lib/metrics.js";
import { seriesStyle } from "../lib/palette.js";
import { rolloutLink } from "../lib/rollouts.js";
import { setParams } from "../lib/route.js";
import { KINDS, layOut, summarize } from "../lib/timeline.js";
import { Answer, Empty } from "./notice.js";
import { Segments } from "./segments.js";
import { TimelineChart } from "./timeline_chart.js";

/** `params` has `at`, the last step that is shown (none: the newest), and `count`; `fleet` are names of metrics to read at that step. */
export function StepTimeline({ run, params, phaseStyle, fleet }) {
  const [step, count] = [Number(params.at) || "", Number(params.count) || 1];
  const answer = useApi(["runs", run.id, "timeline"], { step, count }, { poll: run.live && !step });
  return html`<h2>Samples of a step: ${run.name}</h2>
    <${Answer} of=${answer} what="the samples">${(found) =>
      found.last === null ? html`<${Empty}>No time line is kept of this run: it has not finished a step, or it samples nothing.<//>`
        : html`<${Controls} found=${found} count=${count} />
          ${found.steps.length > 0 ? html`<${Steps} run=${run} steps=${found.steps} phaseStyle=${phaseStyle} fleet=${fleet} />` : html`<${Empty}>No time line is kept of step ${step}.<//>`}`}<//>`;
}

function Controls({ found: { first, last, steps }, count }) {
  const shown = steps.at(-1)?.step ?? first;
  const show = (step) => setParams({ at: step >= last ? "" : Math.max(step, first) });
  return html`<div class="toolbar">
    <button type="button" disabled=${shown <= first} onClick=${() => show(shown - count)} aria-label="Earlier steps">‹</button>
    <label>Step <input type="number" min=${first} max=${last} value=${shown} onChange=${(event) => show(Number(event.target.value))} style=${{ width: "5.5rem" }} /></label>
    <button type="button" disabled=${shown >= last} onClick=${() => show(shown + count)} aria-label="Later steps">›</button>
    ${!SAVED && html`<${Segments} label="Steps" options=${[[1, "1 step"], [2, "2"], [4, "4"]]} value=${count} onChange=${(value) => setParams({ count: value === 1 ? "" : value })} />`}
  </div>`;
}

function Steps({ run, steps, phaseStyle, fleet }) {
  const view = useMemo(() => layOut(steps), [steps]);
  const { shares, straggler, loop } = useMemo(() => summarize(steps), [steps]);
  const more = steps.reduce((sum, line) => sum + line.more, 0);
  const lost = steps.reduce((sum, line) => sum + line.lost, 0);
  const link = (place) => rolloutLink(place, { run: run.id });
  const open = (row) => { window.location.hash = link(row); };
  return html`<p>${shares} ${straggler && html`<a href=${link(straggler)}>Sample ${straggler.sample} of group ${straggler.group}</a>${steps.length > 1 && ` of step ${straggler.step}`} ended last, ${formatDuration(straggler.late)} after the median. `}${loop}</p>
    <ul class="legend">${Object.entries(KINDS).map(([kind, number]) => html`<li><span class="swatch" style=${{ background: number === null ? "var(--rest)" : seriesStyle(number).variable }}></span> ${kind}</li>`)}
      ${more > 0 && html`<li class="pale">and ${formatCount(more)} more samples, which are not drawn</li>`}
      ${lost > 0 && html`<li class="pale">${formatCount(lost)} waits were too many to keep</li>`}</ul>
    <section class="chart"><${TimelineChart} view=${view} phaseStyle=${phaseStyle} onOpen=${run.has_rollouts ? open : null} label=${`${shares} ${loop}`} /></section>
    <${Meanwhile} run=${run} step=${steps.at(-1).step} names=${fleet} />`;
}

/** What the engines, the sandboxes and the weights logged of the step. */
function Meanwhile({ run, step, names }) {
  const columns = useMetrics([run], names)[run.id];
  const known = names.map((name) => [name, columns[name]?.values[columns[name].steps.indexOf(step)]]).filter(([, value]) => value !== undefined && value !== null);
  return known.length > 0 && html`<p class="pale">Step ${step}: ${known.map(([name, value], index) => html`${index ? ", " : ""}${name} <b>${formatNumber(value, 3)}</b>`)}</p>`;
}
