// A conversation: the messages of the prompt, then the turns.
import { html } from "../lib/ui.js";
import { continuesPrompt, listTurns } from "./branch_paths.js";
import { MessageItem } from "./message.js";

/** `view` colours the turns' tokens; null shows their texts. `path` limits to a branch, with what it continues. */
export function Chat({ rollout, runId, view = null, path = null }) {
  const turns = path === null ? (rollout.turns ?? []) : listTurns(rollout, path);
  const prompt = path !== null && !continuesPrompt(rollout, path) ? [] : (rollout.prompt_messages ?? []);
  const shown = turns.map((turn, index) => ({ ...turn, isShared: sharesTokens(turns, index) }));
  const messages = [...prompt.map((message) => ({ ...message, text: message.content, sampled: false, start: 0, end: 0 })), ...shown];
  return html`<ol class="chat">${messages.map((message, index) => html`<${MessageItem} key=${index} message=${message} runId=${runId} view=${view} />`)}</ol>`;
}

/** Messages that an environment gave at once share a range of tokens: their texts are shown in place of the tokens. */
function sharesTokens(turns, index) {
  const { start, end, path } = turns[index];
  return turns.some((turn, other) => other !== index && turn.start === start && turn.end === end && turn.path === path);
}
