// Any metric of the chosen runs.
import { html, useEffect, useMemo, useState } from "../lib/ui.js";
import { fetchJson } from "../lib/api.js";
import { useKeys } from "../lib/keys.js";
import { metricsOf, useFollowing } from "../lib/metrics.js";
import { setParams, setZoom } from "../lib/route.js";
import { groupBySeed, searchNames, sectionOf } from "../lib/series.js";
import { useMarks } from "../parts/health.js";
import { MetricChart } from "../parts/metric_chart.js";
import { Empty, ErrorNotice, Loading } from "../parts/notice.js";
import { RunsLegend } from "../parts/runs_legend.js";
import { RunsPicker } from "../parts/run_picker.js";
import { Segments } from "../parts/segments.js";
import { Title } from "../parts/title.js";
import { useMetricNames } from "../lib/metric_names.js";

const FIRST = [
  "train/reward", "validation/accuracy", "validation/reward", "train/loss", "train/grad_norm", "train/entropy", "train/token_mult_prob_error",
  "train/mean_gen_tokens_per_sample", "train/truncated", "train/groups_without_signal", "train/kl_penalty", "validation/loss", "train/lr",
];
const MOST_OPEN = 60; // charts of a search; more are a click away

export function CurvesView({ runs, params }) {
  const { names, error } = useMetricNames(runs.chosen);
  const configs = useConfigs(runs.chosen);
  const bands = params.bands !== "0";
  const groups = useMemo(() => (bands ? groupBySeed(runs.chosen, configs) : runs.chosen.map((run) => [run])), [runs.chosen, configs, bands]);
  const zoom = params.zoom ? params.zoom.split(":").map(Number) : null;
  const marks = useMarks(runs.chosen);
  const view = {
    marks,
    axis: params.axis === "time" ? "time" : "step",
    isLog: params.log === "1",
    smoothing: Number(params.smooth ?? 0),
    zoom: zoom?.every(Number.isFinite) ? zoom : null,
    range: wholeRange(runs.chosen, params.axis),
    onZoom: setZoom,
  };
  useFollowing(runs.chosen);
  useEffect(() => refine(runs.chosen, view), [params.zoom, view.axis]);
  useKeys({
    z: ["whole range again", () => setParams({ zoom: "" })],
    l: ["logarithmic or linear", () => setParams({ log: view.isLog ? "" : "1" })],
    x: ["steps or time", () => setParams({ axis: view.axis === "step" ? "time" : "", zoom: "" })],
  });

  return html`<${Title} text="Curves" note=${`${names?.length ?? 0} metrics`}><${RunsPicker} runs=${runs} /><//>
    <${Toolbar} params=${params} view=${view} canBand=${groupBySeed(runs.chosen, configs).some((group) => group.length > 1)} bands=${bands} />
    <${RunsLegend} groups=${groups} />
    <${ErrorNotice} error=${error} />
    ${names === null ? !error && html`<${Loading} what="metrics" />` : html`<${Charts} names=${names} groups=${groups} view=${view} params=${params} />`}`;
}

function Toolbar({ params, view, canBand, bands }) {
  return html`<div class="toolbar" role="search">
    <label class="wide"><input type="search" placeholder="find metrics: words, or /pattern/" aria-label="Find metrics" value=${params.find ?? ""}
      onInput=${(event) => setParams({ find: event.target.value }, { replace: true })} /></label>
    <label>smoothing <input type="range" min="0" max="0.99" step="0.01" value=${view.smoothing}
      onInput=${(event) => setParams({ smooth: Number(event.target.value) || "" }, { replace: true })} /><output>${view.smoothing.toFixed(2)}</output></label>
    <${Segments} label="Horizontal axis" options=${[["step", "steps"], ["time", "time"]]} value=${view.axis}
      onChange=${(axis) => setParams({ axis: axis === "step" ? "" : axis, zoom: "" })} />
    <label><input type="checkbox" checked=${view.isLog} onChange=${(event) => setParams({ log: event.target.checked ? "1" : "" })} />logarithmic</label>
    ${canBand && html`<label><input type="checkbox" checked=${bands} onChange=${(event) => setParams({ bands: event.target.checked ? "" : "0" })} />bands over seeds</label>`}
    <button type="button" disabled=${!view.zoom} onClick=${() => setParams({ zoom: "" })} title="z">Whole range</button>
  </div>`;
}

