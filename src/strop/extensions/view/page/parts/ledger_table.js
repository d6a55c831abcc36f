// What each term of the loss contributed at each token of a rollout.
import { html, useState } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatNumber, printable } from "../lib/format.js";
import { Answer, Empty } from "./notice.js";

const ROWS_AT_ONCE = 300;

/** The ledger {data, error, loading}: data.terms are the terms of the loss by name, a value for each token. It is asked for when `isWanted`. */
export function useLedger(run, rollout, isWanted) {
  return useApi(isWanted ? ["runs", run.id, "ledger", String(rollout.step), String(rollout.group), String(rollout.sample)] : null);
}

export function LedgerTable({ run, rollout }) {
  const ledger = useLedger(run, rollout, true);
  return html`<${Answer} of=${ledger} what="the ledger">${(data) => html`<${Terms} ledger=${data} rollout=${rollout} />`}<//>`;
}

function Terms({ ledger, rollout }) {
  const [limit, setLimit] = useState(ROWS_AT_ONCE);
  const names = Object.keys(ledger.terms ?? {});
  if (!names.length) return html`<${Empty}>${ledger.note || "No token of this rollout has a term of the loss."}<//>`;
  const columns = names.map((name) => ledger.terms[name]);
  const scales = columns.map((values) => values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 1e-30));
  const count = Math.max(...columns.map((values) => values.length));
  const places = Array.from({ length: Math.min(count, limit) }, (_, index) => index);
  return html`<${Sums} ledger=${ledger} names=${names} />
    <div class="scroll"><table>
      <thead><tr><th class="number">token</th><th>text</th>${names.map((name) => html`<th class="number">${name}</th>`)}<th class="number">share of gradient</th></tr></thead>
      <tbody>
        ${places.map(
          (place) => html`<tr key=${place}><td class="number">${place}</td><td class="mono nowrap">${JSON.stringify(printable(rollout.pieces?.[place] ?? ""))}</td>
            ${columns.map((values, index) => html`<td class="number"><${Bar} value=${values[place]} scale=${scales[index]} /></td>`)}
            <td class="number">${formatNumber(ledger.share?.[place], 3)}</td></tr>`,
        )}
      </tbody></table></div>
    ${count > limit && html`<p><button type="button" onClick=${() => setLimit(limit + 1000)}>Show more of ${count} tokens</button></p>`}`;
}

/** The sum of each term over this rollout and over the step, and what the step logged as its loss. */
function Sums({ ledger, names }) {
  return html`${ledger.note && html`<p class="pale">${ledger.note}</p>`}
    <div class="scroll"><table>
      <thead><tr><th>sum of a term</th><th class="number">over this rollout</th><th class="number">over the step</th></tr></thead>
      <tbody>
        ${names.map((name) => html`<tr><td>${name}</td><td class="number">${formatNumber(ledger.totals?.[name], 6)}</td><td class="number">${formatNumber(ledger.step_totals?.[name], 6)}</td></tr>`)}
        ${Object.entries(ledger.logged ?? {}).map(([name, value]) => html`<tr class="current"><td>logged as ${name}</td><td></td><td class="number">${formatNumber(value, 6)}</td></tr>`)}
        ${Number.isFinite(ledger.difference) && html`<tr><td class="pale">sum less the logged loss</td><td></td><td class="number">${formatNumber(ledger.difference, 2)}</td></tr>`}
      </tbody></table></div><br />`;
}

function Bar({ value, scale }) {
  if (value === null || value === undefined) return "–";
  return html`${formatNumber(value, 3)}<div class="bar" aria-hidden="true"><div class=${value < 0 ? "negative" : ""} style=${{ width: `${(Math.abs(value) / scale) * 100}%` }}></div></div>`;
}
