"""``strop plot``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.output import USAGE_ERROR


def plot(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop plot``. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="strop plot", description="Plot the metrics of a run to a PNG file.", allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, which contains metrics.jsonl")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the PNG file to write (default: in the log folder)")
    options = parser.parse_args(arguments)
    if not options.run.exists():
        print(
            f"error: there is no folder {options.run}; give the log folder of a run, which contains metrics.jsonl",
            file=sys.stderr,
        )
        return USAGE_ERROR
    from strop.monitoring.plot import plot_run

    try:
        print(plot_run(options.run, options.output))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0
