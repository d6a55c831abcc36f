// One rollout beside others: its reward, and what was said in it.
import { html } from "../lib/ui.js";
import { formatCount, formatNumber, formatSigned, printable } from "../lib/format.js";
import { describeKept, rolloutLink } from "../lib/rollouts.js";
import { MessageItem } from "../chat/message.js";

export function AnswerCard({ rollout, runId, isCurrent = false, onChoose }) {
  return html`<li class=${"card" + (isCurrent ? " current" : "")} aria-current=${isCurrent ? "true" : null} onMouseDown=${onChoose}>
    <header><h3><a href=${rolloutLink(rollout)}>sample ${rollout.sample}</a> ${rollout.starred && html`<span role="img" aria-label="starred">★</span>`}</h3><b>reward ${formatNumber(rollout.reward, 4)}</b></header>
    <p class="pale">advantage ${formatSigned(rollout.advantage)}, ${formatCount(rollout.tokens)} tokens, ${rollout.ending || "no ending"}, ${describeKept(rollout)}</p>
    ${rollout.error && html`<p class="notice">${printable(rollout.error)}</p>`}
    <${Said} rollout=${rollout} runId=${runId} />
  </li>`;
}

/** The turns; of a single one only what it says. */
function Said({ rollout, runId }) {
  const turns = rollout.turns ?? [];
  if (turns.length < 2 && !turns[0]?.parts?.length) return html`<pre class="text">${printable(rollout.text ?? rollout.preview ?? "")}</pre>`;
  const left = (rollout.num_turns ?? 0) - turns.length;
  return html`<ol class="chat close">${turns.map((turn, index) => html`<${MessageItem} key=${index} message=${turn} runId=${runId} />`)}</ol>
    ${left > 0 && html`<p class="pale">and ${formatCount(left)} more messages</p>`}`;
}
