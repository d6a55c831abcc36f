// Metrics of runs. Charts say which names they draw; names that are asked for at once are fetched together, and live runs are followed.
import { useEffect, useState } from "./ui.js";
import { fetchJson, usePolling } from "./api.js";

const NAMES_AT_ONCE = 40;
const POINTS = 2000;

/** The metrics of one run, as far as they were asked for. */
class RunMetrics {
  constructor(id) {
    this.id = id;
    this.columns = new Map(); // name -> {steps, seconds, values, low, high}
    this.wanted = new Map(); // name -> charts that draw it
    this.pending = new Set();
    this.failed = null;
    this.points = POINTS;
    this.listeners = new Set();
  }

  want(name, by) {
    this.wanted.set(name, (this.wanted.get(name) ?? 0) + by);
    if (by > 0 && !this.columns.has(name)) this.request(name);
  }

  request(name) {
    if (!this.pending.size) setTimeout(() => this.fetchPending(), 10); // once all charts of a view have asked
    this.pending.add(name);
  }

  async fetchPending() {
    const names = [...this.pending];
    this.pending.clear();
    for (let start = 0; start < names.length; start += NAMES_AT_ONCE) await this.fetchNames(names.slice(start, start + NAMES_AT_ONCE));
  }

  async fetchNames(names) {
    try {
      const answer = await fetchJson(["runs", this.id, "metrics"], { names: names.join(","), points: this.points });
      for (const name of names) this.columns.set(name, columnOf(answer, name));
      this.failed = null;
    } catch (error) {
      this.failed = error;
    }
    this.announce();
  }

  /** Fetch what is new of the names that are drawn. A run that went back, to resume at an earlier step, is read again. */
  async follow(step) {
    const seen = Math.max(-1, ...[...this.columns.values()].map((column) => column.steps.at(-1) ?? -1));
    if (Number.isFinite(step) && step < seen) {
      for (const [name, count] of this.wanted) if (count > 0) this.request(name);
      return;
    }
    const names = [...this.wanted].filter(([name, count]) => count > 0 && this.columns.has(name)).map(([name]) => name);
    const last = Math.max(-1, ...names.map((name) => this.columns.get(name).steps.at(-1) ?? -1));
    for (let start = 0; start < names.length; start += NAMES_AT_ONCE) {
      const some = names.slice(start, start + NAMES_AT_ONCE);
      const answer = await fetchJson(["runs", this.id, "metrics"], { names: some.join(","), since: last, points: this.points });
      let isNew = false;
      for (const name of some) isNew = this.append(name, columnOf(answer, name)) || isNew;
      if (isNew) this.announce();
    }
  }

  append(name, more) {
    const old = this.columns.get(name);
    const first = more.steps.findIndex((step) => step > (old.steps.at(-1) ?? -1));
    if (first < 0) return false;
    const join = (a, b) => (a || b ? [...(a ?? old.values), ...(b ?? more.values).slice(first)] : null);
    this.columns.set(name, {
      steps: [...old.steps, ...more.steps.slice(first)],
      seconds: [...old.seconds, ...more.seconds.slice(first)],
      values: [...old.values, ...more.values.slice(first)],
      low: old.low || more.low ? join(old.low, more.low) : null,
      high: old.high || more.high ? join(old.high, more.high) : null,
    });
    return true;
  }

  /** Fetch everything that is drawn again, in more detail. */
  refine(points) {
    if (points <= this.points) return;
    this.points = points;
    for (const [name, count] of this.wanted) if (count > 0) this.request(name);
  }

  announce() {
    for (const listener of this.listeners) listener();
  }
}

function columnOf(answer, name) {
  const values = answer.series[name] ?? answer.steps.map(() => null);
  return {
    steps: answer.steps,
    seconds: answer.seconds ?? answer.steps.map(() => null),
    values,
    low: answer.low?.[name] ?? null,
    high: answer.high?.[name] ?? null,
  };
}

const stores = new Map();

export function metricsOf(id) {
  if (!stores.has(id)) stores.set(id, new RunMetrics(id));
  return stores.get(id);
}

/** {"run id": {name: column}} of the names, of runs [{id, live}]. A column that is not there yet is undefined. */
export function useMetrics(runs, names) {
  const [, redraw] = useState(0);
  const key = JSON.stringify([runs.map((run) => run.id), names]);
  useEffect(() => {
    const listener = () => redraw((count) => count + 1);
    for (const run of runs) {
      const metrics = metricsOf(run.id);
      metrics.listeners.add(listener);
      for (const name of names) metrics.want(name, 1);
    }
    return () => {
      for (const run of runs) {
        const metrics = metricsOf(run.id);
        metrics.listeners.delete(listener);
        for (const name of names) metrics.want(name, -1);
      }
    };
  }, [key]);
  return Object.fromEntries(
    runs.map((run) => [run.id, Object.fromEntries(names.map((name) => [name, metricsOf(run.id).columns.get(name)]))]),
  );
}

/** Follow the runs that are live. One component of a view calls it. */
export function useFollowing(runs) {
  const live = runs.filter((run) => run.live);
  usePolling(live.length > 0, () => live.forEach((run) => metricsOf(run.id).follow(run.step).catch(() => {})));
}
