// Text as coloured tokens. Tokens are made into elements in chunks, when a chunk comes near the window; before that it is plain text of the
// same size.
import { html, useEffect, useMemo, useRef, useState } from "../lib/ui.js";
import { printable } from "../lib/format.js";
import { isMasked, isSampled } from "./token_modes.js";

const CHUNK = 400;

/** Tokens [start, end) of a rollout. `view` is {tokens, levels, at, onPoint}: `at` is the token that is looked at. */
export function TokenText({ start, end, view }) {
  const chunks = useMemo(() => {
    const starts = [];
    for (let place = start; place < end; place += CHUNK) starts.push(place);
    return starts;
  }, [start, end]);
  return html`<pre class="text tokens" onMouseOver=${(event) => point(event, view)} onClick=${(event) => point(event, view, true)}>${chunks.map(
    (place) => html`<${Chunk} key=${place} start=${place} end=${Math.min(place + CHUNK, end)} view=${view}
      at=${view.at >= place && view.at < place + CHUNK ? view.at : -1} />`,
  )}</pre>`;
}

function point(event, view, isKept = false) {
  const index = event.target.dataset?.token;
  if (index !== undefined) view.onPoint(Number(index), isKept);
}

function Chunk({ start, end, view, at }) {
  const element = useRef();
  const [isNear, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => setNear(entries.at(-1).isIntersecting), { rootMargin: "600px" });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  const { tokens, levels } = view;
  const isMade = isNear || at >= 0;
  const content = useMemo(() => {
    if (!isMade) return tokens.pieces.slice(start, end).map(printable).join("");
    return Array.from({ length: end - start }, (_, offset) => {
      const index = start + offset;
      return html`<span key=${index} data-token=${index} class=${classOf(tokens, levels[index], index) + (index === at ? " at" : "")}>${printable(tokens.pieces[index])}</span>`;
    });
  }, [isMade, tokens, levels, at, start, end]);
  return html`<span class="chunk" ref=${element}>${content}</span>`;
}

function classOf(tokens, level, index) {
  const classes = [];
  if (!isSampled(tokens, index)) classes.push("given");
  if (level) classes.push(level < 0 ? `low-${-level}` : `high-${level}`);
  if (isMasked(tokens, index)) classes.push("masked");
  if (tokens.clipped?.[index]) classes.push("clipped");
  return classes.join(" ");
}
