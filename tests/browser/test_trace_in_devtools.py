"""A trace of a run over Ray in a reader that others wrote: the Performance panel of Chromium's DevTools.

Perfetto's own trace processor cannot be had without a download, and Debian's Chromium has no chrome://tracing. DevTools reads the same
format; its model is asked for processes, threads, slices and their nesting, and the panel is opened as a user opens it, with the file.
"""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loop.runs import overrides, tiny_config

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

BUNDLED = "devtools://devtools/bundled"
READ = f"""async (events) => {{
  const {{ TraceModel }} = await import("{BUNDLED}/models/trace/trace.js");
  const model = TraceModel.Model.createWithAllHandlers();
  await model.parse(events, {{ metadata: {{}}, isFreshRecording: false }});
  const {{ Meta, Renderer }} = model.parsedTrace(0).data;
  const found = [];
  for (const [pid, process] of Renderer.processes) {{
    for (const [tid, thread] of process.threads) {{
      const depths = [];
      const visit = (node, depth) => {{
        depths.push([node.entry.name, node.entry.ts, node.entry.dur, depth]);
        node.children.forEach((child) => visit(child, depth + 1));
      }};
      thread.tree.roots.forEach((root) => visit(root, 0));
      found.push([Meta.processNames.get(pid).args.name, thread.name, depths]);
    }}
  }}
  return [Meta.traceIsGeneric, Meta.traceBounds.range, found];
}}"""
OPEN = f"""async (content) => {{
  const {{ ViewManager }} = await import("{BUNDLED}/ui/legacy/legacy.js");
  await ViewManager.ViewManager.instance().showView("timeline");
  const {{ TimelinePanel }} = await import("{BUNDLED}/panels/timeline/timeline.js");
  const panel = TimelinePanel.TimelinePanel.instance();
  const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
  await panel.loadFromFile(new File([bytes], "step_000003.json.gz", {{ type: "application/gzip" }}));
}}"""
SHOWN = f"""async () => {{
  const {{ TimelinePanel }} = await import("{BUNDLED}/panels/timeline/timeline.js");
  return TimelinePanel.TimelinePanel.instance().hasActiveTrace();
}}"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a step, with torch's operators, of two ranks, an engine and an environment over Ray."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    from loop.tiny import build_tiny

    folder = tmp_path_factory.mktemp("ray")
    changes = {
        "cluster.backend": "ray", "cluster.gpus_per_node": 2, "cluster.environment_hosts": 1, "checkpointing.enabled": False,
        "grpo.max_num_steps": 3, "logger.profile.steps": [3], "logger.profile.operators": True,
    }  # fmt: skip
    settings = overrides({**tiny_config(build_tiny(folder / "model")), **changes})
    done = subprocess.run(
        [sys.executable, "-m", "strop", "grpo", *settings], cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "logs" / "profiles" / "step_000003.json.gz"


@pytest.fixture
def devtools(chromium: Any) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    page.goto(f"{BUNDLED}/devtools_app.html")
    page.wait_for_selector("body.undocked")
    yield page
    context.close()


def nest(spans: list[tuple[float, float, str]]) -> list[tuple[str, float, float, int]]:
    """The spans of a thread with the number of those that each is inside of."""
    found, ends = [], []  # type: ignore[var-annotated]
    for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= start:
            ends.pop()
        found.append((name, start, round(end - start, 3), len(ends)))
        ends.append(end)
    return found


@pytest.mark.slow
def test_devtools_reads_every_process_thread_and_slice_with_its_nesting(trace: Path, devtools: Any) -> None:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = {(event["pid"], event["tid"], event["name"]): event["args"].get("name") for event in events if event["ph"] == "M"}
    ours: dict[tuple[str, str], list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            key = (names[event["pid"], 0, "process_name"], names[event["pid"], event["tid"], "thread_name"])
            ours[key].append((event["ts"], round(event["ts"] + event["dur"], 3), event["name"]))
    generic, length, found = devtools.evaluate(READ, events)
    assert generic and {process for process, *_ in found} == {
        "driver", "learner-0", "learner-1", "engine-0", "environment-arithmetic-0",
    }  # fmt: skip
    spans = [span for each in ours.values() for span in each]
    assert length == pytest.approx(max(end for _, end, _ in spans) - min(start for start, *_ in spans), abs=1.0)
    theirs = {
        (process, thread): [(name, ts, round(dur, 3), depth) for name, ts, dur, depth in rows] for process, thread, rows in found
    }
    assert theirs.keys() == ours.keys()
    assert sum(map(len, theirs.values())) == sum(map(len, ours.values())) > 1000
    for key, each in ours.items():
        assert sorted(theirs[key]) == sorted(nest(each)), key


@pytest.mark.slow
def test_the_performance_panel_opens_the_file(trace: Path, devtools: Any) -> None:
    problems: list[str] = []
    devtools.on("pageerror", lambda error: problems.append(str(error)))
    devtools.evaluate(OPEN, base64.b64encode(trace.read_bytes()).decode())
    devtools.wait_for_timeout(1000)
    assert devtools.evaluate(SHOWN) and problems == []
