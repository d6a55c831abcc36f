// The numbers of the token that is looked at.
import { html } from "../lib/ui.js";
import { formatNumber, formatShare, formatSigned, printable } from "../lib/format.js";
import { describeReason, isMasked, isSampled } from "./token_modes.js";

export function TokenPanel({ tokens, ledger, index }) {
  if (index === null || index < 0) {
    return html`<div class="token-panel hint pale">Point at a token<span class="with-keys">, or walk with <kbd>←</kbd> and <kbd>→</kbd>,</span> to read its numbers.
      <span class="with-keys"><kbd>m</kbd> goes to the next mode, <kbd>g</kbd> and <kbd>G</kbd> to the next and last clipped or masked token.</span></div>`;
  }
  return html`<div class="token-panel" role="status" aria-live="polite">
    <div><b>token ${index}</b> <code>${JSON.stringify(printable(tokens.pieces?.[index] ?? "?"))}</code> <${State} tokens=${tokens} index=${index} /></div>
    <dl>${facts(tokens, ledger, index).map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </div>`;
}

function State({ tokens, index }) {
  if (!isSampled(tokens, index)) return html`<span class="pale">from the environment: read, not trained on</span>`;
  const reason = tokens.mask_reason?.[index];
  const state = [];
  if (isMasked(tokens, index)) state.push(`masked: ${describeReason(reason)}`);
  if (tokens.clipped?.[index]) state.push("clipped: no gradient from the objective");
  return state.length > 0 && html`<span class="bad">${state.join("; ")}</span>`;
}

function facts(tokens, ledger, index) {
  const read = (column) => tokens[column]?.[index];
  const known = (value) => value !== null && value !== undefined;
  const both = (logprob) => `${formatNumber(Math.exp(logprob), 3)} (log ${formatNumber(logprob, 4)})`;
  const rows = [
    ["sampler", known(read("sampler_logprobs")) ? both(read("sampler_logprobs")) : null],
    ["learner", known(read("learner_logprobs")) ? both(read("learner_logprobs")) : null],
    ["ratio", known(read("ratio")) ? formatNumber(read("ratio"), 4) : null],
    ["advantage", known(read("advantages")) ? formatSigned(read("advantages"), 4) : null],
    ["entropy", known(read("entropy")) ? `${formatNumber(read("entropy"), 4)} nats` : null],
    ["KL to reference", known(read("reference_kl")) ? formatNumber(read("reference_kl"), 4) : null],
    ["correction", known(read("correction")) ? formatNumber(read("correction"), 4) : null],
    ["share of the gradient", known(ledger?.share?.[index]) ? formatShare(ledger.share[index]) : null],
    ...Object.entries(ledger?.terms ?? {}).map(([name, values]) => [`ledger: ${name}`, known(values[index]) ? formatNumber(values[index], 4) : null]),
  ];
  return rows.filter(([name, value]) => value !== null && (isSampled(tokens, index) || name === "ledger"));
}
