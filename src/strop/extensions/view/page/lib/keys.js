// Keys of the page. A component says which it takes; the newest one that takes a key gets it. `?` lists them.
import { useLayoutEffect, useRef } from "./ui.js";

const layers = []; // [{keys: {current: {key: [help, action]}}}], the newest last

const isTyping = (element) => element.matches("input:not([type=checkbox]):not([type=radio]):not([type=range]), textarea, select");

/** Take keys while the component is shown: {j: ["next row", action]}. An action that returns false passes the key on. */
export function useKeys(keys) {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => { // before anything can be pressed
    const layer = { keys: latest };
    layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  }, []);
}

/** [[key, help]] of all components that are shown, each key once. */
export function listKeys() {
  const found = new Map();
  for (const layer of layers) {
    for (const [key, [help]] of Object.entries(layer.keys.current)) if (help) found.set(key, help);
  }
  return [...found];
}

export function startKeys() {
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (isTyping(event.target) && event.key !== "Escape") return;
    if (event.key === "Escape" && isTyping(event.target)) event.target.blur();
    const isOwnKey = ["Enter", " "].includes(event.key) && event.target.matches("button, a, summary, input");
    if (isOwnKey) return;
    for (const layer of [...layers].reverse()) {
      const entry = layer.keys.current[event.key];
      if (entry && entry[1](event) !== false) {
        event.preventDefault();
        return;
      }
    }
  });
}
