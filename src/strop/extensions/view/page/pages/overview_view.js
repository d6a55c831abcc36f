// The runs, and what matters of each, side by side.
import { html } from "../lib/ui.js";
import { formatAgo, formatNumber, toSeconds } from "../lib/format.js";
import { useFollowing, useMetrics } from "../lib/metrics.js";
import { linkTo } from "../lib/route.js";
import { describeProgress, toggleRun } from "../lib/runs.js";
import { compact, smooth } from "../lib/series.js";
import { useApi } from "../lib/api.js";
import { BreakableName } from "../parts/breakable_name.js";
import { Findings, HealthBadge, RunHealth, useHealth, useMarks } from "../parts/health.js";
import { MetricChart } from "../parts/metric_chart.js";
import { RunSwatch } from "../parts/run_swatch.js";
import { Sparkline } from "../parts/sparkline.js";
import { Title } from "../parts/title.js";

const FIGURES = [
  "validation/accuracy", "validation/reward", "train/reward", "train/loss", "validation/loss", "train/token_mult_prob_error", "train/entropy",
  "train/mean_gen_tokens_per_sample", "train/kl_penalty", "train/truncated", "timing/train/total_step_time",
];

const MOST_JUDGED = 40; // runs of the table, the newest ones: their metrics are read

export function OverviewView({ runs }) {
  useFollowing(runs.chosen);
  return html`<${Title} text="Runs" note=${runs.all.length === 1 ? "" : `${runs.chosen.length} of ${runs.all.length} side by side`} />
    ${runs.all.length > 1 && html`<${RunTable} runs=${runs} />`}
    ${runs.chosen.length > 1 && html`<h2>Side by side</h2>`}
    <div class=${runs.chosen.length > 1 ? "cards" : "cards single"}>${runs.chosen.map((run, index) => html`<${RunCard} key=${run.id} run=${run} index=${index} isSingle=${runs.chosen.length === 1} />`)}</div>`;
}

function RunTable({ runs }) {
  const ids = runs.chosen.map((run) => run.id);
  return html`<div class="scroll"><table class="runs">
    <thead><tr><th>shown</th><th>run</th><th>health</th><th>progress</th><th>changed</th><th>kind</th><th>algorithm</th><th class="number">seed</th><th>model</th></tr></thead>
    <tbody>
      ${runs.all.map(
        (run, place) => html`<tr key=${run.id}>
          <td><input type="checkbox" aria-label=${`show ${run.name}`} checked=${ids.includes(run.id)} onChange=${() => toggleRun(run.id, runs)} /></td>
          <td><a href=${linkTo(["curves"], { runs: run.id, run: run.id })}>${run.name}</a> ${run.live && html`<span class="badge live">live</span>`}</td>
          <td>${place < MOST_JUDGED && html`<${RunHealth} run=${run} />`}</td>
          <td class="nowrap">${describeProgress(run)}</td><td class="nowrap">${formatAgo(toSeconds(run.updated))}</td>
          <td>${run.kind}</td><td>${run.algorithm}</td><td class="number">${run.seed ?? ""}</td><td>${run.model}</td>
        </tr>`,
      )}
    </tbody></table></div>`;
}

/** Live, or how it ended as far as that is known. */
function State({ run }) {
  if (run.live) return html`<span class="badge live">live</span>`;
  return html`<span class="badge">${run.state && run.state !== "running" ? run.state : "no longer running"}</span>`;
}

function RunCard({ run, index, isSingle }) {
  const health = useHealth(run);
  const names = useApi(["runs", run.id, "metrics"], {}, { poll: run.live && run.step < 2 });
  const figures = FIGURES.filter((name) => names.data?.names.includes(name)).slice(0, isSingle ? 9 : 6);
  const columns = useMetrics([run], figures)[run.id];
  const [first, last, count] = run.steps_with_rollouts ?? [];
  return html`<article class="card">
    <header><h3><${RunSwatch} index=${index} /> <a href=${linkTo(["curves"], { run: run.id, runs: run.id })}>${run.name}</a></h3>
      <span>${health && html`<${HealthBadge} level=${health.level} />`} <${State} run=${run} /></span></header>
    ${health && html`<${Findings} run=${run} findings=${health.findings} most=${isSingle ? 4 : 1} />`}
    <dl class="facts">
      <dt>algorithm</dt><dd>${run.algorithm || run.kind || "unknown"}</dd>
      <dt>model</dt><dd>${run.model || "unknown"}</dd>
      <dt>progress</dt><dd>${describeProgress(run)}, ${formatAgo(toSeconds(run.updated))}</dd>
      <dt>rollouts</dt>
      <dd>${count ? html`<a href=${linkTo(["rollouts", String(last)], { run: run.id })}>${count} steps, ${first} to ${last}</a>` : "none stored"}</dd>
      <dt>validations</dt>
      <dd>${run.validations?.length ? html`<a href=${linkTo(["validation"], { run: run.id })}>${run.validations.length}, the last after step ${run.validations.at(-1)}</a>` : "none"}</dd>
    </dl>
    ${isSingle
      ? html`<${Charts} run=${run} names=${figures} />`
      : html`<table class="figures"><tbody>${figures.map((name) => html`<${Figure} key=${name} name=${name} column=${columns[name]} index=${index} />`)}</tbody></table>`}
    ${names.data && !figures.length && html`<p class="pale">No metrics yet.</p>`}
  </article>`;
}

/** The figures of a single run as curves, with what was found in them. */
function Charts({ run, names }) {
  const marks = useMarks([run]);
  const view = { axis: "step", isLog: false, smoothing: 0, zoom: null, marks };
  return html`<div class="charts">${names.map((name) => html`<${MetricChart} key=${name} name=${name} groups=${[[run]]} view=${view} height=${130} />`)}</div>`;
}

function Figure({ name, column, index }) {
  const { x, y } = column ? compact({ x: column.steps, y: column.values }) : { x: [], y: [] };
  return html`<tr><td><a href=${linkTo(["curves"], { find: name })}><${BreakableName} name=${name.replace(/^train\//, "")} /></a></td>
    <td class="line"><${Sparkline} x=${x} y=${smooth(y, y.length > 30 ? 0.8 : 0)} index=${index} /></td>
    <td class="number">${formatNumber(y.at(-1))}</td></tr>`;
}
