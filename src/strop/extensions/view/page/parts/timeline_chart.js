// The rows of a time line on a canvas: a reading under the cursor, zoom by dragging, arrow keys, a link to each rollout.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { formatDuration } from "../lib/format.js";
import { readColour, seriesStyle, withOpacity } from "../lib/palette.js";
import { IDLE, KINDS, countAtOnce } from "../lib/timeline.js";
import { useTheme } from "../lib/theme.js";

const LOAD = 56; // pixels of the counts above the rows
const LOOP_ROW = 18;
const AXIS = 22;
const FONT = "11px system-ui, sans-serif";

/** `view` is what `layOut` gives; `phaseStyle(name)` the style of a phase of the loop; `onOpen(row)` opens a sample's rollout. */
export function TimelineChart({ view, phaseStyle, onOpen, label }) {
  const theme = useTheme();
  const [holder, canvas] = [useRef(), useRef()];
  const [width, setWidth] = useState(0);
  const [zoom, setZoom] = useState(null);
  const [at, setAt] = useState(null); // {row, span}: places
  const drag = useRef(null);
  const rows = useMemo(() => placeRows(view.rows), [view]);
  const height = rows.bottom + AXIS;
  const [from, to] = zoom ?? [view.from, view.to];
  const left = width < 500 ? 48 : 76;
  const scale = { left, width: Math.max(width - left - 4, 10), from, to };
  const x = (time) => scale.left + ((time - from) / (to - from || 1)) * scale.width;
  const time = (pixel) => from + ((pixel - scale.left) / scale.width) * (to - from);

  useEffect(() => setZoom(null), [view.from, view.to]);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => setWidth(holder.current.clientWidth));
    observer.observe(holder.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (width > 0) draw(canvas.current, { view, rows, scale, x, height, width, phaseStyle });
  }, [view, width, from, to, theme]);

  const place = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const find = (event) => {
    const [px, py] = place(event);
    const row = rows.tops.findIndex((top, index) => py >= top && py < top + rows.heights[index]);
    const span = row < 0 ? -1 : view.rows[row].spans.findLastIndex((each) => time(px) >= each.from && time(px) <= each.to);
    return row < 0 || px < left ? null : { row, span };
  };
  const move = (event) => (drag.current === null ? setAt(find(event)) : setAt(null));
  const release = (event) => {
    const [began, ended] = [drag.current, place(event)[0]];
    drag.current = null;
    if (began === null) return;
    if (Math.abs(ended - began) >= 6) return setZoom([began, ended].sort((a, b) => a - b).map((pixel) => Math.min(Math.max(time(pixel), from), to)));
    const found = find(event);
    if (found && !view.rows[found.row].isLoop) onOpen?.(view.rows[found.row]);
  };
  const walk = (event) => {
    const [down, right] = [{ ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0, { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0];
    if (down || right) setAt((last) => step(view.rows, last, down, right));
    else if (event.key === "Enter" && at && !view.rows[at.row].isLoop) onOpen?.(view.rows[at.row]);
    else if (event.key === "Escape" && (zoom || at)) [setZoom, setAt].forEach((set) => set(null));
    else return;
    event.preventDefault();
  };

  const span = at && view.rows[at.row]?.spans[at.span];
  const box = span && { left: `${Math.max(x(span.from), left) - 1}px`, width: `${Math.max(Math.min(x(span.to), width - 4) - Math.max(x(span.from), left), 1) + 2}px`, top: `${rows.tops[at.row] - 1}px`, height: `${rows.heights[at.row] + 2}px` };
  return html`<div class="timeline" ref=${holder} style=${{ height: `${height}px` }} role="img" tabindex="0" aria-label=${label} onKeyDown=${walk}
      onPointerMove=${move} onPointerLeave=${() => setAt(null)} onPointerDown=${(event) => { drag.current = place(event)[0]; }} onPointerUp=${release} onDblClick=${() => setZoom(null)}>
      <canvas ref=${canvas} style=${{ width: `${width}px`, height: `${height}px` }}></canvas>
      ${box && html`<div class="at" style=${box}></div>`}
    </div>
    <div class="readout" aria-live="polite"><${Reading} row=${at && view.rows[at.row]} span=${span} start=${view.from} />
      ${zoom && html`<button type="button" onClick=${() => setZoom(null)}>All of it</button>`}</div>`;
}

/** The place of the cursor after a key. */
function step(rows, at, down, right) {
  const row = Math.min(Math.max((at?.row ?? -1) + down, 0), rows.length - 1);
  return { row, span: Math.min(Math.max(down ? 0 : (at?.span ?? -1) + right, 0), rows[row].spans.length - 1) };
}

function Reading({ row, span }) {
  if (!row) return html`<span>Point at a sample, or walk with the arrow keys; drag to look closer. A click, or Enter, opens the rollout.</span>`;
  const dropped = row.kept === false ? " (dropped)" : "";
  if (!span) return html`<span><b>${row.title}</b>${dropped}</span>`;
  return html`<span><b>${row.title}</b>${dropped}: ${span.title} <b>${formatDuration((span.to - span.from) / 1000)}</b></span>
    <span>from ${formatMoment(span.from)} to ${formatMoment(span.to)}</span>`;
}

function formatMoment(time) {
  return time < 0 ? `${formatDuration(-time / 1000)} before` : formatDuration(time / 1000);
}

/** {tops, heights, bottom}: where each row stands. The more samples there are, the lower they are. */
function placeRows(rows) {
  const samples = rows.filter((row) => !row.isLoop).length;
  const low = Math.min(Math.max(Math.floor(560 / Math.max(samples, 1)), 3), 14);
  const [tops, heights] = [[], []];
  let top = LOAD + 8;
  rows.forEach((row, index) => {
    if (index && (row.isLoop ? !rows[index - 1].isLoop : row.group !== rows[index - 1].group)) top += row.isLoop ? 10 : low > 4 ? 3 : 1;
    tops.push(top);
    heights.push(row.isLoop ? LOOP_ROW - 2 : low - (low > 4 ? 1 : 0));
    top += row.isLoop ? LOOP_ROW : low;
  });
  return { tops, heights, bottom: top + 2 };
}

function draw(canvas, { view, rows, scale, x, height, width, phaseStyle }) {
  const pixel = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * pixel), Math.round(height * pixel)];
  const ctx = canvas.getContext("2d");
  ctx.scale(pixel, pixel);
  ctx.font = FONT;
  ctx.textBaseline = "middle";
  const look = { ink: readColour("--ink"), page: readColour("--page"), pale: readColour("--pale"), line: readColour("--line"), rest: readColour("--rest") };
  drawAxis(ctx, { rows, scale, x, look });
  drawGroups(ctx, { view, rows, scale, look });
  ctx.save();
  ctx.beginPath();
  ctx.rect(scale.left, 0, scale.width + 2, rows.bottom);
  ctx.clip();
  const most = drawLoad(ctx, { view, scale, look });
  view.rows.forEach((row, index) => (row.isLoop ? drawPhases : drawSample)(ctx, row, rows.tops[index], rows.heights[index], { x, scale, look, phaseStyle }));
  ctx.restore();
  ctx.fillStyle = look.pale;
  ctx.fillText("samples", 2, LOAD / 2 - 7, scale.left - 6);
  ctx.fillText(`up to ${most}`, 2, LOAD / 2 + 7, scale.left - 6);
}

