"""Draw docstrings, comments, messages and sentences of pages, to judge whether each is understood at the first reading.

python benchmarks/prose.py --seed 7                     # 100 pieces, drawn from src/strop
python benchmarks/prose.py --seed 7 --count 20 --below src/strop/trainer
python benchmarks/prose.py --seed 7 --below docs        # sentences and table rows, without the log and the generated pages
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "strop"
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEAST_WORDS = 4  # of a message or sentence: shorter ones are keys, formats and names
GENERATED = ("configuration.md", "numerics.md")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"\s*([|#]|[-*] |\d+\. )")  # how a table row, heading or list item begins
SENTENCE_END = re.compile(r"(?<=[.?!]) +(?=[A-Z`*\[])")


@dataclass(frozen=True)
class Piece:
    """A docstring, a comment (adjacent comment lines are one), a message or a sentence, with the line where its block starts."""

    path: Path
    line: int
    kind: str
    text: str


def pieces_of(path: Path) -> list[Piece]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return list(_sentences(path, source))
    found = [*_strings(path, ast.parse(source)), *_comments(path, source)]
    return sorted(found, key=lambda piece: piece.line)


def _strings(path: Path, tree: ast.Module) -> Iterator[Piece]:
    docstrings, nodes = set(), list(ast.walk(tree))
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:  # the string after a field documents the field
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(statement.value)
    inner = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            if node in docstrings:
                yield Piece(path, node.lineno, "docstring", node.value)
            elif len(node.value.split()) >= LEAST_WORDS:
                yield Piece(path, node.lineno, "message", node.value)
        elif isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            if len(text.split()) >= LEAST_WORDS:
                yield Piece(path, node.lineno, "message", text)


def _comments(path: Path, source: str) -> Iterator[Piece]:
    start, end, lines = 0, 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        own_line = not token.line[: token.start[1]].strip()
        if lines and (token.start[0] != end + 1 or not own_line):
            yield Piece(path, start, "comment", " ".join(lines))
            lines = []
        start = start if lines else token.start[0]
        end = token.start[0]
        lines.append(token.string.lstrip("# "))
    if lines:
        yield Piece(path, start, "comment", " ".join(lines))


def _sentences(path: Path, source: str) -> Iterator[Piece]:
    start, lines = 0, list[str]()
    prose = CODE.sub(lambda code: "\n" * code[0].count("\n"), source)
    for number, line in enumerate([*prose.splitlines(), ""], 1):
        if lines and (not line.strip() or BLOCK.match(line)):
            yield from (
                Piece(path, start, "sentence", text)
                for text in SENTENCE_END.split(" ".join(lines))
                if len(text.split()) >= LEAST_WORDS and not text.startswith("#")
            )
            lines = []
        if line.strip():
            start = start if lines else number
            lines.append(line.strip())


def find_files(below: Path) -> list[Path]:
    pages = [page for page in below.rglob("*.md") if page.parent.name != "log" and page.name not in GENERATED]
    return sorted([*below.rglob("*.py"), *pages])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--below", type=Path, default=SOURCE)
    options = parser.parse_args()
    found = [piece for path in find_files(options.below.resolve()) for piece in pieces_of(path)]
    for piece in random.Random(options.seed).sample(found, min(options.count, len(found))):
        print(f"{piece.path.relative_to(SOURCE.parents[1])}:{piece.line} ({piece.kind})\n    {piece.text.strip()}\n")


if __name__ == "__main__":
    main()
