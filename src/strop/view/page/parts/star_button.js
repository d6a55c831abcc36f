// Marks a rollout as an example to keep, with a note.
import { html, useState } from "../lib/ui.js";
import { fetchJson } from "../lib/api.js";
import { useKeys } from "../lib/keys.js";

export function StarButton({ run, rollout }) {
  const [isStarred, setStarred] = useState(Boolean(rollout.starred));
  const [note, setNote] = useState(rollout.note ?? "");
  const [error, setError] = useState(null);
  const store = (starred, text) => {
    const { step, group, sample } = rollout;
    setStarred(starred);
    fetchJson(["runs", run.id, "stars"], {}, { method: "PUT", body: { step, group, sample, starred, note: text } })
      .then(() => setError(null))
      .catch((problem) => {
        setStarred(!starred);
        setError(problem);
      });
  };
  useKeys({ "*": ["star", () => store(!isStarred, note)] });
  return html`<span>
    <button type="button" aria-pressed=${isStarred ? "true" : "false"} onClick=${() => store(!isStarred, note)} title="*">${isStarred ? "★ starred" : "☆ star"}</button>
    ${isStarred && html` <input type="text" placeholder="note" aria-label="Note of the star" value=${note} onChange=${(event) => {
      setNote(event.target.value);
      store(true, event.target.value);
    }} />`}
    ${error && html` <span class="bad" role="alert">${error.message}</span>`}
  </span>`;
}
