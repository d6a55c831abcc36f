// What stands where there is nothing to show: an error, a wait, or why it is empty.
import { html, useEffect, useState } from "../lib/ui.js";

export function ErrorNotice({ error }) {
  return error && html`<p class="notice" role="alert">${error.message}</p>`;
}

/** "Loading", unless the answer is there within a moment. */
export function Loading({ what = "" }) {
  const [isLate, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), 250);
    return () => clearTimeout(timer);
  }, []);
  return html`<p class="empty" role="status">${isLate ? `Loading ${what}` : "\u00a0"}</p>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

/** The children once there is data; before that the error or the wait. `title` stands above the error of a view whose title is its data's. */
export function Answer({ of: { data, error, loading }, what, title = null, children }) {
  if (data === null) return error ? html`${title}<${ErrorNotice} error=${error} />` : loading ? html`<${Loading} what=${what} />` : null;
  return html`<${ErrorNotice} error=${error} />${children(data)}`;
}
