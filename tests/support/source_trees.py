"""Strop's own code as syntax trees, for tests that look at all of it."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "strop"


@contextmanager
def without_collecting() -> Iterator[None]:
    """Meanwhile no garbage is looked for among a million nodes, which takes five times as long as what is done with them.

    Python 3.11 fails ("AST constructor recursion depth mismatch") where a finalizer of an earlier test runs inside ``ast.parse``.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def parse_package(folder: Path = PACKAGE) -> dict[Path, ast.Module]:
    with without_collecting():
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """``ast.walk``, quicker, without the nodes that say whether a name is read or written (``ctx``), a third of all."""
    found = [tree]
    for node in found:  # which grows meanwhile
        yield node
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)


def dotted(node: ast.AST) -> str:
    """``ast.unparse``, quickly where the node is a dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ast.unparse(node)
