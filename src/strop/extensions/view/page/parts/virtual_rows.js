// A list of any length, of which only the visible rows exist. Pages of rows are fetched when they come into sight; requests for pages
// that are out of sight again are given up.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { POLL_SECONDS } from "../lib/api.js";
import { useKeys } from "../lib/keys.js";
import { useNarrow } from "../lib/narrow.js";
import { formatCount } from "../lib/format.js";
import { Empty, ErrorNotice, Loading } from "./notice.js";

const PAGE = 50; // rows a request
const MAX_PAGES = 40; // kept
const TALLEST = 6_000_000; // pixels; browsers draw nothing beyond some tens of millions
const OVERSCAN = 6;

/**
 * `fetchPage(from, limit, signal)` answers {total, rows, note, isPartial}: a partial answer is asked for again, as is that of a live run; `source` names what it reads: when it changes the list starts anew. `columns` are
 * [{title, width, cell(row), isNumber, isLong, isName, isMinor, sort}]. `href(row)` is where a row leads. A narrow list has no heads: numbers are
 * named in each row, minor columns are left out, and a long one has a line of its own.
 */
export function VirtualRows({ source, fetchPage, columns, href, sort, onSort, what = "rows", emptyText, label, isLive = false }) {
  const pages = usePages(source, fetchPage);
  const isNarrow = useNarrow();
  const shown = isNarrow ? columns.filter((column) => !column.isMinor) : columns;
  const rowHeight = !isNarrow ? 32 : shown.some((column) => column.isLong) ? 54 : 42;
  const scroll = useScroll(pages.total ?? 0, rowHeight, source);
  const [current, setCurrent] = useState(0);
  useEffect(() => setCurrent(0), [source]);
  const first = Math.max(Math.floor(scroll.top / rowHeight) - OVERSCAN, 0);
  const last = Math.min(Math.ceil((scroll.top + scroll.height) / rowHeight) + OVERSCAN, pages.total ?? PAGE);
  useEffect(() => pages.need(first, last), [first, last, source]);
  useEffect(() => {
    if (!isLive && !pages.isPartial) return undefined;
    const timer = setInterval(() => document.hidden || pages.refresh(first, last), (pages.isPartial ? 1 : POLL_SECONDS) * 1000);
    return () => clearInterval(timer);
  }, [isLive, pages.isPartial, first, last, source]);

  const move = (by) => {
    const next = Math.min(Math.max(current + by, 0), Math.max((pages.total ?? 1) - 1, 0));
    setCurrent(next);
    scroll.show(next);
  };
  const perPage = Math.max(Math.floor(scroll.height / rowHeight) - 1, 1);
  useKeys({
    j: ["next row", () => move(1)],
    k: ["previous row", () => move(-1)],
    ArrowDown: ["next row", () => move(1)],
    ArrowUp: ["previous row", () => move(-1)],
    PageDown: ["", () => move(perPage)],
    PageUp: ["", () => move(-perPage)],
    Home: ["first row", () => move(-Infinity)],
    End: ["last row", () => move(Infinity)],
    Enter: ["open the row", () => (pages.row(current) ? (window.location.hash = href(pages.row(current))) : false)],
  });

  if (pages.error && pages.total === null) return html`<${ErrorNotice} error=${pages.error} />`;
  if (pages.total === null) return html`<${Loading} what=${what} />`;
  if (pages.total === 0) return html`<${Empty}>${pages.isPartial ? `Nothing yet. ${pages.note}` : html`${emptyText} ${pages.note}`}<//>`;
  const template = shown.map((column) => (isNarrow && column.isLong ? "" : column.width)).filter(Boolean).join(" ");
  const style = { "--columns": template, "--row": `${rowHeight}px`, "--height": `min(70vh, ${Math.max(pages.total, 3) * rowHeight + 2}px)` };
  const rowId = (index) => `${label}-row-${index}`;
  return html`<${ErrorNotice} error=${pages.error} />
    <div class=${"rows" + (isNarrow ? " two-lines" : "")} style=${style}>
      <div class="window" ref=${scroll.element} tabindex="0" onScroll=${scroll.onScroll} role="grid" aria-label=${label} aria-rowcount=${pages.total + 1}
        aria-activedescendant=${current >= first && current < last ? rowId(current) : null}>
        <div class="head" role="row" aria-rowindex="1">
          ${shown.map((column) => html`<${Heading} column=${column} sort=${sort} onSort=${onSort} />`)}
        </div>
        <div class="spacer" role="rowgroup" style=${{ height: `${scroll.spacer}px` }}>
          ${range(first, last).map((index) => {
            const row = pages.row(index);
            return html`<${Row} key=${index} id=${rowId(index)} index=${index} row=${row} columns=${shown} href=${row ? href(row) : null}
              top=${index * rowHeight - scroll.top + scroll.real} isCurrent=${index === current} isNarrow=${isNarrow} onChoose=${setCurrent} />`;
          })}
        </div>
      </div>
      <div class="foot"><span>row ${formatCount(current + 1)} of ${formatCount(pages.total)} ${what}</span>${pages.note && html`<span>${pages.note}</span>`}</div>
    </div>`;
}

/** The link of the column that names the row covers all of it. */
function Row({ id, index, row, columns, href, top, isCurrent, isNarrow, onChoose }) {
  return html`<div class=${"row" + (isCurrent ? " current" : "")} id=${id} role="row" aria-rowindex=${index + 2} aria-selected=${isCurrent ? "true" : "false"}
    style=${{ transform: `translateY(${top}px)` }} onMouseDown=${() => onChoose(index)}>
    ${columns.map(
      (column) => html`<span role="gridcell" class=${cellClass(column) + (row ? "" : " waiting")}>
        ${isNarrow && column.isNumber && html`<span class="pale">${column.title} </span>`}${row ? (column.isName ? html`<a href=${href} tabindex="-1">${column.cell(row) || "–"}</a>` : column.cell(row)) : "·"}</span>`,
    )}
  </div>`;
}

