// The list of keys that `?` shows.
import { html, useEffect, useRef } from "../lib/ui.js";
import { listKeys } from "../lib/keys.js";

const NAMES = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", " ": "space", Escape: "Esc" };

export function KeyHelp({ onClose }) {
  const dialog = useRef();
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-label="Keys">
    <h1>Keys</h1>
    <table class="keys"><tbody>
      ${listKeys().map(([key, help]) => html`<tr><td><kbd>${NAMES[key] ?? key}</kbd></td><td>${help}</td></tr>`)}
    </tbody></table>
    <p><button type="button" onClick=${() => dialog.current.close()}>Close</button></p>
  </dialog>`;
}
