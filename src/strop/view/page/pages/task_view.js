// One task over training time: how it was answered at step 10, 50, 200.
import { html, useState } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatNumber, formatSigned, printable } from "../lib/format.js";
import { groupLink, rolloutLink } from "../lib/rollouts.js";
import { Chart } from "../parts/chart.js";
import { seriesStyle } from "../lib/palette.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";

const STEPS_AT_ONCE = 20;

export function TaskView({ runs, run, path }) {
  const task = path.join("/");
  const answer = useApi(["runs", run.id, "tasks", task]);
  return html`<${Title} text=${`Task ${task}`} note=${run.name}><${RunSelect} runs=${runs} /><//>
    <${Answer} of=${answer} what="the task">${(data) => html`<${Steps} key=${task} steps=${Array.isArray(data) ? data : data.steps} note=${data.note} />`}<//>`;
}

function Steps({ steps, note }) {
  const [limit, setLimit] = useState(STEPS_AT_ONCE);
  if (!steps.length) return html`<${Empty}>No rollout of this task is stored.<//>`;
  return html`${note && html`<p class="pale">${note}</p>`}
    ${steps.length > 1 && html`<section class="chart"><header><h3>reward, mean with lowest and highest</h3></header><${Chart} name="reward" lines=${[rewardLine(steps)]} height=${160} /></section>`}
    ${steps.slice(0, limit).map((each) => html`<${Step} key=${each.step} step=${each.step} rollouts=${each.rollouts} />`)}
    ${steps.length > limit && html`<p><button type="button" onClick=${() => setLimit(limit + STEPS_AT_ONCE)}>Show more of ${steps.length} steps</button></p>`}`;
}

function rewardLine(steps) {
  const known = steps.map(({ step, rollouts }) => [step, rollouts.map((rollout) => rollout.reward).filter(Number.isFinite)]).filter(([, rewards]) => rewards.length);
  known.sort(([a], [b]) => a - b);
  return {
    label: "reward",
    style: seriesStyle(0),
    x: known.map(([step]) => step),
    y: known.map(([, rewards]) => rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length),
    low: known.map(([, rewards]) => Math.min(...rewards)),
    high: known.map(([, rewards]) => Math.max(...rewards)),
  };
}

function Step({ step, rollouts }) {
  const sorted = [...rollouts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  return html`<h2>Step ${step} ${sorted[0] && html`<a href=${groupLink(sorted[0])}>its group</a>`}</h2>
    <div class="columns" tabindex="0" role="list" aria-label=${`Answers at step ${step}`}>
      ${sorted.map(
        (rollout) => html`<article role="listitem" class="card">
          <header><h3><a href=${rolloutLink(rollout)}>sample ${rollout.sample}</a></h3><b>reward ${formatNumber(rollout.reward, 3)}</b></header>
          <p class="pale">advantage ${formatSigned(rollout.advantage)}, ${rollout.tokens} tokens, ${rollout.ending || "no ending"}</p>
          <pre class="text">${printable(rollout.text ?? rollout.preview ?? "")}</pre>
        </article>`,
      )}
    </div>`;
}
