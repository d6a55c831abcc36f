// Where each step's time went: the parts of timing/train, which do not overlap, stacked; then the samples of a step, one by one.
import { html, useMemo } from "../lib/ui.js";
import { formatDuration, formatShare } from "../lib/format.js";
import { useMetricNames } from "../lib/metric_names.js";
import { useFollowing, useMetrics } from "../lib/metrics.js";
import { readColour, seriesStyle } from "../lib/palette.js";
import { setParams, setZoom } from "../lib/route.js";
import { useTheme } from "../lib/theme.js";
import { Chart } from "../parts/chart.js";
import { MetricChart } from "../parts/metric_chart.js";
import { Empty, ErrorNotice, Loading } from "../parts/notice.js";
import { RunsPicker } from "../parts/run_picker.js";
import { Segments } from "../parts/segments.js";
import { StepTimeline } from "../parts/step_timeline.js";
import { Title } from "../parts/title.js";

const PREFIX = "timing/train/";
const WHOLE = PREFIX + "total_step_time";
// In the order of a step. `offload` is a part of two of them.
const PARTS = ["generation", "drain", "packing", "logprobs", "policy_training", "weight_sync", "storing", "validation", "checkpointing"];
const COLOURS = [0, 1, 2, 3, 6, 5, 8, 7, 4]; // of each part, so that neighbours differ
const FLEET = /^(generation|rollouts|sandboxes|weights|performance|perf|system)\//;
const ENGINES = /^(generation|rollouts|sandboxes|weights)\//;
const REST = "the rest";
const REST_STYLE = () => ({ colour: readColour("--rest"), dash: [], variable: "var(--rest)" });

const phaseStyle = (part) => (PARTS.includes(part) ? seriesStyle(COLOURS[PARTS.indexOf(part)]) : REST_STYLE());

