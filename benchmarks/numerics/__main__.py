"""Compare Strop with its peers and write docs/numerics.md: ``make numerics``."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from numerics.catalogue import measure_section, sections
from numerics.page import Measured, measure, render

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"
WORKERS = 2  # processes that measure a section each


def measure_all() -> list[Measured]:
    found = sections()
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [Measured(*each) for each in zip(found, pool.map(measure_section, range(len(found))), strict=True)]


def measure_some(title: str) -> list[Measured]:
    chosen = [section for section in sections() if title.lower() in section.title.lower()]
    return [Measured(section, measure(section)) for section in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m numerics", description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="the page that is written (default: docs/numerics.md)")
    parser.add_argument("--only", default="", help="measure the sections whose title contains this text, and print them")
    options = parser.parse_args(arguments)
    measured = measure_some(options.only) if options.only else measure_all()
    if options.only:
        print(render(measured))
    else:
        options.out.write_text(render(measured), encoding="utf-8")
    above = [f"{one.section.title}: {row.option} against {row.peer}" for one in measured for row in one.above()]
    print(*(f"above its bound: {name}" for name in above), sep="\n")
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
