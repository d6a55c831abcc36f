// What is answered: the most frequent final answers, by step.
import { html } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatCount, formatShare, printable } from "../lib/format.js";
import { linkTo, setParams } from "../lib/route.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Segments } from "../parts/segments.js";
import { Title } from "../parts/title.js";

export function AnswersView({ runs, run, params }) {
  const isValidation = params.of === "validation";
  const answer = useApi(["runs", run.id, "answers"], { validation: isValidation ? 1 : "" });
  return html`<${Title} text=${`Answers: ${run.name}`} note="the most frequent final answers, in steps spread over the run"><${RunSelect} runs=${runs} /><//>
    <div class="toolbar"><${Segments} label="Of" options=${[["", "training"], ["validation", "validation"]]} value=${isValidation ? "validation" : ""} onChange=${(of) => setParams({ of })} />
      <span class="pale">the boxed or tagged answer, what follows "answer is", or the last line</span></div>
    <${Answer} of=${answer} what="answers">${(data) => html`<${Frequencies} data=${data} view=${isValidation ? "validation" : "rollouts"} />`}<//>`;
}

function Frequencies({ data: { steps, totals, distinct, rows }, view }) {
  if (!rows.length) return html`<${Empty}>No answers are stored.<//>`;
  const share = (count, step) => count / Math.max(totals[step], 1);
  const right = (row) => row.references.reduce((sum, count) => sum + count, 0) / Math.max(totals.reduce((sum, count) => sum + count, 0), 1);
  return html`<p class="pale" role="status">${formatCount(distinct)} different answers in these steps</p>
    <div class="scroll"><table class="answers"><thead><tr><th>answer</th><th class="number" title="share of the tasks whose reference it is">is right</th>
      ${steps.map((step) => html`<th class="number"><a href=${linkTo([view, String(step)])}>step ${step}</a></th>`)}</tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr key=${row.answer}><td class="mono">${row.answer ? printable(row.answer) : html`<span class="pale">none</span>`}</td><td class="number">${formatShare(right(row))}</td>
        ${row.counts.map((count, step) => html`<td class=${"number" + shade(share(count, step))} title=${`${formatShare(share(count, step))} of ${formatCount(totals[step])}`}>${count ? formatCount(count) : html`<span class="pale">0</span>`}</td>`)}</tr>`,
    )}
      <tr><td class="pale">rollouts</td><td></td>${totals.map((total) => html`<td class="number pale">${formatCount(total)}</td>`)}</tr></tbody></table></div>`;
}

function shade(share) {
  return share >= 0.75 ? " high-3" : share >= 0.5 ? " high-2" : share >= 0.25 ? " high-1" : "";
}
