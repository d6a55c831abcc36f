// How near the operators of recorded steps are to what the device can do. Nothing for a run that recorded none.
import { html, useState } from "../lib/ui.js";
import { apiAddress, useApi } from "../lib/api.js";
import { ErrorNotice } from "./notice.js";

export function Rooflines({ run }) {
  const { data } = useApi(["runs", run.id, "rooflines"]);
  const [chosen, choose] = useState(null);
  const steps = data?.steps ?? [];
  if (!steps.length) return null;
  const step = steps.includes(chosen) ? chosen : steps.at(-1);
  const path = ["runs", run.id, "rooflines", String(step)];
  return html`<section class="rooflines"><h3>Roofline of step ${step}</h3>
    ${steps.length > 1 && html`<label>step <select aria-label="step of the roofline" value=${step} onChange=${(event) => choose(Number(event.target.value))}>
      ${steps.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}</select></label>`}
    <img src=${apiAddress([...path, "picture"])} alt=${`Operators of step ${step} by FLOPs a byte and FLOPs a second, under the ceilings of their device; the table below has the same`} />
    <${Table} path=${path} /></section>`;
}

function Table({ path }) {
  const { data, error } = useApi(path);
  return html`<${ErrorNotice} error=${error} />
    <details><summary>The operators that took longest</summary><pre class="code" tabindex="0">${data?.text ?? ""}</pre></details>`;
}
