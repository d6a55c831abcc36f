"""No message to the user is lost: those of ``tests/golden/messages.txt`` still occur in the source.

A message is a string in ``raise X(...)``, ``Problem(...)`` or ``ValueError(...)``, or a string that is yielded, with ``{}`` for what an
f-string fills in. ``PYTHONPATH=tests python tests/project/test_every_message_stands.py src/strop > tests/golden/messages.txt`` lists
those of a tree.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.source_trees import children, parse_package, walk, without_collecting

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "messages.txt"


def templates(node: ast.AST) -> Iterator[str]:
    """Every string below a node as a template, with single spaces; not the strings inside the placeholders of another."""
    if isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
        yield " ".join("".join(parts).split())
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield " ".join(node.value.split())
    else:
        for child in children(node):
            yield from templates(child)


def find_messages(tree: ast.AST) -> set[str]:
    """The messages of a file: templates of several words."""
    found: set[str] = set()
    for node in walk(tree):
        match node:
            case ast.Raise(exc=ast.AST() as said) | ast.Yield(value=ast.JoinedStr() | ast.Constant() as said):
                found.update(templates(said))
            case ast.Call(func=ast.Name(id="Problem" | "ValueError")):
                found.update(templates(node))
    return {template for template in found if " " in template}


@cache
def said() -> str:
    """All strings of the source."""
    with without_collecting():
        return "\n".join({template for tree in parse_package().values() for template in templates(tree)})


def missing(wanted: list[str]) -> list[str]:
    """The messages that stand in no string of the source."""
    return [message for message in wanted if message not in said()]


def old_messages() -> list[str]:
    return GOLDEN.read_text(encoding="utf-8").splitlines()


def test_every_message_stands() -> None:
    """One that was reworded or is not needed any more goes from the file in the same commit."""
    assert len(old_messages()) > 600
    assert missing(old_messages()) == []


if __name__ == "__main__":
    print("\n".join(sorted(set().union(*(find_messages(tree) for tree in parse_package(Path(sys.argv[1])).values())))))
