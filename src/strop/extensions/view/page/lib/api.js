// Requests to `strop view`. Everything is JSON; an error is a sentence.
import { useEffect, useRef, useState } from "./ui.js";

export const POLL_SECONDS = 2;

const saved = document.getElementById("saved");
/** What the page holds where it was saved to a file: {note, validations, images, answers}; null where a server answers. */
export const SAVED = saved && JSON.parse(saved.textContent);

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status; // 0: no answer
  }
}

/** The address of an endpoint: ["runs", "a", "config"], {points: 2000} -> "api/runs/a/config?points=2000". */
export function apiAddress(path, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return "api/" + path.map(encodeURIComponent).join("/") + (query ? "?" + query : "");
}

/** The address of an image of a run. */
export function imageAddress(runId, name) {
  return SAVED ? (SAVED.images[name] ?? null) : apiAddress(["runs", runId, "images", name]);
}

/** The answer that a saved page holds; of a list the rows that are asked for. */
function answerSaved(path, { step, sort, validation, text = "", from, limit }) {
  const answer = SAVED.answers[path.join("/") + (validation ? "?validation" : "")];
  if (answer === undefined) throw new ApiError("This file does not hold it: `strop view` shows everything that the run stored.", 404);
  if (limit === undefined) return answer;
  const order = sort || "-step";
  const [name, sign] = order.startsWith("-") ? [order.slice(1), -1] : [order, 1];
  const isWanted = (row) => (!step || row.step === Number(step)) && JSON.stringify(row).toLowerCase().includes(text.toLowerCase());
  const rows = answer.rows.filter(isWanted).sort((a, b) => compareSaved(a, b, name, sign));
  return { ...answer, total: rows.length, rows: rows.slice(from, from + limit) };
}

function compareSaved(a, b, name, sign) {
  const [one, other] = [a, b].map((row) => (name.startsWith("rewards.") ? row.rewards?.[name.slice(8)] : row[name]));
  if (typeof one === "string" || typeof other === "string") return sign * String(one ?? "").localeCompare(String(other ?? ""), undefined, { numeric: true });
  const [lacksOne, lacksOther] = [one, other].map((value) => value === null || value === undefined);
  return lacksOne || lacksOther ? lacksOne - lacksOther : sign * (one - other);
}

/** The answer of an endpoint. Throws ApiError, or AbortError if the signal was given up. */
export async function fetchJson(path, params = {}, { signal, method = "GET", body } = {}) {
  if (SAVED) return answerSaved(path, params);
  const options = { signal, method, headers: { Accept: "application/json" }, credentials: "same-origin" };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response, value;
  try {
    response = await fetch(apiAddress(path, params), options);
    value = await response.json().catch(nullIfNotJson);
  } catch {
    if (signal?.aborted) throw signal.reason;
    throw new ApiError("`strop view` does not answer; is it still running?", 0);
  }
  if (!response.ok) throw new ApiError(value?.error ?? `the server answered ${response.status}`, response.status);
  return value;
}

let changes = Promise.resolve();

/** Send a change and return its answer. Changes reach the server in the order in which they were made: each waits for the one before it. */
export function putJson(path, body) {
  const sent = changes.then(() => fetchJson(path, {}, { method: "PUT", body }));
  changes = sent.catch(() => {});
  return sent;
}

/** A body may also be given up, or cut off, while it is read. */
function nullIfNotJson(error) {
  if (error instanceof SyntaxError) return null;
  throw error;
}

/**
 * The answer of an endpoint in a component: {data, error, loading, reload}. `path` null asks nothing. A request that is outdated is
 * given up. `data` keeps the last answer of the same `path` while another is on its way.
 */
export function useApi(path, params = {}, { poll = false } = {}) {
  const address = path === null ? null : apiAddress(path, params);
  const [state, setState] = useState({ data: null, error: null, address: null });
  const [round, setRound] = useState(0);
  const kept = useRef(path?.join("/"));
  if (kept.current !== path?.join("/")) {
    kept.current = path?.join("/");
    state.data = null; // of something else
  }

  useEffect(() => {
    if (address === null) return undefined;
    const given = new AbortController();
    fetchJson(path, params, { signal: given.signal })
      .then((data) => setState({ data, error: null, address }))
      .catch((error) => error.name === "AbortError" || setState((last) => ({ data: last.data, error, address })));
    return () => given.abort();
  }, [address, round]);

  usePolling(poll && address !== null, () => setRound((number) => number + 1));
  const isCurrent = state.address === address;
  return {
    data: address === null ? null : state.data,
    error: isCurrent ? state.error : null,
    loading: address !== null && !isCurrent,
    reload: () => setRound((number) => number + 1),
  };
}

/** Call `action` every two seconds while `active` and the page is visible. */
export function usePolling(active, action) {
  const latest = useRef(action);
  latest.current = action;
  useEffect(() => {
    if (!active || SAVED) return undefined;
    const timer = setInterval(() => document.hidden || latest.current(), POLL_SECONDS * 1000);
    return () => clearInterval(timer);
  }, [active]);
}
