// The page of `strop view`.
import { html, render } from "./lib/ui.js";
import { startKeys } from "./lib/keys.js";
import { applyTheme } from "./lib/theme.js";
import { Shell } from "./parts/shell.js";

applyTheme();
startKeys();
const app = document.getElementById("app");
app.textContent = "";
render(html`<${Shell} />`, app);
