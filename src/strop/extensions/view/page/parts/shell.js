// What surrounds every view: the list of views, the theme, the keys.
import { html, useEffect, useErrorBoundary, useRef, useState } from "../lib/ui.js";
import { SAVED } from "../lib/api.js";
import { scrollTo, wantHeading } from "../lib/focus.js";
import { useKeys } from "../lib/keys.js";
import { goTo, linkTo, useRoute } from "../lib/route.js";
import { useRuns } from "../lib/runs.js";
import { setTheme, useTheme } from "../lib/theme.js";
import { VIEWS, viewOf } from "../pages/views.js";
import { KeyHelp } from "./key_help.js";
import { Title } from "./title.js";
import { Empty, ErrorNotice, Loading } from "./notice.js";

export function Shell() {
  const route = useRoute();
  const runs = useRuns(route);
  const theme = useTheme();
  const [isHelping, setHelping] = useState(false);
  const view = viewOf(route.path[0]);
  const other = theme === "dark" ? "light" : "dark";
  useKeys({
    "?": ["this list", () => setHelping(true)],
    "/": ["search", () => focusSearch()],
    Escape: ["close, or go back", () => (isHelping ? setHelping(false) : view?.parent ? goTo(view.parent(route)) : false)],
    t: ["light or dark", () => setTheme(other)],
    ...Object.fromEntries(VIEWS.filter((each) => each.key).map((each) => [each.key, [`go to ${each.title}`, () => goTo([each.name])]])),
  });
  useEffect(() => {
    document.title = `${view?.title ?? "Strop"}${runs.run ? " of " + runs.run.name : ""}`;
  }, [view, runs.run?.name]);
  const place = route.path.join("/");
  const shown = useRef(place);
  useEffect(() => {
    if (shown.current !== place) wantHeading();
    shown.current = place;
    const list = document.querySelector(".side nav");
    scrollTo(list.querySelector("[aria-current]"), list);
  }, [place]);

  return html`<a class="skip" href="#main" onClick=${skipToMain}>to the content</a>
    <div class="shell">
      <header class="side">
        <a class="brand" href=${linkTo(["overview"])}>Strop</a>
        <nav aria-label="Views">
          ${VIEWS.filter((each) => !each.isHidden).map(
            (each) => html`<a href=${linkTo([each.name])} aria-current=${each.name === (view?.within ?? view?.name) ? "page" : null}>${each.title}</a>`,
          )}
        </nav>
        <span class="grow"></span>
        ${SAVED && html`<p class="small pale">${SAVED.note}</p>`}
        <div class="small">
          <button type="button" onClick=${() => setTheme(other)} title="t">${other === "dark" ? "Dark" : "Light"}</button>
          <button type="button" onClick=${() => setHelping(true)} title="?">Keys</button>
        </div>
      </header>
      <main class="main" id="main" tabindex="-1"><${Content} route=${route} runs=${runs} view=${view} key=${route.path[0]} /></main>
    </div>
    ${isHelping && html`<${KeyHelp} onClose=${() => setHelping(false)} />`}`;
}

/** The view; a mistake in one leaves the others usable. */
function Content({ route, runs, view }) {
  const [mistake] = useErrorBoundary((error) => console.error(error));
  if (mistake) return html`<${Title} text=${view?.title ?? "Strop"} /><${ErrorNotice} error=${{ message: `This view failed: ${mistake.message}` }} />`;
  if (!view) return html`<${Title} text="Not found" /><${Empty}>There is no view "${route.path[0]}".<//>`;
  if (!runs.all.length) {
    if (runs.error) return html`<${Title} text=${view.title} /><${ErrorNotice} error=${runs.error} />`;
    return runs.loading ? html`<${Loading} what="runs" />` : html`<${Title} text="No run yet" /><${Empty}>The folders that were given to \`strop view\` hold no config.yaml. The page looks again every two seconds.<//>`;
  }
  if (runs.missing && !view.isOfRuns) return html`<${Title} text=${view.title} /><${Empty}>There is no run "${runs.missing}" any more. <a href=${linkTo(["overview"], { run: "", runs: "" })}>All runs</a><//>`;
  return html`<${ErrorNotice} error=${runs.error} /><${view.component} runs=${runs} run=${runs.run} path=${route.path.slice(1)} params=${route.params} />`;
}

function skipToMain(event) {
  event.preventDefault(); // the address is the state of the page
  document.getElementById("main").focus();
}

function focusSearch() {
  const field = document.querySelector("input[type=search]");
  if (!field) return false;
  field.focus();
  field.select();
  return true;
}
