// A chart of one metric of several runs, drawn once it is in sight.
import { html, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { useMetrics } from "../lib/metrics.js";
import { seriesStyle } from "../lib/palette.js";
import { compact, meanOf, smooth } from "../lib/series.js";
import { useTheme } from "../lib/theme.js";
import { BreakableName } from "./breakable_name.js";
import { Chart, HEIGHT } from "./chart.js";

/** `groups` are runs drawn as one line each: [[run, ...], ...]. `view` is {axis, isLog, smoothing, zoom, range, onZoom, marks, intervals}:
 * without a zoom the chart shows `range`, or all; `intervals` {name: Map of step to [low, high]} are drawn as a band. */
export function MetricChart({ name, groups, view, actions, height }) {
  const [element, isSeen] = useSeen();
  return html`<section class="chart" ref=${element} data-metric=${name}>
    <header><h2><${BreakableName} name=${name} /></h2>${actions}</header>
    ${isSeen ? html`<${SeenChart} name=${name} groups=${groups} view=${view} height=${height} />` : html`<${Room} height=${height} />`}
  </section>`;
}

function SeenChart({ name, groups, view, height }) {
  const theme = useTheme();
  const columns = useMetrics(groups.flat(), [name]);
  const parts = groups.flat().map((run) => columns[run.id][name]);
  const lines = useMemo(
    () => groups.map((runs, index) => makeLine(runs, index, columns, name, view)),
    [...parts, parts.length, view.axis, view.smoothing, view.intervals, theme, JSON.stringify(groups.map((runs) => runs.map((run) => run.id)))],
  );
  if (parts.some((part) => part === undefined)) return html`<${Room} height=${height}>loading<//>`;
  return html`<${Chart} name=${name} lines=${lines} axis=${view.axis} isLog=${view.isLog} zoom=${view.zoom ?? view.range} onZoom=${view.onZoom} height=${height}
    marks=${view.axis === "step" ? view.marks : undefined} />`;
}

/** What takes the place of a chart until it is drawn, so that nothing moves then. */
function Room({ height = HEIGHT, children }) {
  return html`<div class="plot" style=${{ minHeight: `${height}px` }}></div><div class="readout">${children}</div>`;
}

function makeLine(runs, index, columns, name, { axis, smoothing, intervals }) {
  const series = runs
    .map((run) => columns[run.id][name])
    .filter(Boolean)
    .map((column) => {
      const { x, y, low, high } = compact({ x: axis === "step" ? column.steps : column.seconds, y: column.values, low: column.low, high: column.high });
      const isRough = low?.some((value, place) => value !== high[place]);
      return { x, y: smooth(y, smoothing), raw: smoothing ? y : null, low: isRough ? low : null, high: isRough ? high : null };
    });
  const label = runs.length > 1 ? `${runs[0].name} and ${runs.length - 1} more seed${runs.length > 2 ? "s" : ""}` : runs[0].name;
  const line = series.length > 1 ? meanOf(series) : (series[0] ?? { x: [], y: [], raw: null, low: null, high: null });
  const known = intervals?.[name];
  if (known) Object.assign(line, { low: line.x.map((step, at) => known.get(step)?.[0] ?? line.y[at]), high: line.x.map((step, at) => known.get(step)?.[1] ?? line.y[at]) });
  return { label, style: seriesStyle(index), ...line };
}

/** [ref, whether the element was ever near the window]. */
function useSeen() {
  const element = useRef();
  const [isSeen, setSeen] = useState(false);
  useEffect(() => {
    if (isSeen) return undefined;
    const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && setSeen(true), { rootMargin: "300px" });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, [isSeen]);
  return [element, isSeen];
}
