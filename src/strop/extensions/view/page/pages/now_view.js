// What a run does now: its state, who waits for whom, what it reported.
import { html } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatAgo, formatDuration, formatTime, formatValue, toSeconds } from "../lib/format.js";
import { Findings, useHealth } from "../parts/health.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";
import { describeProgress } from "../lib/runs.js";

export function NowView({ runs, run }) {
  const status = useApi(["runs", run.id, "status"], {}, { poll: true });
  return html`<${Title} text=${`Now: ${run.name}`} note=${describeProgress(run)}><${RunSelect} runs=${runs} /><//>
    <${Answer} of=${status} what="the status">${(data) => html`<${Status} run=${run} data=${data} />`}<//>`;
}

function Status({ run, data }) {
  const status = data;
  if (!status.state) return html`<${Empty}>${status.why ?? "This run has no status.json."}<//><${Starts} starts=${status.starts ?? []} /><${Incidents} run=${run} data=${data} />`;
  const isWrong = status.state === "running" && !status.live;
  return html`
    <p class=${isWrong ? "notice" : ""}><b>${status.verdict}</b>${status.why && status.why !== status.verdict ? `: ${status.why}` : ""}</p>
    ${status.error && html`<p class="notice">${status.error}</p>`}
    ${(status.troubles ?? []).map((text) => html`<p class="notice">${text}</p>`)}
    <div class="cards">
      <section class="card"><h2>State</h2><dl class="facts">
        <dt>state</dt><dd>${status.state}${data.live ? html` <span class="badge live">live</span>` : ""}</dd>
        <dt>${status.phase_is_current === false ? "did last" : "doing"}</dt><dd>${status.phase}</dd>
        <dt>last step</dt><dd>${status.step > 0 ? `${status.step}${status.stepped ? `, ${formatAgo(status.stepped)}` : ""}` : "none yet"}</dd>
        <dt>heartbeat</dt><dd>${status.heartbeat_age === null ? "unknown" : `${formatDuration(status.heartbeat_age)} ago`}</dd>
        ${status.loop_silent > 1 && html`<dt>event loop</dt><dd class="bad">blocked for ${formatDuration(status.loop_silent)}</dd>`}
        <dt>started</dt><dd>${formatTime(toSeconds(status.started))}</dd>
        <dt>process</dt><dd>${[status.pid, status.host].filter(Boolean).join(" on ")}</dd>
        ${status.checkpoint && html`<dt>checkpoint</dt><dd class="mono">${formatValue(status.checkpoint)}</dd>`}
        ${status.stacks && html`<dt>stacks</dt><dd class="mono">${status.stacks}</dd>`}
      </dl></section>
      <section class="card"><h2>Who waits for whom</h2><${Waits} waits=${status.waits ?? []} /></section>
      <section class="card"><h2>Versions</h2><dl class="facts">
        ${Object.entries(status.versions ?? {}).map(([name, version]) => html`<dt>${name}</dt><dd>${version}</dd>`)}</dl></section>
    </div>
    ${status.command && html`<h2>Command</h2><pre class="text block">${status.command}</pre>`}
    <${Starts} starts=${status.starts ?? []} />
    <${Incidents} run=${run} data=${data} />
    <${Entries} title="Reports of the watchdog" entries=${status.reports} />
    <${Entries} title="Last notes" entries=${status.notes} />`;
}

/** What the run was started with, and on what. */
function Starts({ starts }) {
  if (!starts.length) return null;
  return html`<h2>Starts</h2><div class="cards">${starts.map(
    ({ after_step: after, facts }) => html`<section class="card"><h3>${after ? `continued after step ${after}` : "from the beginning"}</h3>
      <dl class="facts">${Object.entries(facts).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></section>`,
  )}</div>`;
}

/** Open waits as chains: a wait stands under the one that waits for it. */
function Waits({ waits }) {
  if (!waits.length) return html`<p class="pale">Nobody waits.</p>`;
  const byNumber = new Map(waits.map((wait) => [wait.number, wait]));
  const children = new Map();
  for (const wait of waits) {
    const parent = byNumber.has(wait.parent) && wait.parent !== wait.number ? wait.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), wait]);
  }
  const most = 40;
  const list = (parent, depth) => {
    const members = children.get(parent) ?? [];
    if (!members.length || depth > 12) return null;
    return html`<ul class=${"tree" + (parent === null ? " root" : "")}>
      ${members.slice(0, most).map(
        (wait) => html`<li><b>${wait.who}</b> waits for <b>${wait.on}</b>${wait.detail ? ` (${wait.detail})` : ""}
          <span class="pale"> ${describeWait(wait)}</span>${list(wait.number, depth + 1)}</li>`,
      )}
      ${members.length > most && html`<li class="pale">and ${members.length - most} more</li>`}
    </ul>`;
  };
  return list(null, 0);
}

function describeWait(wait) {
  return [`for ${formatDuration(wait.seconds)}`, wait.overdue ? "too long" : "", wait.running ? "runs now" : "", wait.limit ? `limit ${formatDuration(wait.limit)}` : "", wait.kind].filter(Boolean).join(", ");
}

/** What is wrong with the run, and what it reported, {when, text}. */
function Incidents({ run, data: { incidents = [] } }) {
  const findings = useHealth(run)?.findings ?? [];
  if (!findings.length && !incidents.length) return null;
  return html`<h2>Warnings and incidents</h2><${Findings} run=${run} findings=${findings} most=${Infinity} />
    ${incidents.map(({ when, text }) => html`<p class="notice mild">${when ? `${formatTime(toSeconds(when))}: ` : ""}${text}</p>`)}`;
}

function Entries({ title, entries }) {
  if (!entries?.length) return null;
  return html`<h2>${title}</h2><div class="scroll"><table class="entries"><tbody>
    ${[...entries].reverse().map((entry) => html`<tr><td class="nowrap pale">${formatTime(toSeconds(entry.when))}</td><td><pre class="text">${entry.text}</pre></td></tr>`)}
  </tbody></table></div>`;
}
