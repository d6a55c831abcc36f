// The runs that the server shows, and which of them are looked at.
import { useMemo } from "./ui.js";
import { useApi } from "./api.js";
import { setParams } from "./route.js";

const UNLIMITED = 1_000_000; // steps: of a run that ends with its epochs
const MOST_AT_ONCE = 8; // as many as have colours

/** {all, chosen, run, error, loading}: every run, those side by side, and the one whose rollouts are shown, as the address says. */
export function useRuns({ params }) {
  const { data, error, loading } = useApi(["runs"], {}, { poll: true });
  return useMemo(() => {
    const all = data ?? [];
    const named = (params.runs ?? "").split(",").filter(Boolean);
    const chosen = named.length ? named.map((id) => all.find((run) => run.id === id)).filter(Boolean) : all.slice(0, MOST_AT_ONCE);
    const run = all.find((each) => each.id === params.run) ?? chosen[0] ?? all[0] ?? null;
    const missing = params.run && data && !all.some((each) => each.id === params.run) ? params.run : null;
    return { all, chosen: chosen.length ? chosen : all.slice(0, 1), run, missing, error, loading: loading && !data };
  }, [data, error, loading, params.runs, params.run]);
}

/** Put a run beside the others, or take it away. */
export function toggleRun(id, { all, chosen }) {
  const ids = chosen.map((run) => run.id);
  const next = ids.includes(id) ? ids.filter((each) => each !== id) : [...ids, id];
  setParams({ runs: next.length === all.length && all.length <= MOST_AT_ONCE ? "" : next.join(",") });
}

export function describeProgress(run) {
  if (run.step === null || run.step === undefined || run.step < 0) return "no step yet";
  return run.max_steps && run.max_steps < UNLIMITED ? `step ${run.step} of ${run.max_steps}` : `step ${run.step}`;
}
