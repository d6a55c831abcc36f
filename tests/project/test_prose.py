"""The worst wording stays out of the source and the pages: what a reader must read twice."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTEAD = {
    r"\banew\b": "again",
    r"\bbeside\b": "alongside, next to, in addition to",
    r"\b(messages|calls) of tools\b": "tool messages, tool calls",
    r"\bis said to\b": "what it does",
    r"\b(it is|is) one that\b": "the noun",
    r"\b(an?|the) \w+ of (its|their|one's|your) own\b(?= *([.,;:)]|$))": "a separate one, its own one",
    r"\b[Ww]hoever\b": "anyone who, or the noun",
    r"\b[Nn]obody\b": "what does not happen",
    r"\bso many\b": "this number of",
    r"\b(on|by|from) [^.;,]{1,40} alone[.;)]": "only, before what it limits",
    r"\b(asks?|asked) for it\b": "requests it, needs it",
    r"\bwho asks\b": "the caller",
    r"\b(thereof|wherein|whereof)\b": "of it, in which",
}


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose_sample", ROOT / "benchmarks" / "prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def find_wording(text: str) -> list[str]:
    plain = " ".join(text.split())
    return [f"{match[0]!r}: write {instead}" for wrong, instead in INSTEAD.items() for match in re.finditer(wrong, plain)]


def list_wording(prose: ModuleType, paths: list[Path]) -> list[str]:
    return [
        f"{piece.path.relative_to(ROOT)}:{piece.line}: {wording}"
        for path in paths
        for piece in prose.pieces_of(path)
        for wording in find_wording(piece.text)
    ]


def test_docstrings_comments_and_messages_avoid_the_worst_wording(prose):
    found = list_wording(prose, sorted(prose.SOURCE.rglob("*.py")))
    assert not found, "\n".join(found)


def test_pages_avoid_the_worst_wording(prose):
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "log"]
    found = list_wording(prose, [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages])
    assert len(pages) > 50 and not found, "\n".join(found)


def test_a_sample_holds_docstrings_comments_and_whole_messages(prose, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""The module."""\n\n# One comment\n# on two lines.\nx = f"found {1}, which "\nraise ValueError("there is " "no such key")\n'
    )
    assert [(piece.line, piece.kind, piece.text) for piece in prose.pieces_of(path)] == [
        (1, "docstring", "The module."),
        (3, "comment", "One comment on two lines."),
        (6, "message", "there is no such key"),
    ]


def test_a_sample_of_a_page_holds_its_sentences_without_code(prose, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "# A page of four words\n\nThe first sentence is\nhere. `This` is the second one.\n\n```sh\nstrop grpo beside it\n```\n"
        "\n- An item of a list\n- Another item of it\n\n| a row | of | a table |\n|---|---|---|\n"
    )
    assert [(piece.line, piece.text) for piece in prose.pieces_of(path)] == [
        (3, "The first sentence is here."),
        (3, "`This` is the second one."),
        (10, "- An item of a list"),
        (11, "- Another item of it"),
        (13, "| a row | of | a table |"),
    ]


@pytest.mark.parametrize(
    "text", ["begins\n    anew", "trained beside it", "in a process of its own.", "it depends on the seed alone."]
)
def test_wording_is_found_across_line_ends(text):
    assert find_wording(text)


@pytest.mark.parametrize("text", ["the gradient of its own token", "besides", "tells them apart", "adapters leave it alone."])
def test_ordinary_wording_passes(text):
    assert not find_wording(text)
