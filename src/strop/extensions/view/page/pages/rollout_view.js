// One rollout: its conversation, its tokens, its branches, its ledger.
import { html, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { useApi } from "../lib/api.js";
import { formatCount, formatNumber, formatSigned, formatValue, printable } from "../lib/format.js";
import { useKeys } from "../lib/keys.js";
import { ENDINGS, describeKept, groupLink, rolloutLink, taskLink } from "../lib/rollouts.js";
import { linkTo, setParams } from "../lib/route.js";
import { BranchTree } from "../chat/branch_tree.js";
import { Chat } from "../chat/chat.js";
import { TokenLegend } from "../chat/token_legend.js";
import { availableModes, isMasked, levelsOf } from "../chat/token_modes.js";
import { TokenPanel } from "../chat/token_panel.js";
import { Answer, Empty } from "../parts/notice.js";
import { StarButton } from "../parts/star_button.js";
import { Title } from "../parts/title.js";
import { LedgerTable, useLedger } from "../parts/ledger_table.js";

const OF_TOKENS = new Set([ // and what is shown above
  "pieces", "pieces_pending", "preview", "starred", "sampled", "versions", "sampler_logprobs", "learner_logprobs", "trained_logprobs", "reference_logprobs",
  "advantages", "ratio", "entropy", "reference_kl", "correction", "mask", "mask_reason", "clipped",
]);

export function RolloutView({ run, path, params }) {
  const [isPending, setPending] = useState(false); // while the server reads the tokenizer
  const answer = useApi(["runs", run.id, "rollouts", ...path], {}, { poll: isPending });
  useEffect(() => setPending(Boolean(answer.data?.pieces_pending)), [answer.data]);
  const missing = html`<${Title} text=${`Rollout ${path.join("/")}`} note=${run.name}><a href=${linkTo(["rollouts", path[0]])}>rollouts of step ${path[0]}</a><//>`;
  return html`<${Answer} of=${answer} what="the rollout" title=${missing}>${(rollout) => html`<${Rollout} key=${path.join("/")} rollout=${rollout} run=${run} params=${params} />`}<//>`;
}

function Rollout({ rollout, run, params }) {
  const tab = params.tab ?? "chat";
  const hasBranches = (rollout.branches ?? []).length > 0;
  const tabs = [["chat", "Conversation"], ["tree", "Branches"], ["ledger", "Ledger"], ["facts", "All numbers"]].filter(([name]) => name !== "tree" || hasBranches);
  useKeys({
    J: ["next rollout of the group", () => step(rollout, 1)],
    K: ["rollout before", () => step(rollout, -1)],
  });
  return html`<${Title} text=${`Step ${rollout.step}, task ${rollout.task}, sample ${rollout.sample}`} note=${`reward ${formatNumber(rollout.reward, 4)}`}>
      <${StarButton} run=${run} rollout=${rollout} /><//>
    <${Facts} rollout=${rollout} />
    ${rollout.error && html`<p class="notice">${printable(rollout.error)}</p>`}
    <nav class="tabs" aria-label="Parts of the rollout">
      ${tabs.map(([name, title]) => html`<a href=${rolloutLink(rollout, { ...params, tab: name === "chat" ? "" : name })} aria-current=${tab === name ? "page" : null}>${title}</a>`)}
    </nav>
    ${tab === "tree" ? html`<${BranchTree} rollout=${rollout} chosen=${Number(params.path ?? 0)} params=${params} />
        <${Conversation} rollout=${rollout} run=${run} params=${params} path=${Number(params.path ?? 0)} />`
      : tab === "ledger" ? html`<${LedgerTable} run=${run} rollout=${rollout} />`
      : tab === "facts" ? html`<${AllNumbers} rollout=${rollout} />`
      : html`<${Conversation} rollout=${rollout} run=${run} params=${params} />`}`;
}

function step(rollout, by) {
  const next = rollout.sample + by;
  if (next < 0) return false;
  window.location.hash = rolloutLink({ ...rollout, sample: next });
  return true;
}

function Facts({ rollout }) {
  const rewards = Object.entries(rollout.rewards ?? {});
  return html`<p class="pale">
    <a href=${groupLink(rollout)}>its group</a>, <a href=${taskLink(rollout.task)}>its task over time</a>;
    ${" "}${rollout.env}, ${formatCount(rollout.tokens)} tokens, advantage ${formatSigned(rollout.advantage)}, ${describeKept(rollout)},
    ended by <span title=${ENDINGS[rollout.ending] ?? ""}>${rollout.ending || "nothing that was said"}</span>
    ${rewards.length > 0 && html`; rewards ${rewards.map(([name, value], index) => `${index ? ", " : ""}${name} ${formatNumber(value, 3)}`)}`}
    ${rollout.answer && html`; reference answer <b class="mono">${printable(rollout.answer.length > 300 ? rollout.answer.slice(0, 300) + "…" : rollout.answer)}</b>`}
    ${(rollout.flags ?? []).map((flag) => html` <span class="badge bad">${flag}</span>`)}
  </p>`;
}

/** The chat, with tokens where the run has a tokenizer; of one path, or of all. */
function Conversation({ rollout, run, params, path = null }) {
  const ledger = useLedger(run, rollout, Boolean(params.colour?.startsWith("ledger")) || params.ledger === "1");
  const modes = useMemo(() => (rollout.pieces ? availableModes(rollout, ledger.data) : []), [rollout, ledger.data]);
  const mode = params.colour === "none" ? null : (modes.find((each) => each.name === params.colour) ?? modes[0] ?? null);
  const count = rollout.pieces?.length ?? 0;
  const { levels, scale } = useMemo(() => (mode ? levelsOf(mode, rollout, count) : { levels: [], scale: 1 }), [mode?.name, rollout, ledger.data]);
  const [at, setAt] = useState(null);
  const isHeld = useRef(false);
  const onPoint = (index, isKept) => {
    if (isKept) isHeld.current = !(isHeld.current && index === at);
    if (isKept || !isHeld.current) setAt(index);
  };
  const walk = (by, fits = () => true) => {
    if (!mode) return false;
    isHeld.current = true;
    let next = (at ?? (by > 0 ? -1 : count)) + by;
    while (next >= 0 && next < count && !fits(next)) next += by;
    if (next >= 0 && next < count) setAt(next);
    return true;
  };
  const isNotable = (index) => rollout.clipped?.[index] || isMasked(rollout, index);
  const change = (by) => {
    if (!mode) return false;
    return setParams({ colour: modes[(modes.indexOf(mode) + by + modes.length) % modes.length].name }, { replace: true });
  };
  useKeys({
    ArrowRight: ["next token", () => walk(1)],
    ArrowLeft: ["token before", () => walk(-1)],
    g: ["next clipped or masked token", () => walk(1, isNotable)],
    G: ["clipped or masked token before", () => walk(-1, isNotable)],
    m: ["colour by the next number", () => change(1)],
    M: ["colour by the number before", () => change(-1)],
  });
  useEffect(() => {
    if (isHeld.current) document.querySelector(".tokens .at")?.scrollIntoView({ block: "nearest" });
  }, [at]);

  if (!(rollout.turns ?? []).length && !(rollout.prompt_messages ?? []).length) return html`<${Empty}>This rollout has no text.<//>`;
  return html`
    ${!rollout.pieces && html`<p class="pale" role="status">${rollout.pieces_pending
      ? "The run's tokenizer is being read; tokens are coloured in a moment."
      : "The texts of single tokens are not known here: the run's tokenizer was not found, so tokens are not coloured."}</p>`}
    ${rollout.pieces && html`<div class="toolbar">
      <label>colour tokens by <select value=${mode?.name ?? "none"} onChange=${(event) => setParams({ colour: event.target.value })}>
        ${modes.map((each) => html`<option value=${each.name}>${each.title}</option>`)}<option value="none">nothing (texts)</option></select></label>
      ${ledger.data === null && html`<button type="button" onClick=${() => setParams({ ledger: "1" })} disabled=${ledger.loading || ledger.error}>Terms of the loss</button>`}
      ${ledger.error && html`<span class="pale">${ledger.error.message}</span>`}
    </div>`}
    ${mode && html`<${TokenLegend} mode=${mode} scale=${scale} tokens=${rollout} />`}
    <${Chat} rollout=${rollout} runId=${run.id} path=${path} view=${mode ? { tokens: rollout, levels, at: at ?? -1, onPoint } : null} />
    ${mode && html`<${TokenPanel} tokens=${rollout} ledger=${ledger.data} index=${at} />`}`;
}

function AllNumbers({ rollout }) {
  const rows = Object.entries(rollout).filter(([name, value]) => !OF_TOKENS.has(name) && !Array.isArray(value));
  const flat = rows.flatMap(([name, value]) => (value && typeof value === "object" ? Object.entries(value).map(([inner, each]) => [`${name}.${inner}`, each]) : [[name, value]]));
  return html`<div class="scroll"><table><tbody>${flat.map(([name, value]) => html`<tr><td class="pale nowrap">${name}</td><td><pre class="text">${printable(formatValue(value))}</pre></td></tr>`)}</tbody></table></div>`;
}
