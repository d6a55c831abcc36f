"""The section of a report on recorded steps: rooflines of the last one, as a picture and a table for each process."""

from __future__ import annotations

from pathlib import Path

from strop.monitoring.pages.markup import make_details, make_paragraph, make_table
from strop.monitoring.pages.roofline_drawing import draw_figure
from strop.monitoring.profiling.step_profiler import PROFILES_FOLDER
from strop.monitoring.roofline.roofline_text import (
    HEADER,
    PASS_HEADER,
    describe_ceilings,
    describe_pass,
    describe_rest,
    make_operator_rows,
    make_pass_rows,
)
from strop.monitoring.roofline.step_roofline import ProcessRoofline, list_rooflines, read_roofline, roofline_path

MOST_PROCESSES = 4
MOST_OPERATORS = 30


def write_profiles(run: Path) -> str:
    """Return the content of the section of a run's log folder."""
    folder = run / PROFILES_FOLDER
    traces = sorted(path.name for path in folder.glob("step_*.json.gz"))
    if not traces:
        return make_paragraph("No step was recorded (logger.profile.steps).")
    parts = [make_paragraph(f"Traces in {PROFILES_FOLDER}/, which open in Perfetto or Chromium's DevTools: {', '.join(traces)}.")]
    steps = list_rooflines(folder)
    if not steps:
        return parts[0] + make_paragraph("Operators were not recorded, so there is no roofline (logger.profile.operators).")
    try:
        found = read_roofline(roofline_path(folder, steps[-1]))
    except (OSError, ValueError) as error:
        return parts[0] + make_paragraph(f"The roofline of step {steps[-1]} cannot be read: {error}")
    working = [each for each in found.processes if each.rows]
    shown = sorted(working, key=lambda each: -each.operator_seconds)[:MOST_PROCESSES]
    parts += [_write_process(each, f"step {found.step}, {each.name}") for each in shown]
    if len(working) > len(shown):
        parts.append(make_paragraph(f"{len(working) - len(shown)} more processes are in the file.", kind="note"))
    return "".join(parts)


def _write_process(each: ProcessRoofline, title: str) -> str:
    said = [describe_ceilings(each), *map(describe_pass, each.passes), describe_rest(each)]
    parts = [draw_figure(each, title), make_paragraph("; ".join(text for text in said if text) + ".", kind="note")]
    if each.passes:
        parts.append(make_table(PASS_HEADER, make_pass_rows(each), caption=f"whole passes of {title}", numbers=True))
    rows = make_operator_rows(each, MOST_OPERATORS)
    table = make_table(HEADER, rows, caption="share: of the time of all operators", numbers=True)
    return "".join((*parts, make_details(f"The operators of {title} that took longest: {len(rows)}", table)))
