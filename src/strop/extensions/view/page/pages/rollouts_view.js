// The rollouts of a run: filters, search, order, and as many rows as there are.
import { html, useEffect, useMemo, useState } from "../lib/ui.js";
import { SAVED, fetchJson } from "../lib/api.js";
import { formatNumber, formatSigned } from "../lib/format.js";
import { useKeys } from "../lib/keys.js";
import { ENDINGS, KEPT, describeKept, oneLine, rolloutLink } from "../lib/rollouts.js";
import { goTo, setParams } from "../lib/route.js";
import { useNarrow } from "../lib/narrow.js";
import { Empty } from "../parts/notice.js";
import { RunSelect } from "../parts/run_picker.js";
import { Title } from "../parts/title.js";
import { TypedInput } from "../parts/typed_input.js";
import { VirtualRows } from "../parts/virtual_rows.js";

const FILTERS = ["steps", "task", "env", "ending", "answer", "kept", "part", "reward_min", "reward_max", "tokens_min", "tokens_max", "text", "sort"];
const MOST_PARTS = 4; // columns of rewards by name

const FOLDED = FILTERS.filter((name) => name !== "text" && name !== "sort");
const SORTS = [
  ["", "newest first"], ["step", "oldest first"], ["-reward", "best first"], ["reward", "worst first"], ["-tokens", "longest first"], ["tokens", "shortest first"],
  ["-advantage", "largest advantage"], ["advantage", "lowest advantage"],
];

const TEXT = { title: "beginning of the text", width: "minmax(8rem, 1fr)", isLong: true, cell: (row) => html`<${Marks} row=${row} />${oneLine(row.preview) || html`<span class="pale">no text</span>`}` };
export const REFERENCE = { title: "reference", width: "minmax(3rem, 6.5rem)", isMinor: true, sort: "answer", cell: (row) => row.answer || "–" };

/** A column of each reward, if there are several. */
export function rewardColumns(parts) {
  const shown = parts.length > 1 ? parts.slice(0, MOST_PARTS) : [];
  return shown.map((name) => ({ title: name, width: "minmax(3.5rem, 6rem)", isNumber: true, isMinor: true, sort: `rewards.${name}`, cell: (row) => formatNumber(row.rewards?.[name], 3) }));
}

const listColumns = (parts) => [
  { title: "step", width: "3.4rem", isNumber: true, sort: "step", cell: (row) => row.step },
  { title: "task", width: "minmax(4rem, 9rem)", isName: true, sort: "task", cell: (row) => row.task },
  REFERENCE,
  { title: "reward", width: "4.6rem", isNumber: true, sort: "reward", cell: (row) => formatNumber(row.reward, 3) },
  ...rewardColumns(parts),
  { title: "advantage", width: "5.2rem", isNumber: true, isMinor: true, sort: "advantage", cell: (row) => formatSigned(row.advantage) },
  { title: "tokens", width: "4.4rem", isNumber: true, sort: "tokens", cell: (row) => formatNumber(row.tokens) },
  { title: "ending", width: "4.6rem", isMinor: true, cell: (row) => row.ending || "–" },
  TEXT,
];

/** [rows' columns, what fetches a page and notes which rewards there are]. */
export function useRewardColumns(makeColumns, fetchPage) {
  const [parts, setParts] = useState([]);
  const columns = useMemo(() => makeColumns(parts), [parts.join("\n")]);
  const fetchAndNote = async (...asked) => {
    const answer = await fetchPage(...asked);
    setParts(answer.parts ?? []);
    return answer;
  };
  return { parts, columns, fetchPage: fetchAndNote };
}

export function RolloutsView({ runs, run, path, params }) {
  const step = path[0] ?? "";
  const query = { step, ...Object.fromEntries(FILTERS.map((name) => [name, params[name]])) };
  const [first, last, count] = run.steps_with_rollouts ?? [];
  const go = (by) => goTo(["rollouts", String(Math.min(Math.max(Number(step || (by > 0 ? first - 1 : last + 1)) + by, first), last))], query.step ? { ...params } : params);
  useKeys({
    "[": ["step before", () => go(-1)],
    "]": ["next step", () => go(1)],
  });
  const list = useRewardColumns(listColumns, (from, limit, signal) => fetchRows(run, query, from, limit, signal));
  const title = html`<${Title} text=${`Rollouts: ${run.name}`} note=${count ? `stored are ${count} steps, ${first} to ${last}` : ""}><${RunSelect} runs=${runs} /><//>`;
  if (!run.has_rollouts) {
    return html`${title}<${Empty}>No rollouts are stored. A run stores them with logger.rollouts=parquet, which is the default; recorded data (SFT, preferences) has none.<//>`;
  }
  return html`${title}
    <${Filters} run=${run} parts=${list.parts} step=${step} params=${params} onStep=${(next) => goTo(next === "" ? ["rollouts"] : ["rollouts", next], params)} go=${go} />
    <${VirtualRows} source=${JSON.stringify([run.id, query])} label="Rollouts" what="rollouts" columns=${list.columns}
      fetchPage=${list.fetchPage} href=${(row) => rolloutLink(row, { colour: params.colour })}
      isLive=${run.live} sort=${params.sort || "-step"} onSort=${(sort) => setParams({ sort: sort === "-step" ? "" : sort })}
      emptyText=${html`No rollout is like this. <a href="#" onClick=${clear}>Clear the filters</a>`} />`;
}

