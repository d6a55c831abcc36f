// The names of the metrics that some runs have logged.
import { useEffect, useState } from "./ui.js";
import { fetchJson, usePolling } from "./api.js";

/** {names: sorted, of all runs together; null before the first answer, error}. Names of live runs are asked for again. */
export function useMetricNames(runs) {
  const [state, setState] = useState({ names: null, error: null });
  const [round, setRound] = useState(0);
  const key = runs.map((run) => run.id).join();
  useEffect(() => {
    const given = new AbortController();
    Promise.all(runs.map((run) => fetchJson(["runs", run.id, "metrics"], {}, { signal: given.signal })))
      .then((answers) => {
        const names = [...new Set(answers.flatMap((answer) => answer.names))].sort();
        setState((old) => (old.names?.join() === names.join() && !old.error ? old : { names, error: null }));
      })
      .catch((error) => error.name === "AbortError" || setState((old) => ({ ...old, error })));
    return () => given.abort();
  }, [key, round]);
  usePolling(runs.some((run) => run.live), () => setRound((count) => count + 1));
  return state;
}
