// One message of a conversation: who says it, its text or its tokens, tool calls, images.
import { html } from "../lib/ui.js";
import { apiAddress } from "../lib/api.js";
import { formatSigned, printable } from "../lib/format.js";
import { TokenText } from "./token_text.js";

const KINDS = new Set(["tool", "system", "user"]);

/** `message` is {role, text, sampled, start, end, calls, tool, images, reward, versions, path, reasoning}; `view` colours tokens, or is null. */
export function MessageItem({ message, runId, view }) {
  const kind = message.sampled ? "policy" : KINDS.has(message.role) ? message.role : "";
  const hasTokens = view && message.end > message.start && !message.isShared;
  return html`<li class=${`message ${kind}${message.path ? " branch" : ""}`}>
    <header><b>${message.role}${message.tool ? ` ${printable(message.tool)}` : ""}</b>${notes(message).map((note) => html`<span>${note}</span>`)}</header>
    ${message.reasoning && !hasTokens && html`<details class="reasoning" open><summary>reasoning</summary><pre class="text">${printable(message.reasoning)}</pre></details>`}
    ${hasTokens ? html`<${TokenText} start=${message.start} end=${message.end} view=${view} />` : html`<pre class="text">${printable(message.text ?? "")}</pre>`}
    ${(message.calls ?? []).map((call) => html`<div class="call">calls <b>${printable(typeof call === "string" ? call : (call.name ?? JSON.stringify(call)))}</b>
      ${call.arguments !== undefined && html` <code>${printable(typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments))}</code>`}</div>`)}
    ${(message.images ?? []).map((name) => html`<img src=${apiAddress(["runs", runId, "images", name])} alt=${`image ${name.slice(0, 12)}`} loading="lazy" />`)}
  </li>`;
}

function notes(message) {
  const list = [];
  if (message.path) list.push(`branch ${message.path}`);
  if (message.end > message.start) list.push(`tokens ${message.start} to ${message.end - 1}`);
  if (message.versions?.length) list.push(`weights ${message.versions.join(", ")}`);
  if (message.reward !== null && message.reward !== undefined) list.push(`reward ${formatSigned(message.reward)}`);
  if (message.state) list.push(`state: ${printable(message.state)}`);
  return list;
}
