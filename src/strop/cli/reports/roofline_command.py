"""``strop roofline``."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.log_folder import find_log_folder
from strop.cli.output import USAGE_ERROR, RunParser

MOST_ROWS = 10_000


def roofline(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop roofline``. Return its exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not 1 <= options.rows <= MOST_ROWS:
        parser.error(f"--rows takes a number from 1 to {MOST_ROWS}")
    try:
        path = _find_file(options.run, options.step)
        if options.picture is not None:
            shutil.copyfile(path.with_suffix(".svg"), options.picture)
        print(path.read_text(encoding="utf-8") if options.json else _format(path, options.rows))
        if options.picture is not None:
            print(options.picture, file=sys.stderr if options.json else sys.stdout)
    except (OSError, ValueError, LookupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop roofline",
        description="Say where the time of a recorded step's operators goes, how far each is from what the device can do, and what "
        "bounds it.",
        epilog="Steps are recorded where logger.profile.steps names them and logger.profile.operators is true.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the last that was recorded)")
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="operators of each process (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the file of the step, with every operator")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also copy the picture to an SVG file")
    return parser


def _format(path: Path, rows: int) -> str:
    from strop.monitoring.roofline.roofline_text import format_roofline
    from strop.monitoring.roofline.step_roofline import read_roofline

    return format_roofline(read_roofline(path), rows)


def _find_file(run: Path, step: int | None) -> Path:
    """Return the file of a step's rooflines. Raises ValueError, and what finding a run raises."""
    from strop.monitoring.profiling.step_profiler import PROFILES_FOLDER
    from strop.monitoring.roofline.step_roofline import list_rooflines, roofline_path
    from strop.monitoring.watchdog.doctor import find_run

    folder = find_run(find_log_folder(run)) / PROFILES_FOLDER
    steps = list_rooflines(folder)
    if not steps:
        raise ValueError(
            f"{folder.parent} has no rooflines; record some: logger.profile.steps=[3,4] logger.profile.operators=true"
        )
    if step is not None and step not in steps:
        raise ValueError(f"step {step} has no roofline; found {', '.join(map(str, steps))}")
    return roofline_path(folder, steps[-1] if step is None else step)
