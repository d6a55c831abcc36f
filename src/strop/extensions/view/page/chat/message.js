// One message of a conversation: who says it, its text or its tokens, its reasoning, tool calls, images.
import { html, useEffect, useState } from "../lib/ui.js";
import { imageAddress } from "../lib/api.js";
import { formatCount, formatSigned, printable } from "../lib/format.js";
import { TokenText } from "./token_text.js";

const KINDS = new Set(["tool", "system", "user"]);
const IMAGE_MARK = /(\[image: [^\]\n]*\])/; // where a stored text has an image
const SHORT_REASONING = 600; // characters that are shown at once

/**
 * `message` is {role, text, parts, sampled, start, end, calls, tool, images, reward, versions, path, shownEnd}; `view` colours tokens, or is
 * null. `parts` are its reasoning and the rest, where it has reasoning.
 */
export function MessageItem({ message, runId, view }) {
  const kind = message.sampled ? "policy" : KINDS.has(message.role) ? message.role : "";
  const hasTokens = view && message.end > message.start && !message.isShared;
  return html`<li class=${`message ${kind}${message.path ? " branch" : ""}`}>
    <header><b>${message.role}${message.tool ? ` ${printable(message.tool)}` : ""}</b>${notes(message).map((note) => html`<span>${note}</span>`)}</header>
    ${message.parts?.length ? message.parts.map((part, index) => html`<${Part} key=${index} part=${part} view=${hasTokens ? view : null} />`)
      : hasTokens ? html`<${TokenText} start=${message.start} end=${message.end} view=${view} />`
      : html`<${Text} message=${message} runId=${runId} />`}
    ${(message.calls ?? []).map((call) => html`<div class="call">calls <b>${printable(typeof call === "string" ? call : (call.name ?? JSON.stringify(call)))}</b>
      ${call.arguments !== undefined && html` <code>${printable(typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments))}</code>`}</div>`)}
    ${(hasTokens || message.parts?.length || !hasMarks(message)) && (message.images ?? []).map((name) => html`<${Picture} runId=${runId} name=${name} />`)}
  </li>`;
}

/** The text, with its images where they stood if each has its mark. */
function Text({ message, runId }) {
  const text = message.text ?? "";
  if (!hasMarks(message)) return html`<pre class="text">${printable(text)}</pre>`;
  let next = 0;
  return text.split(IMAGE_MARK).map((piece) => {
    if (IMAGE_MARK.test(piece)) return html`<${Picture} runId=${runId} name=${message.images[next++]} />`;
    return piece && html`<pre class="text">${printable(piece)}</pre>`;
  });
}

function hasMarks({ text, images = [] }) {
  return images.length > 0 && ((text ?? "").split(IMAGE_MARK).length - 1) / 2 === images.length;
}

function Picture({ runId, name }) {
  return html`<img src=${imageAddress(runId, name)} alt=${`image ${name.slice(0, 12)}`} loading="lazy" />`;
}

/** Reasoning is folded where it is long, and opened for a token in it that is looked at; the rest is as it is. */
function Part({ part, view }) {
  const hasTokens = view && part.end > part.start;
  const [isOpen, setOpen] = useState(part.text.length <= SHORT_REASONING);
  const isAt = Boolean(hasTokens && view.at >= part.start && view.at < part.end);
  useEffect(() => {
    if (isAt) setOpen(true);
  }, [isAt]);
  const body = hasTokens ? html`<${TokenText} start=${part.start} end=${part.end} view=${view} />` : part.text && html`<pre class="text">${printable(part.text)}</pre>`;
  if (!part.is_reasoning) return body;
  const size = part.start === null ? `${formatCount(part.text.length)} characters` : `${formatCount(part.end - part.start)} tokens`;
  return html`<details class="reasoning" open=${isOpen} onToggle=${(event) => setOpen(event.target.open)}>
    <summary>reasoning <span class="pale">${part.text.trim() ? size : "empty"}${part.is_closed ? "" : ", never closed"}${part.origin ? `, ${part.origin}` : ""}</span></summary>${isOpen && body}</details>`;
}

function notes(message) {
  const list = [];
  if (message.path) list.push(`branch ${message.path}`);
  if (message.end > message.start) list.push(`tokens ${message.start} to ${message.end - 1}`);
  if (message.shownEnd < message.end) list.push(`continued after ${formatCount(message.shownEnd - message.start)} of its tokens`);
  if (message.versions?.length) list.push(`weights ${message.versions.join(", ")}`);
  if (message.reward !== null && message.reward !== undefined) list.push(`reward ${formatSigned(message.reward)}`);
  if (message.state) list.push(`state: ${printable(message.state)}`);
  return list;
}
