// What a run does now: its state, who waits for whom, what it reported.
import { html } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatAgo, formatDuration, formatTime, formatValue, toSeconds } from "../lib/format.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";
import { describeProgress } from "../lib/runs.js";

export function NowView({ runs, run }) {
  const status = useApi(["runs", run.id, "status"], {}, { poll: true });
  return html`<${Title} text=${`Now: ${run.name}`} note=${describeProgress(run)}><${RunSelect} runs=${runs} /><//>
    <${Answer} of=${status} what="the status">${(data) => html`<${Status} data=${data} />`}<//>`;
}

function Status({ data }) {
  const status = data.status ?? data;
  if (!status?.state) {
    return html`<${Empty}>${data.reason ?? "This run has no status.json: it ended before there was one, or its folder was copied without it."}<//>
      <${Incidents} data=${data} />`;
  }
  const age = data.heartbeat_age ?? (status.written ? Date.now() / 1000 - status.written : null);
  const isSilent = status.state === "running" && age !== null && age > Math.max(4 * (status.interval ?? 5), 30);
  return html`
    ${isSilent && html`<p class="notice">status.json says that it runs, but nobody has written it for ${formatDuration(age)}: the process has died, or is frozen.</p>`}
    ${status.error && html`<p class="notice">${status.error}</p>`}
    ${(status.troubles ?? []).map((text) => html`<p class="notice">${text}</p>`)}
    <div class="cards">
      <section class="card"><h3>State</h3><dl class="facts">
        <dt>state</dt><dd>${status.state}${data.live ? html` <span class="badge live">live</span>` : ""}</dd>
        <dt>doing</dt><dd>${status.doing}</dd>
        <dt>last step</dt><dd>${status.step >= 0 ? `${status.step}${status.stepped ? `, ${formatAgo(status.stepped)}` : ""}` : "none yet"}</dd>
        <dt>heartbeat</dt><dd>${age === null ? "unknown" : `${formatDuration(age)} ago`}</dd>
        ${status.loop_silent > 1 && html`<dt>event loop</dt><dd class="bad">blocked for ${formatDuration(status.loop_silent)}</dd>`}
        <dt>started</dt><dd>${formatTime(toSeconds(status.started))}</dd>
        <dt>command</dt><dd class="mono">${status.command}</dd>
        <dt>process</dt><dd>${[status.pid, status.host].filter(Boolean).join(" on ")}</dd>
        ${status.checkpoints && html`<dt>checkpoints</dt><dd class="mono">${status.checkpoints}</dd>`}
        ${status.stacks && html`<dt>stacks</dt><dd class="mono">${status.stacks}</dd>`}
      </dl></section>
      <section class="card"><h3>Who waits for whom</h3><${Waits} waits=${status.waits ?? []} written=${status.written} /></section>
      <section class="card"><h3>Versions</h3><dl class="facts">
        ${Object.entries(status.versions ?? {}).map(([name, version]) => html`<dt>${name}</dt><dd>${version}</dd>`)}</dl></section>
    </div>
    <${Incidents} data=${data} />
    <${Entries} title="Reports of the watchdog" entries=${status.reports} />
    <${Entries} title="Last notes" entries=${status.notes} />`;
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
  const duration = wait.seconds ?? wait.duration ?? wait.elapsed;
  return [Number.isFinite(duration) ? `for ${formatDuration(duration)}` : "", wait.limit ? `limit ${formatDuration(wait.limit)}` : "", wait.kind].filter(Boolean).join(", ");
}

/** Warnings and incidents of the run, in whichever form they come: a text, or {when, text, step}. */
function Incidents({ data }) {
  const incidents = [...(data.incidents ?? []), ...(data.warnings ?? [])];
  if (!incidents.length) return null;
  return html`<h2>Warnings and incidents</h2>
    ${incidents.map((each) => html`<p class="notice mild">${typeof each === "string" ? each : describeIncident(each)}</p>`)}`;
}

function describeIncident({ when, step, text, name, ...rest }) {
  const place = [step !== undefined && step !== null ? `step ${step}` : "", when ? formatTime(toSeconds(when)) : ""].filter(Boolean).join(", ");
  const more = Object.entries(rest).map(([key, value]) => `${key} ${formatValue(value)}`).join(", ");
  return [place && `${place}:`, name, text, more].filter(Boolean).join(" ");
}

function Entries({ title, entries }) {
  if (!entries?.length) return null;
  return html`<h2>${title}</h2><div class="scroll"><table class="entries"><tbody>
    ${[...entries].reverse().map((entry) => html`<tr><td class="nowrap pale">${formatTime(toSeconds(entry.when))}</td><td><pre class="text">${entry.text}</pre></td></tr>`)}
  </tbody></table></div>`;
}
