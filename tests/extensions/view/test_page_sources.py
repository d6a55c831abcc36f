"""The page's files: colours that can be read, nothing fetched from outside, what a model wrote is text alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import strop

PAGE = Path(strop.__file__).parent / "extensions" / "view" / "page"
OWN_SCRIPTS = sorted(path for path in PAGE.rglob("*.js") if "vendor" not in path.parts)
VENDORED = ("preact/preact_htm.js", "preact/LICENSE", "htm/LICENSE", "uplot/uPlot.js", "uplot/uPlot.css", "uplot/LICENSE")

SERIES = tuple(f"series-{number}" for number in range(1, 10))


def read_themes() -> dict[str, dict[str, str]]:
    text = (PAGE / "style" / "colours.css").read_text(encoding="utf-8")
    blocks = re.findall(r':root(\[data-theme="dark"\])? \{(.*?)\n\}', text, re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", body)) for _, body in blocks)
    assert set(light) == set(dark), "a colour is set in one theme alone"
    return {"light": light, "dark": dark}


def test_every_colour_of_the_styles_is_named_in_colours_css() -> None:
    known = set(read_themes()["light"])
    for path in sorted((PAGE / "style").glob("*.css")):
        text = path.read_text(encoding="utf-8")
        used = set(re.findall(r"var\(--([\w-]+)\)", text)) - {"columns", "row", "height"}
        assert used <= known, f"{path.name} uses {used - known}"
        if path.name != "colours.css":
            assert not re.findall(r"#[0-9a-fA-F]{6}\b", text), f"{path.name} has a colour of its own"


def test_the_number_of_line_colours_is_that_of_the_palette() -> None:
    palette = (PAGE / "lib" / "palette.js").read_text(encoding="utf-8")
    assert f"NUM_COLOURS = {len(SERIES)};" in palette
    assert set(SERIES) <= set(read_themes()["light"])


def test_nothing_is_put_into_the_page_but_as_text() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|srcdoc|javascript:"
    forbidden = re.compile(markup + r"|\beval\b|new Function")
    assert [path.name for path in OWN_SCRIPTS if forbidden.search(path.read_text(encoding="utf-8"))] == []


def test_nothing_is_fetched_from_outside() -> None:
    for path in (*OWN_SCRIPTS, *sorted((PAGE / "style").glob("*.css")), PAGE / "index.html"):
        assert not re.search(r"\w+://|url\(|@import|['\"]//", path.read_text(encoding="utf-8")), path
    for path in sorted((PAGE / "vendor").rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"registry\.|sourceMappingURL|import\(|from ['\"]", text), path


def test_the_html_has_no_script_or_style_of_its_own() -> None:
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    assert "<style" not in text and " style=" not in text and not re.search(r"<script[^>]*>[^<]", text)
    assert not re.search(r"\son\w+=", text)


@pytest.mark.parametrize("path", OWN_SCRIPTS, ids=lambda path: path.relative_to(PAGE).as_posix())
def test_a_script_imports_names_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("// "), "the first line says what the module is"
    for names, source in re.findall(r'import \{([^}]+)\} from "([^"]+)";', text):
        target = (path.parent / source).resolve()
        assert target.is_file(), f"{source} does not exist"
        exported = target.read_text(encoding="utf-8")
        for name in (each.split(" as ")[0].strip() for each in names.split(",") if each.strip()):
            assert re.search(rf"export (?:async )?(?:function|const|class) {name}\b|export \{{[^}}]*\b{name}\b", exported), (
                f"{source} exports no {name}"
            )
            assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is imported and not used"


def test_what_is_vendored_has_its_licence_and_a_version() -> None:
    readme = (PAGE / "vendor" / "README.md").read_text(encoding="utf-8")
    for name in VENDORED:
        assert (PAGE / "vendor" / name).is_file() and name in readme, name
    found = {path.relative_to(PAGE / "vendor").as_posix() for path in (PAGE / "vendor").rglob("*") if path.is_file()}
    assert found == {*VENDORED, "README.md"}


def test_wheels_contain_the_page() -> None:
    project = PAGE.parents[4] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("Strop is installed without its sources")
    settings = tomllib.loads(project.read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["strop"]
    package = PAGE.parents[2]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    missing = [path for path in PAGE.rglob("*") if path.is_file() and path not in packed]
    assert not missing
    assert "src/strop/extensions/view/page/vendor/*/LICENSE" in settings["project"]["license-files"]
