// The time line of samples: steps as rows of spans, and what to say of them.
import { formatDuration, formatShare } from "./format.js";

/** What a sample waits for, with the colour of each: a number of the palette, or null for a pale one. */
export const KINDS = { engine: 0, environment: 1, tools: 3, rewards: 2, waiting: null };
export const IDLE = ["generation", "drain"]; // phases in which the learner waits for rollouts
const [WAITING, ENDED] = ["waiting", "ended"];

/**
 * {rows, groups, from, to} of steps, in milliseconds since the first began. A row is {step, title, isLoop, spans, ...} with spans
 * [{kind, title, from, to}]; a sample's row has `group`, `sample` and `kept`. `groups` are [{title, first, last}] places in `rows`.
 */
export function layOut(steps) {
  const rows = [];
  const groups = [];
  for (const line of steps) {
    const shift = (line.began - steps[0].began) * 1000;
    const name = steps.length > 1 ? `step ${line.step}` : "loop";
    rows.push({ step: line.step, title: name, isLoop: true, spans: line.phases.map((span) => readSpan(span, shift, "phase")) });
    if (line.syncs.length) rows.push({ step: line.step, title: "weights", isLoop: true, spans: line.syncs.map((span) => readSpan(span, shift, "sync")) });
    for (const group of [...line.groups].sort((a, b) => a.from - b.from || a.group - b.group)) {
      const first = rows.length;
      const samples = Object.entries(group.samples).map(([sample, spans]) => makeRow(line, group, Number(sample), spans, shift));
      rows.push(...samples.sort((a, b) => a.began - b.began || a.sample - b.sample));
      groups.push({ title: String(group.group), first, last: rows.length - 1 });
    }
  }
  const edges = rows.flatMap((row) => row.spans.flatMap((span) => [span.from, span.to]));
  for (const line of steps) edges.push((line.began - steps[0].began) * 1000, (line.began - steps[0].began + line.seconds) * 1000);
  return { rows, groups, from: edges.reduce((a, b) => Math.min(a, b)), to: edges.reduce((a, b) => Math.max(a, b)) };
}

function readSpan([label, from, to], shift, kind) {
  return { kind: kind ?? label.split(" ")[0], title: label.replace(/^(engine|environment) (\d+)$/, "$1, turn $2").replace(/^tools (\d+)$/, "tools of turn $1"), from: from + shift, to: to + shift };
}

/** A sample's spans with its waits between them, from the begin of its group to the end of the step's collection. */
function makeRow(line, group, sample, waits, shift) {
  const spans = [];
  let at = group.from + shift;
  for (const span of waits.map((each) => readSpan(each, shift))) {
    if (span.from > at) spans.push({ kind: WAITING, title: spans.length ? "waiting" : "waiting to begin", from: at, to: span.from });
    spans.push(span);
    at = span.to;
  }
  if (line.collected + shift > at) spans.push({ kind: ENDED, title: "ended; waiting for the rest of the step", from: at, to: line.collected + shift });
  return { step: line.step, title: `group ${group.group}, sample ${sample}`, group: group.group, sample, kept: group.kept, began: waits[0]?.[1] ?? group.from, spans };
}

/** How many of the rows' samples are in each kind of span, for each of `columns` equal parts of [from, to]: {kind: [columns]}. */
export function countAtOnce(rows, from, to, columns) {
  const changes = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, new Float64Array(columns + 1)]));
  const place = (time) => Math.min(Math.max(Math.floor(((time - from) / (to - from || 1)) * columns), 0), columns);
  for (const { spans, isLoop } of rows) {
    for (const span of isLoop ? [] : spans) {
      if (!(span.kind in changes) || span.to <= from || span.from >= to) continue;
      changes[span.kind][place(span.from)] += 1;
      changes[span.kind][place(span.to)] -= 1;
    }
  }
  for (const counts of Object.values(changes)) for (let column = 1; column <= columns; column += 1) counts[column] += counts[column - 1];
  return changes;
}

/** Where the sample-seconds of steps went, and which sample was last: {shares, straggler: {step, group, sample, late}, loop}. */
export function summarize(steps) {
  const seconds = {};
  for (const line of steps) for (const [kind, value] of Object.entries(line.seconds_of)) seconds[kind] = (seconds[kind] ?? 0) + value;
  const total = Object.values(seconds).reduce((sum, value) => sum + value, 0);
  const share = (kind) => formatShare((seconds[kind] ?? 0) / (total || 1));
  const named = Object.keys(KINDS).filter((kind) => kind !== WAITING && seconds[kind] / (total || 1) >= 0.0005).map((kind) => `${kind} ${share(kind)}`);
  const shares = `The samples took ${formatDuration(total)} in all: ${[...named, `waiting ${share(WAITING)}`].join(", ")} before their end and ${share(ENDED)} after it, until the step took them.`;
  const late = steps.filter((line) => line.last).map((line) => ({ step: line.step, group: line.last[0], sample: line.last[1], late: (line.last[2] - line.median) / 1000 }));
  const straggler = late.reduce((worst, each) => (worst && worst.late >= each.late ? worst : each), null);
  const whole = steps.reduce((sum, line) => sum + line.seconds, 0);
  const spent = (...phases) => steps.flatMap((line) => line.phases).reduce((sum, [phase, from, to]) => sum + (phases.includes(phase) ? (to - from) / 1000 : 0), 0);
  const [idle, trained] = [spent(...IDLE), spent("logprobs", "policy_training")];
  const loop = `The learner waited for rollouts for ${formatDuration(idle)} of ${formatDuration(whole)} (${formatShare(idle / (whole || 1))}), and trained for ${formatDuration(trained)}.`;
  return { shares, straggler, loop };
}
