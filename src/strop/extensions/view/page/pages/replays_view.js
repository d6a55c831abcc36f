// Stored results of `strop replay`: a step again, under other settings.
import { html } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatCount, formatNumber, formatTime, printable, toSeconds } from "../lib/format.js";
import { rolloutLink } from "../lib/rollouts.js";
import { linkTo } from "../lib/route.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";

const MOVED_SHOWN = 10;

export function ReplaysView({ runs, run }) {
  const replays = useApi(["runs", run.id, "replays"]);
  return html`<${Title} text=${`Replays: ${run.name}`} note="steps run again under other settings"><${RunSelect} runs=${runs} /><//>
    <${Answer} of=${replays} what="the replays">${(rows) => {
      if (!rows.length) return html`<${Empty}>No replay is stored. <code>strop replay ${run.folder ?? "RUN"} --step N loss_fn.ratio_clip_max=0.28</code> runs a step again, and what came out is shown here.<//>`;
      return [...rows].reverse().map(({ file, ...replay }) => html`<${Replay} key=${file} name=${file} replay=${replay} />`);
    }}<//>`;
}

function Replay({ name, replay }) {
  const { step, overrides = [], as_it_was: before, changed: after } = replay;
  const outcomes = [["as it was", before], ["changed", after]].filter(([, outcome]) => outcome);
  return html`<section class="card"><header>
      <h2>Step ${step} ${overrides.length ? html`with <code>${printable(overrides.join(" "))}</code>` : "without overrides"}</h2>
      <span class="pale">${replay.time ? formatTime(toSeconds(replay.time)) : printable(name)} <a href=${linkTo(["rollouts", String(step)])}>its rollouts</a></span></header>
    <${Reproduction} found=${replay.reproduction} />
    ${outcomes.length > 0 && html`<${Outcomes} outcomes=${outcomes} replay=${replay} />`}
    ${outcomes.map(([title, outcome]) => html`<${Moved} title=${title} step=${step} rollouts=${outcome.moved_most ?? []} />`)}
  </section><br />`;
}

/** Whether the step as it was gave what the run logged. */
function Reproduction({ found }) {
  if (!found) return null;
  const different = Object.entries(found.different ?? {});
  if (!different.length) return html`<p class="good">✓ As it was, it gives what the run logged: ${found.compared} metrics are equal to the last digit.</p>`;
  return html`<details><summary class="warn">As it was, ${different.length} of ${found.compared} metrics are not what the run logged.</summary>
    <div class="scroll"><table><thead><tr><th>metric</th><th class="number">logged</th><th class="number">replayed</th></tr></thead><tbody>
      ${different.map(([name, [logged, replayed]]) => html`<tr><td>${name}</td><td class="number">${formatNumber(logged, 8)}</td><td class="number">${formatNumber(replayed, 8)}</td></tr>`)}
    </tbody></table></div></details>`;
}

function Outcomes({ outcomes, replay }) {
  const rows = [["loss", "loss"], ["norm of the gradient", "grad_norm"], ["tokens in the loss", "tokens"], ["clipped tokens", "clipped_tokens"]];
  const facts = [
    ["angle between the gradients", replay.gradient_degrees, "°"],
    ["angle between the changes of the weights", replay.change_degrees, "°"],
    ["size of the change, to that as it was", replay.change_ratio, " ×"],
  ].filter(([, value]) => Number.isFinite(value));
  return html`<div class="scroll"><table><thead><tr><th></th>${outcomes.map(([title]) => html`<th class="number">${title}</th>`)}</tr></thead><tbody>
      ${rows.map(([title, key]) => html`<tr><td>${title}</td>${outcomes.map(([, outcome]) => html`<td class="number">${formatNumber(outcome[key], 6)}</td>`)}</tr>`)}
    </tbody></table></div>
    ${facts.length > 0 && html`<dl class="facts">${facts.map(([title, value, unit]) => html`<dt>${title}</dt><dd>${formatNumber(value, 4)}${unit}</dd>`)}</dl>`}`;
}

function Moved({ title, step, rollouts }) {
  if (!rollouts.length) return null;
  return html`<details><summary>Rollouts that move most, ${title}</summary><div class="scroll"><table>
    <thead><tr><th>rollout</th><th>task</th><th class="number">reward</th><th class="number">advantage</th><th class="number">moved</th><th class="number">gradient</th><th class="number">tokens</th><th class="number">clipped</th></tr></thead>
    <tbody>${rollouts.slice(0, MOVED_SHOWN).map(
      (rollout) => html`<tr><td class="nowrap"><a href=${rolloutLink({ ...rollout, step })}>group ${rollout.group}, sample ${rollout.sample}</a></td><td>${printable(rollout.task_id)}</td>
        ${[rollout.reward, rollout.advantage, rollout.moved, rollout.gradient].map((value) => html`<td class="number">${formatNumber(value, 4)}</td>`)}
        ${[rollout.tokens, rollout.clipped].map((value) => html`<td class="number">${formatCount(value)}</td>`)}</tr>`,
    )}</tbody></table></div></details>`;
}
