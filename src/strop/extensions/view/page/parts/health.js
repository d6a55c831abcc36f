// What is wrong with a run: a badge, what was found with what to do, and where it stands in the curves.
import { html, useEffect, useState } from "../lib/ui.js";
import { fetchJson, useApi } from "../lib/api.js";
import { linkTo } from "../lib/route.js";

const BADGES = { ok: ["ok", "good"], look: ["look", "warn"], wrong: ["wrong", "bad"] };

export function useHealth(run) {
  return useApi(["runs", run.id, "health"], {}, { poll: run.live }).data;
}

export function HealthBadge({ level }) {
  const [text, kind] = BADGES[level] ?? [];
  return text ? html`<span class=${`badge health ${kind}`}>${text}</span>` : null;
}

/** A cell of a table of runs. */
export function RunHealth({ run }) {
  const health = useHealth(run);
  return health && html`<${HealthBadge} level=${health.level} /> ${health.findings[0]?.now && title(health.findings[0].name)}`;
}

/** What was found, the worst first: in one sentence, then what to do, and the steps. More than `most` are on Now. */
export function Findings({ run, findings, most }) {
  return html`${findings.slice(0, most).map((finding) => html`<${Finding} key=${finding.name} run=${run} finding=${finding} />`)}
    ${findings.length > most && html`<p><a href=${linkTo(["now"], { run: run.id })}>${findings.length - most} more</a></p>`}`;
}

function Finding({ run, finding: { name, severity, message, held, now } }) {
  const [first, last] = [held[0]?.[0], held.at(-1)?.[1]];
  return html`<div class=${"notice finding" + (severity === "wrong" && now ? "" : " mild")} data-finding=${name}>
    <b>${title(name)}</b>${!now && html` <span class="pale">(over)</span>`}: ${message}.
    ${first !== undefined && html` <a href=${linkTo(["rollouts", String(last)], { run: run.id })}>${first === last ? `Step ${first}` : `Steps ${first} to ${last}`}</a>`}
  </div>`;
}

function title(name) {
  const words = name.replaceAll("_", " ").replace(/^kl\b/, "KL");
  return words[0].toUpperCase() + words.slice(1);
}

/** [{name, severity, from, to}] of runs, for their curves. */
export function useMarks(runs) {
  const [marks, setMarks] = useState([]);
  const key = runs.map((run) => `${run.id} ${run.step}`).join();
  useEffect(() => {
    const given = new AbortController();
    const ask = (run) => fetchJson(["runs", run.id, "health"], {}, { signal: given.signal }).then((health) => listMarks(health, runs.length > 1 ? `${run.name}: ` : ""), () => []);
    Promise.all(runs.map(ask)).then((found) => given.signal.aborted || setMarks(found.flat()));
    return () => given.abort();
  }, [key]);
  return marks;
}

function listMarks({ findings }, prefix) {
  return findings.flatMap(({ name, severity, held }) => held.map(([from, to]) => ({ name: prefix + title(name), severity, from, to })));
}
