"""What README.md and docs/ say of GPUs has one of three words (docs/install.md): run, with its day and card; simulated; read.

A claim is a marker, ``GPU: *word*``, or a cell of a table's column ``GPU``. Other ways to say that something did not run are refused.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path

from support.each import each

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "log" not in page.relative_to(ROOT).as_posix()),
]
MARKER = re.compile(r"GPU: ?\*+(?P<claim>\w+\*+(?: \([^)]*\))?)")
WORDS = re.compile(r"(?P<word>run|simulated|read)\*?(?: \((?P<day>\d{4}-\d\d-\d\d), (?P<card>[A-Z]{1,3}\d{2,4}[A-Z]*)\))?")
GPU = re.compile(r"\b(GPUs?|CUDA|NCCL|cuda_ipc)\b")
OTHER_WORDS = re.compile(
    r"\b(not|never|nothing|none|no run)\b(?! only)[^.;:|]{0,60}"
    r"\b((?<!the )(?<!a )run|ran|checked|tried(?! again)|measured|timed|verified|tested)\b"
    r"|\bwritten, not run\b|\b(untested|unverified)\b",
    re.IGNORECASE,
)


def claims(text: str) -> Iterator[str]:
    """The words of every marker, and every cell of a column ``GPU`` that is not empty."""
    for found in MARKER.finditer(text.replace("\n", " ")):
        yield found["claim"]
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        if "GPU" in rows[0] and len(rows[0]) > 2:
            place = rows[0].index("GPU")
            yield from (row[place] for row in rows[2:] if row[place])


def mistakes(text: str) -> list[str]:
    """What has a fourth word: a claim with another, a run without day and card, or a sentence that says it in a way of its own."""
    found = []
    for claim in claims(text):
        parts = WORDS.fullmatch(claim)
        if parts is None or (parts["word"] == "run") != (parts["day"] is not None):
            found.append(f"{claim!r}: write run (YYYY-MM-DD, CARD), simulated or read")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for sentence in re.split(r"(?<=[.|])\s+|\n\n", prose):
        bare = " ".join(sentence.split())
        if GPU.search(bare) and OTHER_WORDS.search(bare) and not MARKER.search(bare):
            found.append(f"{bare!r}: say GPU: *run* (YYYY-MM-DD, CARD), *simulated* or *read* (docs/install.md)")
    return found


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_claim_about_gpus_has_one_of_three_words(page: Path) -> None:
    assert not mistakes(page.read_text())


def test_what_ran_did_so_on_a_day_that_was() -> None:
    ran = [WORDS.fullmatch(claim) for page in PAGES for claim in claims(page.read_text())]
    days = {parts["day"] for parts in ran if parts and parts["day"]}
    assert days and all(datetime.date.fromisoformat(day) <= datetime.date.today() for day in days)
