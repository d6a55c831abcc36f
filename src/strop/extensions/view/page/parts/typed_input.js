// A field whose text counts once it is left or Enter is pressed. What is being typed stays while the page is drawn again.
import { html, useState } from "../lib/ui.js";

/** `onCommit` gets the text without blanks around it; other properties are those of the element. */
export function TypedInput({ value, onCommit, ...rest }) {
  const [text, setText] = useState(String(value ?? ""));
  const [shown, setShown] = useState(value);
  if (!Object.is(value, shown)) { // here and not in an effect, which would run after the first letters and take them back
    setShown(value);
    setText(String(value ?? ""));
  }
  return html`<input ...${rest} value=${text} onInput=${(event) => setText(event.target.value)} onChange=${(event) => onCommit(event.target.value.trim())} />`;
}
