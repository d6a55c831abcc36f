"""Search in a local corpus as a tool: BM25 (Robertson and Zaragoza 2009), by the package ``bm25s``."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from strop.packages import install_command, is_installed
from strop.tools.base import Tool

TEXT_SUFFIXES = (".txt", ".md", ".rst")
_WORD = re.compile(r"\w+")
_building = Lock()  # one index at a time, so that two episodes starting together do not build it twice


@dataclass(frozen=True)
class Document:
    id: str
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class SearchTool:
    """``search(query)``: the best documents of a corpus, with their ids in brackets, which a policy can cite."""

    corpus: str  # a .jsonl file with ``text`` and, if it has them, ``id`` and ``title``; or a folder of .txt, .md and .rst files
    results: int = 3
    snippet_chars: int = 500  # per document, around the first word of the query

    def __post_init__(self) -> None:
        if self.results < 1 or self.snippet_chars < 1:
            raise ValueError("results and snippet_chars must be at least 1")
        if not os.path.exists(self.corpus):
            raise ValueError(f"there is no corpus {self.corpus!r}; set it to a .jsonl file or a folder of text files")
        if not is_installed("bm25s"):
            raise ValueError(f"it needs a package: {install_command('search')}")

    def open(self) -> AbstractAsyncContextManager[Sequence[Tool]]:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Sequence[Tool]]:
            index = await asyncio.to_thread(load_index, self.corpus)

            async def search(query: str) -> str:
                return await asyncio.to_thread(self._search, index, query)

            yield (Tool(name="search", description=DESCRIPTION, parameters=PARAMETERS, function=search),)

        return opened()

    def _search(self, index: SearchIndex, query: str) -> str:
        found = index.search(query, self.results)
        if not found:
            return "No document has any of these words."
        return "\n\n".join(
            f"[{document.id}] {document.title}".rstrip() + "\n" + cut_snippet(document.text, query, self.snippet_chars)
            for document in found
        )


DESCRIPTION = "Search documents by words. Returns the best ones, each with its id in brackets."
PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "Words to search for."}},
    "required": ["query"],
}


class SearchIndex:
    """A corpus and its BM25 index. The same query always gives the same results in the same order."""

    def __init__(self, documents: Sequence[Document]) -> None:
        import bm25s  # type: ignore[import-untyped,unused-ignore]

        self.documents = documents
        self.words = {word: number for number, word in enumerate(sorted({w for each in documents for w in split_words(each)}))}
        self.ranking: Any = bm25s.BM25()
        tokens = [[self.words[word] for word in split_words(each)] for each in documents]
        self.ranking.index((tokens, self.words), show_progress=False)

    def search(self, query: str, results: int) -> list[Document]:
        words = [self.words[word] for word in _WORD.findall(query.lower()) if word in self.words]
        if not words:
            return []
        scores = self.ranking.get_scores_from_ids(sorted(words)).tolist()  # sorted, because float sums depend on the order
        best = sorted((index for index, score in enumerate(scores) if score > 0), key=lambda index: (-scores[index], index))
        return [self.documents[index] for index in best[:results]]


def split_words(document: Document) -> list[str]:
    return _WORD.findall(f"{document.title}\n{document.text}".lower())


def load_index(corpus: str) -> SearchIndex:
    """Return the index of a corpus, built once per process and again when the corpus changes."""
    path = Path(corpus)
    with _building:
        return _build_index(corpus, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _build_index(corpus: str, changed: int) -> SearchIndex:
    documents = list(read_corpus(Path(corpus)))
    if not documents:
        raise ValueError(
            f"the corpus {corpus!r} of the tool search has no documents: no lines of JSON, or no {', '.join(TEXT_SUFFIXES)} files"
        )
    return SearchIndex(documents)


def read_corpus(path: Path) -> Iterator[Document]:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix in TEXT_SUFFIXES and file.is_file():
                name = file.relative_to(path).as_posix()
                yield Document(name, "", file.read_text(encoding="utf-8-sig", errors="replace"))
        return
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _read_document(line, f"{path}, line {number}", number)


def _read_document(line: str, where: str, number: int) -> Document:
    try:
        row = json.loads(line)
        return Document(str(row.get("id", number)), str(row.get("title", "")), str(row["text"]))
    except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{where} of the corpus is no JSON object with a key 'text': {error}") from error


def cut_snippet(text: str, query: str, length: int) -> str:
    """Return ``length`` characters of a text around the first occurrence of a query word."""
    if len(text) <= length:
        return text
    lower = text.lower()
    places = [found for word in _WORD.findall(query.lower()) if (found := lower.find(word)) >= 0]
    start = max(0, min(min(places, default=0) - length // 4, len(text) - length))
    return f"{'...' if start else ''}{text[start : start + length]}{'...' if start + length < len(text) else ''}"


def list_citations(text: str) -> tuple[str, ...]:
    """Return the ids cited in brackets by a text, in order. A citation reward compares them with the wanted document."""
    return tuple(
        dict.fromkeys(found.strip() for group in re.findall(r"\[([^\[\]\n]{1,200})\]", text) for found in group.split(","))
    )
