// Stored results of `strop replay`: a step again, under other settings.
import { html } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatTime, formatValue, printable, toSeconds } from "../lib/format.js";
import { linkTo } from "../lib/route.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";

const HEAD = new Set(["step", "name", "when", "created", "overrides", "command", "file"]);

export function ReplaysView({ runs, run }) {
  const replays = useApi(["runs", run.id, "replays"]);
  return html`<${Title} text=${`Replays: ${run.name}`} note="steps run again under other settings"><${RunSelect} runs=${runs} /><//>
    <${Answer} of=${replays} what="the replays">${(data) => {
      const rows = data.rows ?? data.replays ?? data;
      if (!rows.length) return html`<${Empty}>No replay is stored. <code>strop replay ${run.folder ?? "RUN"} --step N loss_fn.ratio_clip_max=0.28</code> runs a step again and stores what came out here.<//>`;
      return rows.map((replay, index) => html`<${Replay} key=${replay.file ?? index} replay=${replay} />`);
    }}<//>`;
}

function Replay({ replay }) {
  const values = replay.result ?? replay;
  const when = replay.when ?? replay.created;
  const overrides = Array.isArray(replay.overrides) ? replay.overrides.join(" ") : replay.overrides ? formatValue(replay.overrides) : "";
  const entries = Object.entries(values).filter(([name]) => !HEAD.has(name));
  const plain = entries.filter(([, value]) => value === null || typeof value !== "object" || isListOfPlain(value));
  return html`<section class="card"><header><h3>Step ${replay.step ?? "?"} ${overrides ? html`with <code>${printable(overrides)}</code>` : "without overrides"}</h3>
      <span class="pale">${when ? formatTime(toSeconds(when)) : (replay.file ?? "")} <a href=${linkTo(["rollouts", String(replay.step)])}>its rollouts</a></span></header>
    <dl class="facts">${plain.map(([name, value]) => html`<dt>${name}</dt><dd>${printable(formatValue(value))}</dd>`)}</dl>
    ${entries.filter(([, value]) => value !== null && typeof value === "object" && !isListOfPlain(value)).map(([name, value]) => html`<h3>${name}</h3><${ValueTable} value=${value} />`)}
  </section><br />`;
}

const isListOfPlain = (value) => Array.isArray(value) && value.every((each) => each === null || typeof each !== "object");

/** A list of records as a table, or a record as names and values; a record of records has a row for each. */
function ValueTable({ value }) {
  if (!Array.isArray(value) && Object.values(value).every((each) => each === null || typeof each !== "object")) {
    return html`<dl class="facts">${Object.entries(value).map(([name, each]) => html`<dt>${name}</dt><dd>${printable(formatValue(each))}</dd>`)}</dl>`;
  }
  const rows = Array.isArray(value) ? value : Object.entries(value).map(([name, each]) => (each && typeof each === "object" && !Array.isArray(each) ? { name, ...each } : { name, value: each }));
  const names = [...new Set(rows.flatMap((row) => Object.keys(row ?? {})))];
  return html`<div class="scroll"><table><thead><tr>${names.map((name) => html`<th>${name}</th>`)}</tr></thead>
    <tbody>${rows.slice(0, 500).map((row) => html`<tr>${names.map((name) => html`<td class=${typeof row[name] === "number" ? "number" : ""}>${printable(formatValue(row[name]))}</td>`)}</tr>`)}</tbody></table></div>`;
}
