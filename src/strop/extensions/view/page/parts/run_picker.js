// Which run, and which runs side by side.
import { html, useEffect, useRef, useState } from "../lib/ui.js";
import { useKeys } from "../lib/keys.js";
import { setParams } from "../lib/route.js";
import { toggleRun } from "../lib/runs.js";
import { RunSwatch } from "./run_swatch.js";

/** A list of one run. */
export function RunSelect({ runs }) {
  if (runs.all.length < 2) return null;
  return html`<label class="pale">run${" "}
    <select value=${runs.run?.id} onChange=${(event) => setParams({ run: event.target.value })}>
      ${runs.all.map((run) => html`<option value=${run.id}>${run.name}</option>`)}
    </select></label>`;
}

/** A list with a box for each run. */
export function RunsPicker({ runs }) {
  const [isOpen, setOpen] = useState(false);
  const element = useRef();
  useKeys({ Escape: ["", () => (isOpen ? setOpen(false) : false)] });
  useEffect(() => {
    if (!isOpen) return undefined;
    const close = (event) => element.current?.contains(event.target) || setOpen(false);
    window.addEventListener("pointerdown", close);
    return () => window.removeEventListener("pointerdown", close);
  }, [isOpen]);
  if (runs.all.length < 2) return null;
  const ids = runs.chosen.map((run) => run.id);
  return html`<span class="picker" ref=${element}>
    <button type="button" aria-expanded=${isOpen ? "true" : "false"} onClick=${() => setOpen(!isOpen)}>${ids.length} of ${runs.all.length} runs</button>
    ${isOpen &&
    html`<div>
      ${runs.all.map(
        (run) => html`<label key=${run.id}>
          <input type="checkbox" checked=${ids.includes(run.id)} onChange=${() => toggleRun(run.id, runs)} />
          <${RunSwatch} index=${ids.indexOf(run.id)} />${run.name}</label>`,
      )}
    </div>`}
  </span>`;
}
