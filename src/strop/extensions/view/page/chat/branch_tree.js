// The paths of an agent's rollout as a tree: the main one, and the branches that leave it or each other.
import { html } from "../lib/ui.js";
import { formatCount } from "../lib/format.js";
import { oneLine, rolloutLink } from "../lib/rollouts.js";
import { listPaths } from "./branch_paths.js";

export function BranchTree({ rollout, chosen, params }) {
  const paths = listPaths(rollout);
  const list = (path) => html`<li>
    <a class="node" href=${rolloutLink(rollout, { ...params, path: path.number || "" })} aria-current=${path.number === chosen ? "true" : null}>
      <b>${path.number ? `branch ${path.number}` : "main path"}</b> <span class="pale">${describe(path)}</span>
      <br />${oneLine(path.turns.find((turn) => turn.sampled)?.text ?? path.turns[0]?.text ?? "", 160)}</a>
    ${path.children.length > 0 && html`<ul class="tree">${path.children.map(list)}</ul>`}
  </li>`;
  return html`<ul class="tree root" aria-label="Paths of the rollout">${list(paths[0])}</ul>`;
}

function describe({ number, turns, tokens, own, isAnew }) {
  const size = `${formatCount(turns.length)} message${turns.length === 1 ? "" : "s"}, ${formatCount(tokens)} tokens of its own`;
  if (!number) return size;
  return `${size}, ${isAnew ? "with a prompt of its own" : own ? `leaves after token ${formatCount(own - 1)}` : "begins with the prompt"}`;
}
