// The samples of validations.
import { html, useMemo } from "../lib/ui.js";
import { SAVED, useApi, fetchJson } from "../lib/api.js";
import { formatNumber, printable } from "../lib/format.js";
import { useMetricNames } from "../lib/metric_names.js";
import { oneLine } from "../lib/rollouts.js";
import { REFERENCE, rewardColumns, useRewardColumns } from "./rollouts_view.js";
import { linkTo, setParams } from "../lib/route.js";
import { Chat } from "../chat/chat.js";
import { MetricChart } from "../parts/metric_chart.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { StarButton } from "../parts/star_button.js";
import { Title } from "../parts/title.js";
import { VirtualRows } from "../parts/virtual_rows.js";

const listColumns = (parts) => [
  { title: "task", width: "minmax(6rem, 10rem)", isName: true, sort: "task", cell: (row) => row.task },
  { title: "sample", width: "4.5rem", isNumber: true, isMinor: true, cell: (row) => row.sample },
  REFERENCE,
  { title: "reward", width: "5rem", isNumber: true, sort: "reward", cell: (row) => formatNumber(row.reward, 3) },
  ...rewardColumns(parts),
  { title: "tokens", width: "5rem", isNumber: true, sort: "tokens", cell: (row) => formatNumber(row.tokens) },
  { title: "ending", width: "5rem", cell: (row) => row.ending || "–" },
  { title: "beginning of the text", width: "minmax(8rem, 1fr)", isLong: true, cell: (row) => oneLine(row.preview ?? row.text) },
];

export function ValidationView({ runs, run, path, params }) {
  const steps = SAVED?.validations ?? run.validations ?? [];
  const step = path[0] ?? (steps.length ? String(steps.at(-1)) : null);
  const list = useRewardColumns(listColumns, (from, limit, signal) => fetchJson(["runs", run.id, "validation", step], { from, limit, sort: params.sort }, { signal }));
  const title = html`<${Title} text=${`Validation: ${run.name}`} note=${step === null ? "" : `after step ${step}`}><${RunSelect} runs=${runs} /><//>`;
  if (step === null) return html`${title}<${Scores} run=${run} /><${Empty}>No samples of a validation are stored. A run on tasks validates with grpo.val_period (or that of its algorithm) and tasks of its own; recorded data has scores alone.<//>`;
  const toSample = (row) => linkTo(["validation", step], { sort: params.sort, at: `${row.group}-${row.sample}` });
  return html`${title}
    <div class="toolbar"><label>after step <select value=${step} onChange=${(event) => (window.location.hash = linkTo(["validation", event.target.value], { sort: params.sort }))}>
      ${steps.map((each) => html`<option value=${String(each)}>${each}</option>`)}</select></label>
      ${params.at && html`<button type="button" onClick=${() => setParams({ at: "" })}>Back to the list</button>`}</div>
    ${params.at
      ? html`<${Sample} run=${run} step=${step} at=${params.at} />`
      : html`<${Scores} run=${run} />
          <${VirtualRows} source=${JSON.stringify([run.id, step, params.sort])} label="Samples" what="samples" columns=${list.columns} fetchPage=${list.fetchPage} href=${toSample}
            sort=${params.sort ?? ""} onSort=${(sort) => setParams({ sort })} emptyText="This validation has no samples." />`}`;
}

/** The scores over the run, with 95 % intervals of the mean over tasks where the samples are stored. */
function Scores({ run }) {
  const validations = useApi(["runs", run.id, "validation"], {}, { poll: run.live }).data;
  const view = useMemo(() => ({ axis: "step", isLog: false, smoothing: 0, zoom: null, intervals: readIntervals(validations ?? []) }), [validations]);
  const { names } = useMetricNames([run]);
  const first = ["validation/accuracy", "validation/reward", "validation/loss"].filter((name) => names?.includes(name));
  const shown = first.length ? first : (names ?? []).filter((name) => name.startsWith("validation/")).slice(0, 3);
  if (!shown.length) return null;
  return html`<div class="charts">${shown.map((name) => html`<${MetricChart} key=${name} name=${name} groups=${[[run]]} view=${view} height=${150} />`)}</div>
    ${Object.keys(view.intervals).length > 0 && html`<p class="pale">Bands are 95 % intervals over tasks.</p>`}`;
}

/** {metric: Map of step to [low, high]} */
function readIntervals(validations) {
  const found = {};
  for (const { step, intervals } of validations) {
    for (const [name, interval] of Object.entries(intervals ?? {})) (found[name] ??= new Map()).set(step, interval);
  }
  return found;
}

function Sample({ run, step, at }) {
  const [group, sample] = at.split("-");
  const answer = useApi(["runs", run.id, "rollouts", step, group, sample], { validation: 1 });
  return html`<${Answer} of=${answer} what="the sample">${(rollout) => html`
    <h2>${rollout.task}, sample ${rollout.sample}: reward ${formatNumber(rollout.reward, 4)} <${StarButton} run=${run} rollout=${rollout} validation=${true} /></h2>
    <p class="pale">${rollout.ending || "no ending"}${rollout.answer ? html`; reference answer <b class="mono">${printable(rollout.answer)}</b>` : ""}
      ${Object.entries(rollout.metrics ?? {}).map(([name, value]) => html`; ${name} ${formatNumber(value, 4)}`)}</p>
    <${Chat} rollout=${rollout} runId=${run.id} />`}<//>`;
}
