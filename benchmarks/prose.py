"""Draw docstrings, comments and messages from the source, to judge whether each is understood at the first reading.

python benchmarks/prose.py --seed 7                     # 100 pieces, drawn from src/strop
python benchmarks/prose.py --seed 7 --count 20 --below src/strop/trainer
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "strop"
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEAST_WORDS = 4  # of a message: shorter strings are keys, formats and names


@dataclass(frozen=True)
class Piece:
    """A docstring, a comment (adjacent comment lines are one) or a message, with the line where it starts."""

    path: Path
    line: int
    kind: str
    text: str


def pieces_of(path: Path) -> list[Piece]:
    source = path.read_text(encoding="utf-8")
    found = [*_strings(path, ast.parse(source)), *_comments(path, source)]
    return sorted(found, key=lambda piece: piece.line)


def _strings(path: Path, tree: ast.Module) -> Iterator[Piece]:
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:  # the string after a field documents the field
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(statement.value)
    inner = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    for node in ast.walk(tree):
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--below", type=Path, default=SOURCE)
    options = parser.parse_args()
    found = [piece for path in sorted(options.below.resolve().rglob("*.py")) for piece in pieces_of(path)]
    for piece in random.Random(options.seed).sample(found, min(options.count, len(found))):
        print(f"{piece.path.relative_to(SOURCE.parents[1])}:{piece.line} ({piece.kind})\n    {piece.text.strip()}\n")


if __name__ == "__main__":
    main()
