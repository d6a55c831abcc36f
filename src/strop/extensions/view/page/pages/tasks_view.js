// The tasks that the run has trained on.
import { html, useEffect, useState } from "../lib/ui.js";
import { fetchJson, useApi } from "../lib/api.js";
import { formatCount, formatNumber, formatShare, formatSigned } from "../lib/format.js";
import { oneLine, taskLink } from "../lib/rollouts.js";
import { setParams } from "../lib/route.js";
import { Empty } from "../parts/notice.js";
import { describeReading } from "./rollouts_view.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";
import { VirtualRows } from "../parts/virtual_rows.js";

const COLUMNS = [
  { title: "task", width: "minmax(6rem, 1fr)", isName: true, sort: "task", cell: (row) => row.task },
  { title: "question", width: "minmax(8rem, 3fr)", isLong: true, cell: (row) => oneLine(row.question, 300) },
  { title: "rollouts", width: "5.5rem", isNumber: true, sort: "rollouts", cell: (row) => formatCount(row.rollouts) },
  { title: "in steps", width: "5.5rem", isMinor: true, isNumber: true, sort: "steps", cell: (row) => formatCount(row.steps) },
  { title: "last step", width: "5.5rem", isMinor: true, isNumber: true, sort: "last_step", cell: (row) => formatCount(row.last_step) },
  { title: "mean reward", width: "7rem", isNumber: true, sort: "reward", cell: (row) => formatNumber(row.reward, 3) },
  { title: "change", width: "5.5rem", isNumber: true, sort: "change", cell: (row) => formatSigned(row.change) },
];

function Failures({ run }) {
  const failures = useApi(["runs", run.id, "failures"], {}, { poll: run.live }).data ?? [];
  return failures.length > 0 && html`<h2>Failures</h2>
    <div class="scroll"><table><thead><tr><th>ending</th><th>who can cause it</th><th class="number">rollouts</th><th class="number">share</th><th>worst tasks</th></tr></thead><tbody>
      ${failures.map((each) => html`<tr><td title=${each.meaning}>${each.ending}</td><td>${each.who}</td><td class="number">${formatCount(each.rollouts)}</td><td class="number">${formatShare(each.share)}</td>
        <td>${each.worst.map(({ task, failed, rollouts }, index) => html`${index ? ", " : ""}<a href=${taskLink(task)}>${oneLine(task, 40)}</a> (${formatCount(failed)} of ${formatCount(rollouts)})`)}</td></tr>`)}
    </tbody></table></div>`;
}

export function TasksView({ runs, run, params }) {
  const [text, setText] = useState(params.text ?? "");
  useEffect(() => {
    const timer = setTimeout(() => setParams({ text }, { replace: true }), 350);
    return () => clearTimeout(timer);
  }, [text]);
  const find = params.text ?? "";
  const fetchPage = async (from, limit, signal) => {
    const answer = await fetchJson(["runs", run.id, "tasks"], { text: find, sort: params.sort, from, limit }, { signal });
    return { ...answer, ...describeReading(answer) };
  };
  return html`<${Title} text=${`Tasks: ${run.name}`} note="change is by a straight line through its rewards"><${RunSelect} runs=${runs} /><//>
    ${run.has_rollouts
      ? html`<${Failures} run=${run} /><div class="toolbar" role="search"><label class="wide"><input type="search" placeholder="find in names and prompts" aria-label="Find tasks" value=${text} onInput=${(event) => setText(event.target.value)} /></label></div>
          <${VirtualRows} source=${JSON.stringify([run.id, find, params.sort])} sort=${params.sort ?? ""} onSort=${(sort) => setParams({ sort })} label="Tasks" what="tasks" columns=${COLUMNS} fetchPage=${fetchPage} isLive=${run.live} href=${(row) => taskLink(row.task)}
            emptyText=${find ? `No task has "${oneLine(find, 40)}" in its name or prompt.` : "No rollout names a task."} />`
      : html`<${Empty}>No rollouts are stored, so tasks are not known.<//>`}`;
}