const colourOf = (kind, look) => (KINDS[kind] === null ? look.rest : seriesStyle(KINDS[kind]).colour);

/** Draw how many of the samples are in what, one over another. Returns the most at once. */
function drawLoad(ctx, { view, scale, look }) {
  const columns = Math.max(Math.floor(scale.width), 1);
  const counts = countAtOnce(view.rows, scale.from, scale.to, columns);
  const kinds = Object.keys(KINDS);
  let most = 1;
  for (let column = 0; column < columns; column += 1) most = Math.max(most, kinds.reduce((sum, kind) => sum + counts[kind][column], 0));
  const below = new Float64Array(columns);
  for (const kind of kinds) {
    ctx.fillStyle = colourOf(kind, look);
    for (let column = 0; column < columns; column += 1) {
      const tall = (counts[kind][column] / most) * LOAD;
      if (tall > 0) ctx.fillRect(scale.left + column, LOAD - below[column] - tall, 1, tall);
      below[column] += tall;
    }
  }
  return most;
}

function drawPhases(ctx, row, top, tall, { x, look, phaseStyle }) {
  for (const span of row.spans) {
    const [start, wide] = [x(span.from), Math.max(x(span.to) - x(span.from), 1)];
    const isIdle = IDLE.includes(span.title);
    ctx.fillStyle = isIdle ? look.rest : phaseStyle(span.kind === "sync" ? "weight_sync" : span.title).colour;
    ctx.fillRect(start, top, wide, tall);
    ctx.fillStyle = isIdle ? look.ink : look.page;
    if (ctx.measureText(span.title).width + 8 < wide) ctx.fillText(span.title, start + 4, top + tall / 2);
  }
}

function drawSample(ctx, row, top, tall, { x, look }) {
  for (const span of row.spans) {
    const [start, wide] = [x(span.from), Math.max(x(span.to) - x(span.from), 0.6)];
    const isThin = span.kind === "ended" || span.kind === "waiting";
    const colour = isThin ? look.rest : colourOf(span.kind, look);
    ctx.fillStyle = row.kept ? colour : withOpacity(colour, 0.5);
    if (!isThin) ctx.fillRect(start, top, wide, tall);
    else if (span.kind === "waiting") ctx.fillRect(start, top + tall * 0.3, wide, Math.max(tall * 0.4, 1));
    else ctx.fillRect(start, top + tall / 2, wide, 1);
  }
}

/** The groups' numbers where there is room for them, and the names of the loop's rows. */
function drawGroups(ctx, { view, rows, scale, look }) {
  const room = scale.left - 6;
  ctx.fillStyle = look.pale;
  view.rows.forEach((row, index) => row.isLoop && ctx.fillText(row.title, 2, rows.tops[index] + rows.heights[index] / 2, room));
  let free = 0;
  for (const { title, first, last } of view.groups) {
    const [top, bottom] = [rows.tops[first], rows.tops[last] + rows.heights[last]];
    if (top < free) continue;
    ctx.fillText(room > 60 ? `group ${title}` : title, 2, (top + Math.max(bottom, top + 10)) / 2, room);
    free = Math.max(bottom, top + 13);
  }
}

function drawAxis(ctx, { rows, scale, x, look }) {
  const wanted = (scale.to - scale.from) / Math.max(scale.width / 90, 1);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted) || 1;
  for (let mark = Math.ceil(scale.from / step) * step; mark <= scale.to; mark += step) {
    ctx.fillStyle = look.line;
    ctx.fillRect(Math.round(x(mark)), 0, 1, rows.bottom);
    ctx.fillStyle = look.pale;
    const text = `${Number((mark / 1000).toPrecision(6))} s`;
    ctx.fillText(text, Math.min(x(mark) - (mark === 0 ? 0 : ctx.measureText(text).width / 2), scale.left + scale.width - ctx.measureText(text).width), rows.bottom + AXIS / 2);
  }
}
