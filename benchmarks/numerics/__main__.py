"""Measure Strop beside its peers and write docs/numerics.md: ``make numerics``."""

from __future__ import annotations

import argparse
from pathlib import Path

from numerics.catalogue import sections
from numerics.page import measure, render

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m numerics", description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="the page that is written (default: docs/numerics.md)")
    parser.add_argument("--only", default="", help="measure the sections whose title contains this text, and print them")
    options = parser.parse_args()
    chosen = [section for section in sections() if options.only.lower() in section.title.lower()]
    measured = [measure(section) for section in chosen]
    page = render(measured)
    if options.only:
        print(page)
    else:
        options.out.write_text(page, encoding="utf-8")
    above = [f"{section.section.title}: {row.option} beside {row.peer}" for section in measured for row, _ in section.above()]
    print(*(f"above its bound: {name}" for name in above), sep="\n")
    return 1 if above else 0


if __name__ == "__main__":
    raise SystemExit(main())
