// One chart: lines with bands, a cursor that all charts of a view share, and zoom by dragging.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib/ui.js";
import uPlot from "../vendor/uplot/uPlot.js";
import { formatDuration, formatNumber, formatTicks } from "../lib/format.js";
import { readColour, withOpacity } from "../lib/palette.js";
import { leastSpan } from "../lib/series.js";
import { useTheme } from "../lib/theme.js";
import { Empty } from "./notice.js";

export const HEIGHT = 210;
const STEP_MARKS = Array.from({ length: 27 }, (_, index) => [1, 2, 5][index % 3] * 10 ** Math.floor(index / 3)); // whole steps
export const CURSOR = uPlot.sync("strop");

const NO_MARKS = [];

/**
 * Draw `lines` [{label, style: {colour, dash}, x, y, raw, low, high, shade}] over steps or seconds. `zoom` is [from, to] or null; `onZoom`
 * gets what was dragged. `raw` is drawn thin behind y, which is smoothed; `low` and `high` as a band; `shade` fills down to the line with that index
 * (null: to the axis), and `own` is what is read in place of y. `marks` [{name, severity, from, to}] are steps in which something was wrong.
 */
export function Chart({ name, lines, axis = "step", isLog = false, zoom = null, onZoom, height = HEIGHT, onX, format = formatNumber, marks = NO_MARKS }) {
  const holder = useRef();
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  const theme = useTheme();
  const drawn = lines.filter((line) => line.x.length);
  const shape = JSON.stringify([drawn.map((line) => [line.label, line.style, Boolean(line.low), Boolean(line.raw), line.shade]), axis, isLog, height, theme]);
  const latest = useRef({});
  latest.current = { zoom, onZoom, onX, drawn, marks };

  useLayoutEffect(() => {
    if (!drawn.length) return undefined;
    const options = makeOptions({ drawn, axis, isLog, height, width: holder.current.clientWidth, latest, setAt });
    const made = new uPlot(options, makeData(drawn, isLog), holder.current);
    plot.current = made;
    applyZoom(made, zoom);
    const observer = new ResizeObserver(() => made.setSize({ width: holder.current.clientWidth, height }));
    observer.observe(holder.current);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);

  useEffect(() => {
    if (!plot.current || !drawn.length) return;
    plot.current.setData(makeData(drawn, isLog), false);
    applyZoom(plot.current, zoom);
  }, [lines, zoom?.[0], zoom?.[1], marks]);

  return html`<div class="plot" ref=${holder} style=${{ minHeight: `${height}px` }} role="img" aria-label=${describe(name, drawn, marks)}>
      ${!drawn.length && html`<${Empty}>No values${isLog ? " above zero" : ""}<//>`}
    </div>
    <${Readout} lines=${drawn} at=${at} axis=${axis} format=${format} marks=${marks} />`;
}

/** The values under the cursor; without a cursor the last ones. */
function Readout({ lines, at, axis, format, marks }) {
  const entries = lines.map((line) => {
    const index = at === null ? line.x.length - 1 : nearest(line.x, at);
    return [line, index];
  });
  const place = at ?? Math.max(...lines.map((line) => line.x.at(-1)));
  const found = new Map(marks.filter((mark) => mark.from - 0.5 <= place && place <= mark.to + 0.5).map((mark) => [mark.name, mark.severity]));
  return html`<div class="readout">
    ${lines.length > 0 && html`<span>${axis === "step" ? `step ${formatNumber(Math.round(place))}` : formatDuration(place)}</span>`}
    ${entries.map(
      ([line, index]) => html`<span>${lines.length > 1 ? line.label + " " : ""}<b>${format((line.own ?? line.raw ?? line.y)[index])}</b>${line.raw ? ` (averaged ${format(line.y[index])})` : ""}
        ${axis === "step" && at !== null && line.x[index] !== Math.round(at) ? ` at ${line.x[index]}` : ""}
        ${line.low && line.low[index] !== line.high[index] ? ` (${format(line.low[index])} to ${format(line.high[index])})` : ""}</span>`,
    )}
    ${[...found].map(([name, severity]) => html`<span class=${severity === "wrong" ? "bad" : "warn"}>${name}</span>`)}
  </div>`;
}

function describe(name, lines, marks) {
  if (!lines.length) return `${name}: no values`;
  const last = lines.map((line) => `${line.label} ${formatNumber(line.y.at(-1))}`);
  const found = marks.map((mark) => `; ${mark.name} from step ${mark.from} to ${mark.to}`);
  return `${name}: last ${last.join(", ")}${found.slice(0, 5).join("")}`;
}

/** A line where something began to be wrong, and a bar along the top for as long as it was. */
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const pixel = uPlot.pxRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const { from, to, severity } of marks) {
    const [left, right] = [plot.valToPos(from, "x", true), plot.valToPos(to, "x", true)];
    ctx.fillStyle = ctx.strokeStyle = readColour(severity === "wrong" ? "--bad" : "--warn");
    ctx.fillRect(left - pixel, bbox.top, Math.max(right - left, 0) + 2 * pixel, 4 * pixel);
    ctx.setLineDash([4 * pixel, 3 * pixel]);
    ctx.lineWidth = pixel;
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

export function nearest(places, value) {
  let [low, high] = [0, places.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(places[low] - value) <= Math.abs(places[high] - value) ? low : high;
}

/** One table for uPlot: x, then of each line y, if it has a band low and high, and raw if it is smoothed. */
function makeData(lines, isLog) {
  const hide = (column) => (isLog ? column.map((value) => (value > 0 ? value : null)) : column);
  const tables = lines.map((line) => [line.x, hide(line.y), ...(line.low ? [hide(line.low), hide(line.high)] : []), ...(line.raw ? [hide(line.raw)] : [])]);
  return uPlot.join(tables);
}

function applyZoom(plot, zoom) {
  const [places] = plot.data;
  const [first, last] = [places[0], places.at(-1)];
  const [min, max] = zoom ?? [first, last];
  plot.setScale("x", min < max ? { min, max } : { min: first - 1, max: last + 1 });
}

function makeOptions({ drawn, axis, isLog, height, width, latest, setAt }) {
  const [ink, line] = [readColour("--pale"), readColour("--line")];
  const { series, bands } = makeSeries(drawn);
  const common = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
  return {
    width: Math.max(width, 80),
    height,
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: drawn.some((line) => line.shade !== undefined) ? fromZero : widenFlat } },
    axes: [
      axis === "step" ? { ...common, size: 28, incrs: STEP_MARKS } : { ...common, size: 28, values: (plot, places) => places.map(formatAxisTime) },
      { ...common, size: roomFor, values: isLog ? undefined : (plot, places, at, space, step) => formatTicks(places, step) },
    ],
    legend: { show: false },
    cursor: {
      sync: { key: CURSOR.key, setSeries: false, scales: ["x", null] },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
    },
    hooks: {
      draw: [(plot) => drawMarks(plot, latest.current.marks)],
      setCursor: [
        (plot) => {
          const place = plot.cursor.left === null || plot.cursor.left < 0 ? null : plot.posToVal(plot.cursor.left, "x");
          setAt(place);
          latest.current.onX?.(place);
        },
      ],
      setSelect: [
        (plot) => {
          const { left, width: wide } = plot.select;
          if (wide < 4) return;
          latest.current.onZoom?.([plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")]);
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        },
      ],
      ready: [(plot) => plot.over.addEventListener("dblclick", () => latest.current.onZoom?.(null))],
    },
    series,
    bands,
  };
}

function makeSeries(lines) {
  const series = [{}];
  const bands = [];
  const places = [];
  for (const line of lines) {
    const { colour, dash } = line.style;
    places.push(series.length);
    series.push({ label: line.label, stroke: colour, width: line.width ?? 1.75, dash, spanGaps: true, points: { show: line.shade === undefined && line.x.length < 40, size: 5 } });
    if (line.low) {
      const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      series.push({ ...edge, label: `${line.label}, lowest` }, { ...edge, label: `${line.label}, highest` });
      bands.push({ series: [series.length - 1, series.length - 2], fill: withOpacity(colour, 0.18) });
    }
    if (line.raw) series.push({ label: `${line.label}, not smoothed`, stroke: withOpacity(colour, 0.35), width: 1, spanGaps: true, points: { show: false } });
  }
  lines.forEach((line, index) => {
    if (line.shade !== undefined && line.shade !== null) {
      bands.push({ series: [places[index], places[line.shade]], fill: withOpacity(line.style.colour, 0.55) });
    } else if (line.shade === null) {
      series[places[index]].fill = withOpacity(line.style.colour, 0.55);
    }
  });
  return { series, bands };
}

/** Pixels for the longest number of an axis. */
function roomFor(plot, texts) {
  const longest = (texts ?? []).reduce((most, text) => Math.max(most, text?.length ?? 0), 4);
  return 14 + longest * 7;
}

/** No axis is so narrow that noise looks like a trend: it spans at least a tenth of its values. */
function widenFlat(plot, min, max) {
  if (min === null || max === null) return [0, 1];
  const lack = Math.max(leastSpan(min, max) - (max - min), 0) / 2;
  const room = Math.max((max - min + 2 * lack) * 0.08, 1e-9);
  return [min >= 0 && min - lack - room < 0 ? 0 : min - lack - room, max + lack + room];
}

/** What is stacked stands on zero. */
function fromZero(plot, min, max) {
  return [0, max > 0 ? max * 1.05 : 1];
}

function formatAxisTime(seconds) {
  if (seconds < 120) return `${formatNumber(seconds, 3)} s`;
  if (seconds < 7200) return `${formatNumber(seconds / 60, 3)} min`;
  return `${formatNumber(seconds / 3600, 3)} h`;
}
