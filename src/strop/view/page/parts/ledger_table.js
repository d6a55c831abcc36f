// What each term of the loss contributed at each token of a rollout.
import { html, useMemo, useState } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatNumber, printable } from "../lib/format.js";
import { Answer, Empty } from "./notice.js";

const ROWS_AT_ONCE = 300;

/** The ledger as {data: {terms: {name: [value of each token]}, gradient_share, ...}, error, loading}; it is asked for when `isWanted`. */
export function useLedger(run, rollout, isWanted) {
  const path = ["runs", run.id, "ledger", String(rollout.step), String(rollout.group), String(rollout.sample)];
  const answer = useApi(isWanted ? path : null);
  const data = useMemo(() => (answer.data ? readLedger(answer.data) : null), [answer.data]);
  return { ...answer, data };
}

/** Columns of numbers by name, in whichever form they come: `terms`, `columns`, or a list of rows. */
export function readLedger(answer) {
  const rows = Array.isArray(answer.tokens) && typeof answer.tokens[0] === "object" ? answer.tokens : (answer.rows ?? null);
  const terms = answer.terms && !Array.isArray(answer.terms) ? answer.terms : (answer.columns ?? (rows ? columnsOf(rows) : {}));
  const numeric = Object.entries(terms).filter(([, values]) => Array.isArray(values) && values.some((value) => Number.isFinite(value)));
  const plain = Object.entries(answer).filter(([, value]) => value === null || typeof value !== "object");
  return { ...answer, terms: Object.fromEntries(numeric), facts: plain, gradient: answer.gradient_share ?? answer.gradient_norm_share ?? null };
}

function columnsOf(rows) {
  const names = [...new Set(rows.flatMap(Object.keys))];
  return Object.fromEntries(names.map((name) => [name, rows.map((row) => row[name] ?? null)]));
}

export function LedgerTable({ run, rollout }) {
  const ledger = useLedger(run, rollout, true);
  return html`<${Answer} of=${ledger} what="the ledger">${(data) => html`<${Terms} ledger=${data} rollout=${rollout} />`}<//>`;
}

function Terms({ ledger, rollout }) {
  const [limit, setLimit] = useState(ROWS_AT_ONCE);
  const names = Object.keys(ledger.terms);
  if (!names.length) return html`<${Empty}>The ledger of this rollout is empty: none of its tokens was trained on.<//>`;
  const count = Math.max(...names.map((name) => ledger.terms[name].length));
  const sums = names.map((name) => ledger.terms[name].reduce((sum, value) => sum + (value ?? 0), 0));
  const scales = names.map((name) => ledger.terms[name].reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 1e-30));
  const places = Array.from({ length: Math.min(count, limit) }, (_, index) => index);
  return html`
    <dl class="facts">${ledger.facts.map(([name, value]) => html`<dt>${name}</dt><dd>${typeof value === "number" ? formatNumber(value, 8) : printable(String(value ?? ""))}</dd>`)}</dl>
    <div class="scroll"><table>
      <thead><tr><th class="number">token</th><th>text</th>${names.map((name) => html`<th class="number">${name}</th>`)}${ledger.gradient && html`<th class="number">share of gradient</th>`}</tr></thead>
      <tbody>
        <tr class="current"><td></td><td>sum</td>${sums.map((sum) => html`<td class="number">${formatNumber(sum, 6)}</td>`)}${ledger.gradient && html`<td></td>`}</tr>
        ${places.map(
          (place) => html`<tr key=${place}><td class="number">${place}</td><td class="mono">${JSON.stringify(printable(rollout.pieces?.[place] ?? ""))}</td>
            ${names.map((name, index) => html`<td class="number"><${Bar} value=${ledger.terms[name][place]} scale=${scales[index]} /></td>`)}
            ${ledger.gradient && html`<td class="number">${formatNumber(ledger.gradient[place], 3)}</td>`}</tr>`,
        )}
      </tbody></table></div>
    ${count > limit && html`<p><button type="button" onClick=${() => setLimit(limit + 1000)}>Show more of ${count} tokens</button></p>`}`;
}

function Bar({ value, scale }) {
  if (value === null || value === undefined) return "–";
  return html`${formatNumber(value, 3)}<div class="bar" aria-hidden="true"><div class=${value < 0 ? "negative" : ""} style=${{ width: `${(Math.abs(value) / scale) * 100}%` }}></div></div>`;
}
