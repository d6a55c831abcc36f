"""Search in a local corpus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from strop.extensions.tools.search_tool import SearchTool, cut_snippet, list_citations, load_index

ROWS = [
    {"id": "fr", "title": "France", "text": "Paris is the capital of France. " + "It lies on the Seine. " * 60},
    {"id": "de", "title": "Germany", "text": "Berlin is the capital of Germany."},
    {"id": "it", "title": "Italy", "text": "Rome is the capital of Italy, and pizza comes from Naples."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return str(path)


def ask(tool: SearchTool, *queries: str) -> list[str]:
    async def run() -> list[str]:
        async with tool.open() as (each,):
            return [str(await each.function(query=query)) for query in queries]

    return asyncio.run(run())


def test_the_best_documents_come_first_with_their_ids(corpus: str) -> None:
    first, second, none = ask(SearchTool(corpus=corpus, results=2), "capital of ITALY", "naples", "zebra")
    assert first.startswith("[it] Italy\nRome is the capital") and first.count("\n\n[") == 1
    assert second.count("[") == 1 and none == "No document has any of these words."
    assert ask(SearchTool(corpus=corpus), "capital of ITALY") == ask(SearchTool(corpus=corpus), "capital of ITALY")


def test_snippets_are_cut_around_the_query(corpus: str) -> None:
    text = "word " * 100 + "needle " + "word " * 100
    assert "needle" in cut_snippet(text, "Needle", 40) and len(cut_snippet(text, "needle", 40)) == 46
    assert cut_snippet("short", "x", 40) == "short"
    (found,) = ask(SearchTool(corpus=corpus, results=1, snippet_chars=60), "Seine France")
    assert len(found) < 100


def test_an_index_is_built_once_until_its_corpus_changes(corpus: str) -> None:
    first = load_index(corpus)
    assert load_index(corpus) is first
    Path(corpus).write_text(json.dumps({"text": "Only zebras."}))
    assert ask(SearchTool(corpus=corpus), "zebras")[0].startswith("[1]\nOnly zebras.")


def test_a_folder_of_text_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("Alpha beta")
    (tmp_path / "b.txt").write_text("Gamma")
    (tmp_path / "c.bin").write_text("Gamma")
    assert ask(SearchTool(corpus=str(tmp_path)), "gamma", "beta") == ["[b.txt]\nGamma", "[notes/a.md]\nAlpha beta"]


def test_equal_documents_keep_the_order_of_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "equal.jsonl"
    path.write_text("\n".join(json.dumps({"text": "same words"}) for _ in range(20)))
    (found,) = ask(SearchTool(corpus=str(path), results=20), "words same")
    assert [line for line in found.splitlines() if line.startswith("[")] == [f"[{n}]" for n in range(1, 21)]


def test_a_corpus_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="there is no corpus"):
        SearchTool(corpus=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="has no documents"):
        ask(SearchTool(corpus=str(tmp_path)), "x")
    (tmp_path / "bad.jsonl").write_text('{"words": 1}')
    with pytest.raises(ValueError, match="line 1 of the corpus is no JSON object with a key 'text'"):
        ask(SearchTool(corpus=str(tmp_path / "bad.jsonl")), "x")
    monkeypatch.setattr("strop.extensions.tools.search_tool.is_installed", lambda package: False)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[search\]'"):
        SearchTool(corpus=str(tmp_path))


def test_citations_are_the_ids_in_brackets() -> None:
    assert list_citations("Rome [it], not Paris [fr, it]. [ ]") == ("it", "fr", "")