export function TimeView({ runs, params }) {
  const { names, error } = useMetricNames(runs.chosen);
  useFollowing(runs.chosen);
  const parts = PARTS.filter((part) => names?.includes(PREFIX + part));
  const view = { isShare: params.as === "share", zoom: params.zoom ? params.zoom.split(":").map(Number) : null };
  if (names === null) return error ? html`<${ErrorNotice} error=${error} />` : html`<${Loading} what="times" />`;
  return html`<${Title} text="Time" note="where each step's time went"><${RunsPicker} runs=${runs} /><//>
    <${ErrorNotice} error=${error} />
    ${!names.includes(WHOLE)
      ? html`<${Empty}>These runs have not logged ${WHOLE}.<//>`
      : html`<div class="toolbar">
            <${Segments} label="Unit" options=${[["", "seconds"], ["share", "shares"]]} value=${view.isShare ? "share" : ""} onChange=${(as) => setParams({ as })} />
            <button type="button" disabled=${!view.zoom} onClick=${() => setParams({ zoom: "" })}>Whole range</button>
            <span class="pale">drag over a chart to look at some steps; the table follows</span>
          </div>
          ${runs.chosen.map((run) => html`<${RunTime} key=${run.id} run=${run} parts=${parts} view=${view} />`)}
          <${StepTimeline} key=${runs.run.id} run=${runs.run} params=${params} phaseStyle=${phaseStyle} fleet=${names.filter((name) => ENGINES.test(name))} />
          <${Fleet} runs=${runs.chosen} names=${names.filter((name) => FLEET.test(name))} zoom=${view.zoom} />`}`;
}

/** What the engines, the sandboxes, the learner and the machines did meanwhile, step by step. */
function Fleet({ runs, names, zoom }) {
  const view = { axis: "step", isLog: false, smoothing: 0, zoom, onZoom: setZoom };
  return names.length > 0 && html`<details class="section"><summary>Engines, rollouts, weights and machines <span class="pale">${names.length}</span></summary>
    <div class="charts">${names.map((name) => html`<${MetricChart} key=${name} name=${name} groups=${runs.map((run) => [run])} view=${view} height=${130} />`)}</div></details>`;
}

function RunTime({ run, parts, view }) {
  const theme = useTheme();
  const wanted = [...parts, "total_step_time"].map((part) => PREFIX + part);
  const columns = useMetrics([run], wanted)[run.id];
  const isHere = wanted.every((name) => columns[name]);
  const table = useMemo(() => (isHere ? makeTable(columns, parts) : null), [isHere, ...wanted.map((name) => columns[name]), theme]);
  if (!table) return html`<${Loading} what=${`the times of ${run.name}`} />`;
  const lines = stack(table, view.isShare);
  const format = (value) => (view.isShare ? formatShare(value) : formatDuration(value));
  return html`<h2>${run.name}</h2>
    <section class="chart"><header><h3>${view.isShare ? "share of a step" : "seconds of a step"}, stacked</h3></header>
      <${Chart} name="time" lines=${lines} zoom=${view.zoom} onZoom=${setZoom} height=${260} format=${format} /></section>
    <${Means} table=${table} zoom=${view.zoom} />`;
}

/** {steps, total, parts: [{name, values, style}]}, with what no part accounts for as the last. */
function makeTable(columns, parts) {
  const whole = columns[WHOLE];
  const timed = whole.steps.map((step, index) => [step, whole.values[index]]).filter(([, value]) => value !== null); // not what came before the first step
  const [steps, total] = [timed.map(([step]) => step), timed.map(([, value]) => value)];
  const named = parts.map((name) => ({ name, values: alignTo(steps, columns[PREFIX + name]) }));
  const rest = total.map((seconds, index) => Math.max(seconds - named.reduce((sum, part) => sum + part.values[index], 0), 0));
  return {
    steps,
    total,
    parts: [...named, { name: REST, values: rest }].map((part) => ({ ...part, style: phaseStyle(part.name) })),
  };
}

function alignTo(steps, column) {
  const at = new Map(column.steps.map((step, index) => [step, column.values[index] ?? 0]));
  return steps.map((step) => at.get(step) ?? 0);
}

/** Each part's line is the sum of the parts up to it; it is filled down to the line before it. The reading shows the part alone. */
function stack({ steps, total, parts }, isShare) {
  let below = steps.map(() => 0);
  return parts.map((part, index) => {
    const own = isShare ? part.values.map((value, place) => value / (total[place] || 1)) : part.values;
    below = below.map((sum, place) => sum + own[place]);
    return { label: part.name, style: { ...part.style, dash: [] }, x: steps, y: below, low: null, high: null, shade: index ? index - 1 : null, own, width: 1 };
  });
}

function Means({ table, zoom }) {
  const inside = table.steps.map((step) => !zoom || (step >= zoom[0] && step <= zoom[1]));
  const mean = (values) => values.filter((_, index) => inside[index]).reduce((sum, value) => sum + value, 0) / Math.max(inside.filter(Boolean).length, 1);
  const whole = mean(table.total);
  const rows = table.parts.map((part) => ({ ...part, mean: mean(part.values) }));
  const sum = rows.reduce((total, part) => total + part.mean, 0) || 1;
  return html`<div class="stack" role="img" aria-label="mean shares of a step">
      ${rows.filter((part) => part.mean / sum > 0.001).map(
        (part) => html`<div class=${part.name === REST ? "rest" : ""} style=${{ width: `${(part.mean / sum) * 100}%`, background: part.style.variable }} title=${`${part.name}: ${formatShare(part.mean / sum)}`}><span>${part.name}</span></div>`,
      )}
    </div>
    <div class="scroll"><table>
      <thead><tr><th>part</th><th class="number">mean of a step</th><th class="number">share</th></tr></thead>
      <tbody>
        ${[...rows].sort((a, b) => b.mean - a.mean).map(
          (part) => html`<tr><td><span class="swatch" style=${{ background: part.style.variable }}></span> ${part.name}</td>
            <td class="number">${formatDuration(part.mean)}</td><td class="number">${formatShare(part.mean / (whole || 1))}</td></tr>`,
        )}
        <tr><td><b>a step</b>, mean of ${inside.filter(Boolean).length}</td><td class="number"><b>${formatDuration(whole)}</b></td><td></td></tr>
      </tbody></table></div>`;
}
