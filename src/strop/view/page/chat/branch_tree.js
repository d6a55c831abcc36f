// The paths of an agent's rollout: the main one, and the branches that leave it or each other.
import { html } from "../lib/ui.js";
import { formatCount } from "../lib/format.js";
import { oneLine } from "../lib/rollouts.js";
import { setParams } from "../lib/route.js";

/** `branches` are [parent path, tokens of it that are continued] or {parent, start}. */
export function BranchTree({ rollout, chosen }) {
  const paths = listPaths(rollout);
  const list = (path) => html`<li>
    <a class="node" href="#" aria-current=${path.number === chosen ? "true" : null} onClick=${(event) => choose(event, path.number)}>
      <b>${path.number ? `branch ${path.number}` : "main path"}</b> <span class="pale">${path.turns.length} messages, ${formatCount(path.tokens)} tokens of its own${path.number ? `, leaves after token ${path.start}` : ""}</span>
      <br />${oneLine(path.turns.find((turn) => turn.sampled)?.text ?? path.turns[0]?.text ?? "", 160)}</a>
    ${path.children.length > 0 && html`<ul class="tree">${path.children.map(list)}</ul>`}
  </li>`;
  return html`<ul class="tree root">${list(paths[0])}</ul>`;
}

function choose(event, number) {
  event.preventDefault();
  setParams({ path: String(number) });
}

export function listPaths(rollout) {
  const branches = (rollout.branches ?? []).map((branch) => (Array.isArray(branch) ? { parent: branch[0], start: branch[1] } : branch));
  const paths = [{ number: 0, parent: null, start: 0 }, ...branches.map((branch, index) => ({ number: index + 1, ...branch }))];
  for (const path of paths) {
    path.turns = (rollout.turns ?? []).filter((turn) => (turn.path ?? 0) === path.number);
    path.tokens = path.turns.length ? Math.max(...path.turns.map((turn) => turn.end)) - Math.min(...path.turns.map((turn) => turn.start)) : 0;
    path.children = paths.filter((other) => other.parent === path.number);
  }
  return paths;
}
