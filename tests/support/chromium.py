"""Tools of the tests that drive the page of ``strop view`` in a real Chromium."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SIZES = {"wide": (1440, 900), "middle": (820, 1100), "narrow": (390, 780)}

# Texts whose contrast with what is behind them is below 4.5 (WCAG 2, AA).
UNREADABLE = """() => {
  const parse = (text) => {
    const [red, green, blue, alpha = 1] = text.match(/[\\d.]+/g).map(Number);
    return [red, green, blue, alpha];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const luminance = (colour) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.slice(0, 3).map((each) => linear(each / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("noscript, option")) continue;
    if (!element.checkVisibility({ visibilityProperty: true })) continue;
    const back = behind(element);
    const pair = [over(parse(getComputedStyle(element).color), back), back].map(luminance).sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    const text = walker.currentNode.data.trim().slice(0, 40);
    if (contrast < 4.5) bad.push(`${contrast.toFixed(2)}: ${text} in ${element.tagName}.${element.className}`);
  }
  return bad;
}"""

# Whether everything that is near the window has been asked for and drawn.
SETTLED = """() => {
  const near = (element) => {
    const { top, bottom } = element.getBoundingClientRect();
    return element.checkVisibility() && bottom > 0 && top < window.innerHeight;
  };
  const undrawn = [...document.querySelectorAll(".plot")].some((plot) => near(plot) && !plot.querySelector(".uplot, .empty"));
  return !undrawn && !document.querySelector("#main .empty[role=status], .rows .waiting");
}"""

# What axe-core, which a test puts into the page, finds wrong with it: rules of WCAG 2 and best practice, with the first element of each.
VIOLATIONS = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.map(
  ({ id, help, nodes }) => `${id}: ${help}; ${nodes.length} times, first ${nodes[0].html.slice(0, 200)}`)"""

# Controls without a name for a screen reader.
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, summary")].filter((element) => {
  if (!element.checkVisibility()) return false;
  const label = element.getAttribute("aria-label") || element.title || element.labels?.[0]?.textContent || element.textContent;
  return !(label ?? "").trim();
}).map((element) => element.outerHTML.slice(0, 120))"""


def show(page: Any, view: str, text: str) -> None:
    """Go to a view by its address, and wait until it says ``text`` and is drawn."""
    page.evaluate("hash => { window.location.hash = hash; }", f"#/{view}")
    try:
        page.wait_for_function(
            "text => document.getElementById('main').textContent.replace(/\\s+/g, ' ').includes(text)", arg=text
        )
        page.wait_for_function(SETTLED)
    except Exception as error:
        raise AssertionError(f"{view} does not say {text!r}; it says {page.inner_text('main')[:1500]}") from error


@contextmanager
def serve_view(*runs: Path) -> Iterator[str]:
    """Start ``strop view`` and give the address with its token."""
    command = [sys.executable, "-m", "strop", "view", *map(str, runs)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    said = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://\S+token=[\w-]+", line):
                yield found[0]
                return
        raise AssertionError("strop view gave no address:\n" + "".join(said))
    finally:
        process.terminate()
        process.wait(20)