function Charts({ names, groups, view, params }) {
  const pinned = (params.pin ?? "").split(",").filter((name) => names.includes(name));
  const found = searchNames(names, params.find ?? "");
  const isSearch = Boolean((params.find ?? "").trim());
  if (!names.length) return html`<${Empty}>These runs have logged nothing yet.<//>`;
  if (params.large && names.includes(params.large)) {
    return html`<div class="charts large"><${OneChart} name=${params.large} groups=${groups} view=${view} pinned=${pinned} isLarge /></div>`;
  }
  const charts = (list) => html`<div class="charts">${list.map((name) => html`<${OneChart} key=${name} name=${name} groups=${groups} view=${view} pinned=${pinned} />`)}</div>`;
  if (isSearch) return html`<${Found} names=${found} charts=${charts} />`;
  const first = FIRST.filter((name) => names.includes(name) && !pinned.includes(name));
  return html`
    ${pinned.length > 0 && html`<${Section} title="Pinned" count=${pinned.length} isOpen>${() => charts(pinned)}<//>`}
    <${Section} title="First" count=${first.length || Math.min(names.length, 9)} isOpen>${() => charts(first.length ? first : names.slice(0, 9))}<//>
    ${sectionsOf(names).map(([title, members]) => html`<${Section} key=${title} title=${title} count=${members.length}>${() => charts(members)}<//>`)}`;
}

function Found({ names, charts }) {
  const [isWhole, setWhole] = useState(false);
  if (!names.length) return html`<${Empty}>No metric has this in its name.<//>`;
  const shown = isWhole ? names : names.slice(0, MOST_OPEN);
  return html`<p class="pale" role="status">${names.length} found</p>${charts(shown)}
    ${shown.length < names.length && html`<p><button type="button" onClick=${() => setWhole(true)}>Show ${names.length - shown.length} more</button></p>`}`;
}

function OneChart({ name, groups, view, pinned, isLarge }) {
  const isPinned = pinned.includes(name);
  const toggle = () => setParams({ pin: (isPinned ? pinned.filter((each) => each !== name) : [...pinned, name]).join(",") });
  const actions = html`<button type="button" class="plain" aria-pressed=${isPinned ? "true" : "false"} title="keep at the top" aria-label=${`${isPinned ? "unpin" : "pin"} ${name}`} onClick=${toggle}>${isPinned ? "unpin" : "pin"}</button>
    <button type="button" class="plain" aria-label=${isLarge ? "all charts" : `enlarge ${name}`} onClick=${() => setParams({ large: isLarge ? "" : name })}>${isLarge ? "all" : "enlarge"}</button>`;
  return html`<${MetricChart} name=${name} groups=${groups} view=${view} actions=${actions} height=${isLarge ? 460 : undefined} />`;
}

/** A section builds its charts when it is opened. */
function Section({ title, count, isOpen = false, children }) {
  const [open, setOpen] = useState(isOpen);
  return html`<details class="section" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>${title} <span class="pale">${count}</span></summary>${open && children()}
  </details>`;
}

export function sectionsOf(names) {
  const sections = new Map();
  for (const name of names) {
    const section = sectionOf(name);
    if (!sections.has(section)) sections.set(section, []);
    sections.get(section).push(name);
  }
  return [...sections].sort(([a], [b]) => a.localeCompare(b));
}

/** All charts show the same steps, whichever of them a metric was logged in. */
function wholeRange(runs, axis) {
  const last = Math.max(0, ...runs.map((run) => run.step ?? 0));
  return axis === "time" || last < 1 ? null : [0, last];
}

/** More points where the view is narrow. */
function refine(runs, { zoom, axis }) {
  if (!zoom || axis !== "step") return;
  for (const run of runs) {
    const share = (zoom[1] - zoom[0]) / Math.max(run.step ?? 1, 1);
    if (share < 0.5 && (run.step ?? 0) > 2000) metricsOf(run.id).refine(Math.min(Math.ceil(2000 / Math.max(share, 0.02)), 20_000));
  }
}

/** {run id: flat configuration}, to find runs that differ in their seeds. */
function useConfigs(runs) {
  const [configs, setConfigs] = useState({});
  const missing = runs.length > 1 ? runs.filter((run) => !(run.id in configs)).map((run) => run.id) : [];
  useEffect(() => {
    if (!missing.length) return undefined;
    const given = new AbortController();
    const ask = (id) => fetchJson(["runs", id, "config"], {}, { signal: given.signal }).then((answer) => [id, answer.values], () => [id, null]);
    Promise.all(missing.map(ask)).then((entries) => given.signal.aborted || setConfigs((old) => ({ ...old, ...Object.fromEntries(entries) })));
    return () => given.abort();
  }, [missing.join()]);
  return configs;
}
