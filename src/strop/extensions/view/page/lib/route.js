// The state of the page is the address: `#/rollouts/12?run=quickstart&ending=length`. A link opens the same view.
import { useEffect, useState } from "./ui.js";

/** Parse a hash into {path: [segments], params: {name: text}}. */
export function parseRoute(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const segments = path.split("/").filter(Boolean).map(decode);
  return { path: segments.length ? segments : ["overview"], params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The hash of a view. Parameters that are empty, null or undefined are left out. */
export function formatRoute(path, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return "#/" + path.map(encodeURIComponent).join("/") + (query ? "?" + query : "");
}

export function currentRoute() {
  return parseRoute(window.location.hash);
}

/** What every view keeps when another is opened: which runs are looked at. */
export function sharedParams() {
  const { run, runs } = currentRoute().params;
  return { run, runs };
}

/** A link to another view of the same runs. */
export function linkTo(path, params = {}) {
  return formatRoute(path, { ...sharedParams(), ...params });
}

export function goTo(path, params = {}) {
  window.location.hash = linkTo(path, params);
}

/** Change some parameters of this view. Changes of a moment (a slider, typing) replace the entry in the history. */
export function setParams(changes, { replace = false } = {}) {
  const { path, params } = currentRoute();
  const hash = formatRoute(path, { ...params, ...changes });
  if (hash === window.location.hash) return;
  if (!replace) {
    window.location.hash = hash;
    return;
  }
  window.history.replaceState(null, "", hash);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Look at the range [from, to] of a chart; at all of it for null. */
export function setZoom(range) {
  setParams({ zoom: range ? range.map((place) => Number(place.toPrecision(7))).join(":") : "" });
}

export function useRoute() {
  const [route, setRoute] = useState(currentRoute);
  useEffect(() => {
    const update = () => setRoute(currentRoute());
    window.addEventListener("hashchange", update);
    return () => window.removeEventListener("hashchange", update);
  }, []);
  return route;
}

function decode(segment) {
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment; // a lone % in an address that was typed
  }
}
