// The configuration of a run, and what differs in another.
import { html, useMemo } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatValue } from "../lib/format.js";
import { setParams } from "../lib/route.js";
import { searchNames } from "../lib/series.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Segments } from "../parts/segments.js";
import { Title } from "../parts/title.js";

export function ConfigurationView({ runs, run, params }) {
  const other = runs.all.find((each) => each.id === params.against && each.id !== run.id) ?? null;
  return html`<${Title} text=${`Configuration: ${run.name}`}><${RunSelect} runs=${runs} /><//>
    <div class="toolbar">
      <label class="wide"><input type="search" placeholder="find keys" aria-label="Find keys" value=${params.find ?? ""}
        onInput=${(event) => setParams({ find: event.target.value }, { replace: true })} /></label>
      ${runs.all.length > 1 &&
      html`<label>difference to <select value=${other?.id ?? ""} onChange=${(event) => setParams({ against: event.target.value })}>
        <option value="">nothing</option>
        ${runs.all.filter((each) => each.id !== run.id).map((each) => html`<option value=${each.id}>${each.name}</option>`)}
      </select></label>`}
      ${!other && html`<${Segments} label="Form" options=${[["", "changed"], ["keys", "all keys"], ["yaml", "YAML"]]} value=${params.form ?? ""} onChange=${(form) => setParams({ form })} />`}
    </div>
    ${other ? html`<${Difference} run=${run} other=${other} find=${params.find} />` : html`<${Configuration} run=${run} find=${params.find} form=${params.form} />`}`;
}

function Configuration({ run, find, form }) {
  const config = useApi(["runs", run.id, "config"]);
  return html`<${Answer} of=${config} what="the configuration">${(data) =>
    form === "yaml"
      ? html`<pre class="text block">${data.text}</pre>`
      : html`<${Keys} values=${data.values ?? {}} changed=${data.changed ?? {}} isWhole=${form === "keys"} find=${find} />`}<//>`;
}

/** All keys, or those that differ from their defaults, with these. */
function Keys({ values, changed, isWhole, find }) {
  const keys = useMemo(() => searchKeys(Object.keys(isWhole ? values : changed), find, (key) => values[key]), [values, changed, isWhole, find]);
  if (!keys.length && !isWhole && !find) return html`<${Empty}>Every key has its default.<//>`;
  if (!keys.length) return html`<${Empty}>No key has this in its name or value.<//>`;
  return html`<div class="scroll"><table class="difference"><thead><tr><th>key</th><th>value</th>${!isWhole && html`<th>default</th>`}</tr></thead>
    <tbody>${keys.map((key) => html`<tr key=${key}><td>${key}</td><td>${showValue(values[key])}</td>${!isWhole && html`<td class="pale">${showValue(changed[key])}</td>`}</tr>`)}</tbody></table></div>`;
}

function Difference({ run, other, find }) {
  const answer = useApi(["compare", "config"], { a: run.id, b: other.id });
  return html`<${Answer} of=${answer} what="the difference">${(rows) => {
    const shown = searchKeys(rows.map((row) => row.key), find, () => "");
    if (!rows.length) return html`<${Empty}>The two configurations are equal.<//>`;
    return html`<p class="pale">${rows.length} keys differ</p>
      <div class="scroll"><table class="difference"><thead><tr><th>key</th><th>${run.name}</th><th>${other.name}</th></tr></thead>
      <tbody>${rows.filter((row) => shown.includes(row.key)).map((row) => html`<tr key=${row.key}><td>${row.key}</td><td>${showValue(row.a)}</td><td>${showValue(row.b)}</td></tr>`)}</tbody></table></div>`;
  }}<//>`;
}

function searchKeys(keys, find, valueOf) {
  if (!find) return keys;
  const named = new Set(searchNames(keys, find));
  return keys.filter((key) => named.has(key) || formatValue(valueOf(key)).toLowerCase().includes(find.toLowerCase()));
}

const showValue = (value) => (value === null || value === undefined ? html`<span class="pale">null</span>` : html`<span class="mono">${formatValue(value)}</span>`);