/** How far the server has read: {note, isPartial}. */
export function describeReading({ searched, indexed, unreadable }) {
  const notes = [];
  if (indexed && !indexed.complete) notes.push(`${indexed.steps} of ${indexed.of} steps are indexed so far`);
  if (searched && !searched.complete) notes.push(`searched ${searched.steps} of ${searched.of} steps${searched.full ? ", and stopped: too many have this text" : ""}`);
  if (unreadable?.length) notes.push(unreadable.length === 1 ? unreadable[0] : `${unreadable.length} steps cannot be read, such as: ${unreadable[0]}`);
  return { note: notes.join("; "), isPartial: Boolean((indexed && !indexed.complete) || (searched && !searched.complete && !searched.full)) };
}

export async function fetchRows(run, query, from, limit, signal) {
  const answer = await fetchJson(["runs", run.id, "rollouts"], { ...query, from, limit }, { signal });
  return { ...answer, ...describeReading(answer) };
}

/** The search, the step and the order; the other filters are folded away where the window is narrow. */
function Filters({ run, parts, step, params, onStep, go }) {
  const set = (name) => (text) => setParams({ [name]: text });
  const choose = (name) => (event) => setParams({ [name]: event.target.value });
  const isFiltered = FILTERS.some((name) => name !== "sort" && params[name]);
  return html`<div class="toolbar" role="search">
    <label class="wide"><${TextFilter} key=${run.id} value=${params.text ?? ""} /></label>
    ${SAVED ? html`<label>step <${TypedInput} type="number" min="0" placeholder="all" aria-label="step" value=${step} onCommit=${onStep} /></label><${SortSelect} sort=${params.sort ?? ""} parts=${parts} />` : html`
    <label>step <button type="button" title="[" aria-label="step before" onClick=${() => go(-1)}>‹</button>
      <${TypedInput} type="number" min="0" placeholder="all" aria-label="step" value=${step} onCommit=${onStep} />
      <button type="button" title="]" aria-label="next step" onClick=${() => go(1)}>›</button></label>
    <${SortSelect} sort=${params.sort ?? ""} parts=${parts} />
    <${Folded} count=${FOLDED.filter((name) => params[name]).length}>
    <label>task <${TypedInput} type="text" size="10" value=${params.task ?? ""} onCommit=${set("task")} /></label>
    <label>environment <${TypedInput} type="text" size="8" value=${params.env ?? ""} onCommit=${set("env")} /></label>
    <label>ending <select value=${params.ending ?? ""} onChange=${choose("ending")}>
      <option value="">all</option>${Object.entries(ENDINGS).map(([ending, words]) => html`<option value=${ending} title=${words}>${ending}</option>`)}</select></label>
    <label>reference <${TypedInput} type="text" size="8" value=${params.answer ?? ""} onCommit=${set("answer")} /></label>
    <label>show <select value=${params.kept ?? ""} onChange=${choose("kept")}>${KEPT.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>
    <label>${parts.length > 1 ? html`<select aria-label="which reward" value=${params.part ?? ""} onChange=${choose("part")}><option value="">reward</option>${parts.map((name) => html`<option value=${name}>${name}</option>`)}</select>` : "reward"}${" "}
      <${TypedInput} type="number" step="any" placeholder="least" aria-label="least reward" value=${params.reward_min ?? ""} onCommit=${set("reward_min")} />
      <${TypedInput} type="number" step="any" placeholder="most" aria-label="most reward" value=${params.reward_max ?? ""} onCommit=${set("reward_max")} /></label>
    <label>tokens <${TypedInput} type="number" min="0" placeholder="least" aria-label="fewest tokens" value=${params.tokens_min ?? ""} onCommit=${set("tokens_min")} />
      <${TypedInput} type="number" min="0" placeholder="most" aria-label="most tokens" value=${params.tokens_max ?? ""} onCommit=${set("tokens_max")} /></label>
    <button type="button" disabled=${!isFiltered} onClick=${clear}>Clear</button>
    <//>`}
  </div>`;
}

function SortSelect({ sort, parts }) {
  const others = [["answer", "by reference"], ...(parts.length > 1 ? parts.flatMap((name) => [[`-rewards.${name}`, `most ${name}`], [`rewards.${name}`, `least ${name}`]]) : [])];
  return html`<label>order <select value=${sort === "-step" ? "" : sort} onChange=${(event) => setParams({ sort: event.target.value })}>
    ${[...SORTS, ...others].map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>`;
}

function Folded({ count, children }) {
  const isNarrow = useNarrow();
  if (!isNarrow) return children;
  return html`<details><summary>${count ? `${count} more filters are set` : "more filters"}</summary><div>${children}</div></details>`;
}

/** The search of texts: it is asked for when typing has paused. */
function TextFilter({ value }) {
  const [text, setText] = useState(value);
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (text === value) return undefined;
    const timer = setTimeout(() => setParams({ text }, { replace: true }), 350);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<input type="search" placeholder="search in texts" aria-label="Search in texts" value=${text} onInput=${(event) => setText(event.target.value)} />`;
}

function clear(event) {
  event?.preventDefault();
  setParams(Object.fromEntries(FILTERS.map((name) => [name, ""])));
}

function Marks({ row }) {
  return html`${row.starred && html`<span title="starred" aria-label="starred">★ </span>`}
    ${!row.kept && html`<span class="badge warn">${describeKept(row).replace("dropped: ", "")}</span> `}
    ${(row.flags ?? []).map((flag) => html`<span class="badge bad" title="named by the monitor of reward hacking">${flag}</span> `)}`;
}
