// Light or dark: as the system says, or as the switch was left.
import { useEffect, useState } from "./ui.js";

const KEY = "strop-theme";
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return window.localStorage.getItem(KEY);
  } catch {
    return null; // storage is forbidden
  }
}

export function currentTheme() {
  return stored() ?? (dark.matches ? "dark" : "light");
}

export function setTheme(theme) {
  try {
    window.localStorage.setItem(KEY, theme);
  } catch {
    // it holds until the page is closed
  }
  applyTheme(theme);
}

export function applyTheme(theme = currentTheme()) {
  document.documentElement.dataset.theme = theme;
  window.dispatchEvent(new Event("strop-theme"));
}

/** "light" or "dark"; the component is drawn again when it changes. */
export function useTheme() {
  const [theme, update] = useState(document.documentElement.dataset.theme ?? currentTheme());
  useEffect(() => {
    const changed = () => update(document.documentElement.dataset.theme);
    window.addEventListener("strop-theme", changed);
    return () => window.removeEventListener("strop-theme", changed);
  }, []);
  return theme;
}

dark.addEventListener("change", () => stored() === null && applyTheme());
