// Words for what a rollout is.
import { linkTo } from "./route.js";
import { printable } from "./format.js";

/** Why a rollout ended, in words. */
export const ENDINGS = {
  stop: "the model stopped and the environment was done",
  length: "a turn reached its limit of tokens",
  context: "the conversation no longer fits",
  turns: "the limit of turns",
  tool_calls: "the limit of tool calls",
  budget: "the budget of the episode",
  time: "the time limit of the episode",
  crash: "the agent or the policy's program crashed",
  broken_task: "the task cannot be sampled or scored",
  error: "the code of the environment raised an exception",
  engine: "an engine failed",
  environment: "a process of the environment died",
  sandbox: "a sandbox failed",
  tool_server: "a server of tools failed",
  grader: "the process that scores failed",
  provider_limit: "the limit of a provider",
  aborted: "its group could no longer be trained on",
  service: "another service failed",
};

export const KEPT = [["", "all"], ["1", "trained on"], ["0", "dropped"]];

export function rolloutLink({ step, group, sample }, params = {}) {
  return linkTo(["rollout", String(step), String(group), String(sample)], params);
}

export function groupLink({ step, group }) {
  return linkTo(["group", String(step), String(group)]);
}

export function taskLink(task) {
  return linkTo(["task", task]);
}

/** The beginning of a text on one line. */
export function oneLine(text, length = 200) {
  const flat = printable(String(text ?? "").slice(0, length * 2)).replace(/\s+/g, " ").trim();
  return flat.length > length ? flat.slice(0, length) + "…" : flat;
}

export function describeKept({ kept, dropped_because: because }) {
  return kept ? "trained on" : because ? `dropped: ${because}` : "dropped";
}
