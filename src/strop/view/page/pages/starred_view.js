// Starred examples, and their export.
import { html } from "../lib/ui.js";
import { fetchJson, useApi } from "../lib/api.js";
import { formatNumber, printable } from "../lib/format.js";
import { oneLine, rolloutLink } from "../lib/rollouts.js";
import { Answer, Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";

export function StarredView({ runs, run }) {
  const stars = useApi(["runs", run.id, "stars"]);
  const remove = ({ step, group, sample }) =>
    fetchJson(["runs", run.id, "stars"], {}, { method: "PUT", body: { step, group, sample, starred: false, note: "" } }).then(stars.reload, stars.reload);
  return html`<${Title} text=${`Starred: ${run.name}`}><${RunSelect} runs=${runs} />
      <a href="api/stars/export" download="stars.jsonl">Export those of all runs (JSON lines)</a><//>
    <${Answer} of=${stars} what="the stars">${(data) => {
      const rows = data.rows ?? data.stars ?? data;
      if (!rows.length) return html`<${Empty}>Nothing is starred yet. Open a rollout and press <kbd>*</kbd>.<//>`;
      return html`<div class="scroll"><table>
        <thead><tr><th>rollout</th><th>note</th><th class="number">reward</th><th>beginning of the text</th><th></th></tr></thead>
        <tbody>${rows.map(
          (row) => html`<tr key=${`${row.step}/${row.group}/${row.sample}`}>
            <td class="nowrap"><a href=${rolloutLink(row)}>★ step ${row.step}, group ${row.group}, sample ${row.sample}</a></td>
            <td>${printable(row.note ?? "")}</td><td class="number">${formatNumber(row.reward, 3)}</td><td>${oneLine(row.preview ?? "", 160)}</td>
            <td><button type="button" onClick=${() => remove(row)}>Remove</button></td></tr>`,
        )}</tbody></table></div>`;
    }}<//>`;
}
