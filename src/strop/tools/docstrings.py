"""Parses the descriptions of a function and its parameters from docstrings in Google, NumPy and Sphinx style."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

_GOOGLE = re.compile(r"^(Args|Arguments|Parameters|Params):\s*$")
_NUMPY = re.compile(r"^(Parameters|Other Parameters)\s*$")
_SPHINX = re.compile(r"^:(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\**(\w+)\s*:\s*(.*)$")
_SECTION = re.compile(r"^(Returns?|Yields?|Raises|Examples?|Notes?|See Also|Warnings?|Attributes|References|Todo):?\s*$")
_GOOGLE_ITEM = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_NUMPY_ITEM = re.compile(r"^\*{0,2}(\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")


@dataclass
class DocumentedFunction:
    description: str = ""
    parameters: dict[str, str] = field(default_factory=dict)


def read_docstring(text: str | None) -> DocumentedFunction:
    """Return the description, up to the first section, and the description of each parameter."""
    documented = DocumentedFunction()
    lines = inspect.cleandoc(text or "").splitlines()
    description: list[str] = []
    index, ended = 0, False
    while index < len(lines):
        line = lines[index]
        underlined = index + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[index + 1].strip()) is not None
        if sphinx := _SPHINX.match(line):
            index = _read_sphinx(lines, index, sphinx, documented)
        elif underlined and _NUMPY.match(line):
            index = _read_items(lines, index + 2, documented, numpy=True)
        elif _GOOGLE.match(line):
            index = _read_items(lines, index + 1, documented, numpy=False)
        else:
            ended = ended or underlined or _SECTION.match(line) is not None or line.startswith(":")
            description += [] if ended else [line]
            index += 1
            continue
        ended = True
    documented.description = "\n".join(description).strip()
    return documented


def _read_sphinx(lines: list[str], index: int, match: re.Match[str], documented: DocumentedFunction) -> int:
    texts = [match[2]]
    index += 1
    while index < len(lines) and lines[index].strip() and not lines[index].startswith(":"):
        texts.append(lines[index].strip())
        index += 1
    documented.parameters[match[1]] = " ".join(texts).strip()
    return index


def _read_items(lines: list[str], index: int, documented: DocumentedFunction, *, numpy: bool) -> int:
    """Read the parameters from line ``index`` on, and return the line where they end. Continuation lines are indented below their
    item.
    """
    names: list[str] = []
    indent = 0
    while index < len(lines):
        line = lines[index]
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            index += 1
            continue
        if not numpy and depth == 0:  # the section is over
            return index
        if numpy and depth == 0 and index + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[index + 1].strip()):
            return index
        item = (_NUMPY_ITEM if numpy else _GOOGLE_ITEM).match(line.strip())
        if item and (depth == 0 if numpy else not names or depth <= indent):
            names, indent = [name.strip() for name in item[1].split(",")], depth
            documented.parameters.update(dict.fromkeys(names, "" if numpy else item[2]))
        for name in names if not (item and depth == indent) else ():
            documented.parameters[name] = f"{documented.parameters[name]} {line.strip()}".strip()
        index += 1
    return index
