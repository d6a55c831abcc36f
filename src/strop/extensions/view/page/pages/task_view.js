// One task over training time: how it was answered at step 10, 50, 200.
import { html, useState } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { groupLink } from "../lib/rollouts.js";
import { Chart } from "../parts/chart.js";
import { seriesStyle } from "../lib/palette.js";
import { AnswerCard } from "../parts/answer_card.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";

const STEPS_AT_FIRST = 8; // spread over the run

export function TaskView({ runs, run, path }) {
  const task = path.join("/");
  const answer = useApi(["runs", run.id, "tasks", task]);
  return html`<${Title} text=${`Task ${task}`} note=${run.name}><${RunSelect} runs=${runs} /><//>
    <${Answer} of=${answer} what="the task">${(data) => html`<${Steps} key=${task} steps=${data} runId=${run.id} />`}<//>`;
}

function Steps({ steps, runId }) {
  const [isWhole, setWhole] = useState(false);
  if (!steps.length) return html`<${Empty}>No rollout of this task is stored.<//>`;
  return html`${steps.length > 1 && html`<section class="chart"><header><h2>reward, mean with lowest and highest</h2></header><${Chart} name="reward" lines=${[rewardLine(steps)]} height=${160} /></section>`}
    ${(isWhole ? steps : spread(steps, STEPS_AT_FIRST)).map((each) => html`<${Step} key=${each.step} step=${each.step} rollouts=${each.rollouts} runId=${runId} />`)}
    ${!isWhole && steps.length > STEPS_AT_FIRST && html`<p><button type="button" onClick=${() => setWhole(true)}>Show all ${steps.length} steps</button></p>`}`;
}

/** The first, the last, and some between. */
function spread(steps, count) {
  if (steps.length <= count) return steps;
  return Array.from({ length: count }, (_, index) => steps[Math.round((index * (steps.length - 1)) / (count - 1))]);
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

function Step({ step, rollouts, runId }) {
  const sorted = [...rollouts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  return html`<h2>Step ${step} ${sorted[0] && html`<a href=${groupLink(sorted[0])}>its group</a>`}</h2>
    <ul class="columns" tabindex="0" aria-label=${`Answers at step ${step}`}>
      ${sorted.map((rollout) => html`<${AnswerCard} key=${rollout.sample} rollout=${rollout} runId=${runId} />`)}
    </ul>`;
}