function cellClass({ isNumber, isLong, isName }) {
  return "cell" + (isNumber ? " number" : "") + (isLong ? " long" : "") + (isName ? " name" : "");
}

function Heading({ column, sort, onSort }) {
  const align = "cell" + (column.isNumber ? " number" : "");
  if (!column.sort || !onSort) return html`<span role="columnheader" class=${align}>${column.title}</span>`;
  const state = sort === column.sort ? "ascending" : sort === "-" + column.sort ? "descending" : "none";
  const next = state === "descending" ? column.sort : state === "ascending" ? "" : "-" + column.sort;
  return html`<span role="columnheader" aria-sort=${state} class=${align}>
    <button type="button" onClick=${() => onSort(next)}>${column.title}${{ ascending: " ↑", descending: " ↓", none: "" }[state]}</button></span>`;
}

/** Pages of rows, the most recently seen ones. */
function usePages(source, fetchPage) {
  const [, redraw] = useState(0);
  const state = useMemo(() => ({ pages: new Map(), underway: new Map(), total: null, error: null, note: "", isPartial: false }), [source]);
  useEffect(() => () => state.underway.forEach((given) => given.abort()), [state]);

  const fetchOne = async (number) => {
    const given = new AbortController();
    state.underway.set(number, given);
    try {
      const answer = await fetchPage(number * PAGE, PAGE, given.signal);
      if (state.total !== null && state.total !== answer.total) state.pages.clear(); // rows have moved
      state.pages.set(number, answer.rows);
      Object.assign(state, { total: answer.total, note: answer.note ?? "", isPartial: Boolean(answer.isPartial) });
      state.error = null;
      for (const old of [...state.pages.keys()].slice(0, -MAX_PAGES)) state.pages.delete(old);
    } catch (error) {
      if (error.name === "AbortError") return;
      state.error = error;
    } finally {
      if (state.underway.get(number) === given) state.underway.delete(number);
    }
    redraw((count) => count + 1);
  };

  return {
    total: state.total,
    error: state.error,
    note: state.note,
    isPartial: state.isPartial,
    refresh(first, last) {
      for (const number of pagesOf(first, last)) if (!state.underway.has(number)) fetchOne(number);
    },
    row: (index) => state.pages.get(Math.floor(index / PAGE))?.[index % PAGE],
    need(first, last) {
      const wanted = pagesOf(first, last);
      for (const [number, given] of state.underway) if (!wanted.includes(number)) given.abort();
      const timer = setTimeout(() => {
        for (const number of wanted) if (!state.pages.has(number) && !state.underway.has(number)) fetchOne(number);
      }, state.total === null ? 0 : 60); // while the scroll bar is dragged, not every place on the way
      return () => clearTimeout(timer);
    },
  };
}

/**
 * Where a list of `count` rows is scrolled to: `top` in pixels of the whole list, `real` in those of the element, which is at most TALLEST.
 * `height` is what is seen of the rows, below their heads.
 * In a taller list small moves go by pixels and large ones (the scroll bar) by shares of the whole.
 */
function useScroll(count, rowHeight, source) {
  const element = useRef();
  const [place, setPlace] = useState({ top: 0, real: 0, height: 600 });
  const latest = useRef(place);
  latest.current = place;
  const whole = count * rowHeight;
  const spacer = Math.min(whole, TALLEST);
  const limit = (height) => [Math.max(whole - height, 0), Math.max(spacer - height, 1)];

  const update = (top, real, height) => {
    latest.current = { top, real, height };
    setPlace(latest.current);
  };
  const onScroll = () => {
    const [real, height] = [element.current.scrollTop, heightOfRows(element.current)];
    const [most, mostReal] = limit(height);
    const moved = real - latest.current.real;
    const isJump = whole <= TALLEST || Math.abs(moved) > height * 2 || real <= 0 || real >= mostReal;
    const top = isJump ? (Math.min(real, mostReal) / mostReal) * most : latest.current.top + moved;
    update(Math.min(Math.max(top, 0), most), real, height);
  };
  useLayoutEffect(() => {
    if (!element.current) return undefined;
    const measure = () => element.current && update(latest.current.top, element.current.scrollTop, heightOfRows(element.current));
    const observer = new ResizeObserver(measure);
    observer.observe(element.current);
    measure();
    return () => observer.disconnect();
  }, [count > 0]);
  useEffect(() => {
    if (element.current) element.current.scrollTop = 0;
    update(0, 0, latest.current.height);
  }, [source]);

  return {
    ...place,
    element,
    spacer,
    onScroll,
    /** Scroll as little as shows the row. */
    show(index) {
      const { top, height } = latest.current;
      const [most, mostReal] = limit(height);
      const [above, below] = [index * rowHeight, (index + 1) * rowHeight - height];
      const next = Math.min(Math.max(above < top ? above : below > top ? below : top, 0), most);
      if (next === top) return;
      const real = Math.round(most ? (next / most) * mostReal : 0);
      update(next, real, height);
      element.current.scrollTop = real;
      latest.current.real = element.current.scrollTop; // as the browser rounds it
    },
  };
}

function heightOfRows(element) {
  return element.clientHeight - element.querySelector(".head").offsetHeight;
}

function pagesOf(first, last) {
  return range(Math.floor(first / PAGE), Math.floor(Math.max(last - 1, first) / PAGE) + 1);
}

function range(first, last) {
  return Array.from({ length: Math.max(last - first, 0) }, (_, index) => first + index);
}
