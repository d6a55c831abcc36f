// Marks a rollout as an example to keep, with a note.
import { html, useEffect, useState } from "../lib/ui.js";
import { SAVED, putJson, useApi } from "../lib/api.js";
import { useKeys } from "../lib/keys.js";
import { TypedInput } from "./typed_input.js";

export function StarButton({ run, rollout, validation = false }) {
  const [isStarred, setStarred] = useState(Boolean(rollout.starred));
  const [note, setNote] = useState("");
  const stars = useApi(rollout.starred ? ["runs", run.id, "stars"] : null);
  useEffect(() => {
    const isThis = (star) => ["step", "group", "sample"].every((name) => star[name] === rollout[name]) && Boolean(star.validation) === validation;
    setNote(stars.data?.find(isThis)?.note ?? "");
  }, [stars.data]);
  const [error, setError] = useState(null);
  const store = (starred, text) => {
    const { step, group, sample } = rollout;
    setStarred(starred);
    putJson(["runs", run.id, "stars"], { step, group, sample, starred, note: text, validation })
      .then(() => setError(null))
      .catch((problem) => {
        setStarred(!starred);
        setError(problem);
      });
  };
  useKeys(SAVED ? {} : { "*": ["star", () => store(!isStarred, note)] });
  if (SAVED) return null;
  return html`<span>
    <button type="button" aria-pressed=${isStarred ? "true" : "false"} onClick=${() => store(!isStarred, note)} title="*">${isStarred ? "★ starred" : "☆ star"}</button>
    ${isStarred && html` <${TypedInput} type="text" placeholder="note" aria-label="Note of the star" value=${note} onCommit=${(text) => {
      setNote(text);
      store(true, text);
    }} />`}
    ${error && html` <span class="bad" role="alert">${error.message}</span>`}
  </span>`;
}
