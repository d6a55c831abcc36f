// A conversation: the messages of the prompt, then the turns.
import { html } from "../lib/ui.js";
import { MessageItem } from "./message.js";

/** `view` colours the turns' tokens; null shows their texts. `path` limits to a branch, with what it continues. */
export function Chat({ rollout, runId, view = null, path = null }) {
  const turns = (rollout.turns ?? []).filter((turn) => path === null || turn.path === path);
  const prompt = (rollout.prompt_messages ?? []).map((message, index) => ({
    role: message.role, text: message.content ?? message.text, sampled: false, start: 0, end: 0,
    images: message.images ?? (rollout.prompt_images ?? []).filter(([place]) => place === index).map(([, name]) => name),
  }));
  const shown = turns.map((turn, index) => ({ ...turn, isShared: sharesTokens(turns, index) }));
  return html`<ol class="chat">${[...prompt, ...shown].map((message) => html`<${MessageItem} message=${message} runId=${runId} view=${view} />`)}</ol>`;
}

/** Messages that an environment gave at once share a range: their texts are shown, the tokens once, with the first. */
function sharesTokens(turns, index) {
  return turns.some((turn, other) => other !== index && turn.start === turns[index].start && turn.end === turns[index].end && turn.path === turns[index].path);
}
