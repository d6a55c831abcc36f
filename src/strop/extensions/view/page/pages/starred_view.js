// Starred examples, and their export.
import { html } from "../lib/ui.js";
import { apiAddress, putJson, useApi } from "../lib/api.js";
import { printable } from "../lib/format.js";
import { rolloutLink } from "../lib/rollouts.js";
import { linkTo } from "../lib/route.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";

export function StarredView({ runs, run }) {
  const stars = useApi(["runs", run.id, "stars"]);
  const remove = ({ step, group, sample, validation }) =>
    putJson(["runs", run.id, "stars"], { step, group, sample, validation, starred: false, note: "" }).then(stars.reload, stars.reload);
  return html`<${Title} text=${`Starred: ${run.name}`}><${RunSelect} runs=${runs} />
      <a href=${apiAddress(["stars", "export"], { run: run.id })} download=${`${run.id}_stars.jsonl`}>Export as JSON lines</a>
      ${runs.all.length > 1 && html`<a href=${apiAddress(["stars", "export"])} download="stars.jsonl">Export those of all runs</a>`}<//>
    <${Answer} of=${stars} what="the stars">${(data) => {
      const rows = [...data].reverse();
      if (!rows.length) return html`<${Empty}>Nothing is starred yet. Open a rollout and press <kbd>*</kbd>.<//>`;
      return html`<div class="scroll"><table>
        <thead><tr><th>rollout</th><th>note</th><th></th></tr></thead>
        <tbody>${rows.map(
          (row) => html`<tr key=${`${row.validation}/${row.step}/${row.group}/${row.sample}`}>
            <td class="nowrap"><a href=${row.validation ? linkTo(["validation", String(row.step)], { at: `${row.group}-${row.sample}` }) : rolloutLink(row)}>★ ${row.validation ? "validation after step" : "step"} ${row.step}, group ${row.group}, sample ${row.sample}</a></td>
            <td>${printable(row.note ?? "")}</td>
            <td><button type="button" onClick=${() => remove(row)}>Remove</button></td></tr>`,
        )}</tbody></table></div>`;
    }}<//>`;
}
