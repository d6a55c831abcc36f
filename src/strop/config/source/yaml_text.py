"""Read and write YAML 1.2 with ruamel.yaml, and find the line of every key. Dates are texts, as in the core schema of YAML 1.2."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

KeyPath = tuple[str, ...]

_ODD_SPACE = re.compile(r"^(?:\s*[\w.-]+:)?[ \t]*(?P<space>[\u00a0\u2000-\u200b\u202f\u3000])(?=[^#\n]*\S)", re.MULTILINE)
_CORE = "tag:yaml.org,2002:"


class YamlError(Exception):
    """Invalid YAML, or a duplicate key. ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


class _Constructor(SafeConstructor):
    """Builds plain values; texts that only other YAML versions treat as dates or values stay texts."""


class _Representer(SafeRepresenter):
    """Writes plain values without anchors, and quotes texts where YAML would fold or drop a character."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> ScalarNode:
        needs_quotes = any(not character.isprintable() and character != "\n" for character in text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if needs_quotes else None)

    def represent_number(self, number: float) -> ScalarNode:
        """Write 5.0e-06 instead of 5e-06, which YAML 1.1 readers parse as a text."""
        node = self.represent_float(number)
        mantissa, e, exponent = node.value.partition("e")
        node.value = f"{mantissa}.0e{exponent}" if e and "." not in mantissa else node.value
        return node


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)
_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(float, _Representer.represent_number)


class _Yaml(YAML):
    def official_plug_ins(self) -> list[Any]:
        """Return nothing: ruamel would search for plug-ins in its package folder each time."""
        return []


def _make_yaml() -> YAML:
    yaml = _Yaml(typ="safe", pure=True)
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    yaml.default_flow_style, yaml.width = False, 120
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # annotated as None, the default
    return yaml


def parse_value(text: str) -> Any:
    """Parse one value, as after ``key=`` on a command line."""
    return parse(text)[0]


def parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the document in ``text``, and the line of every key and list item. Raises YamlError."""
    if odd := _ODD_SPACE.search(text):
        line, column = text.count("\n", 0, odd.start("space")) + 1, odd.start("space") - text.rfind("\n", 0, odd.start("space"))
        character = f"U+{ord(odd['space']):04X}"
        raise YamlError(
            f"{character} is used instead of a space, as inserted by some editors and web pages; write a plain space",
            line,
            column,
        )
    yaml = _make_yaml()
    try:
        node = yaml.compose(io.StringIO(text))
        if node is None:
            return None, {}
        lines = dict(_key_lines(node))
        return yaml.constructor.construct_document(node), lines
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(detail, *((mark.line + 1, mark.column + 1) if mark else ())) from error
    except RecursionError as error:
        raise YamlError("it is nested too deeply, and no key is") from error
    except (YAMLError, ValueError) as error:
        raise YamlError(str(error)) from error


def _key_lines(node: Any, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path and line of everything inside a node."""
    if isinstance(node, MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = _key_name(key, prefix), key.start_mark.line + 1
            if name in seen and name != "<<":
                raise YamlError(
                    f"the key {'.'.join((*prefix, name))} occurs twice, first on line {seen[name]}",
                    line,
                    key.start_mark.column + 1,
                )
            seen[name] = line
            yield (*prefix, name), line
            yield from _key_lines(value, (*prefix, name))
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield (*prefix, str(index)), value.start_mark.line + 1
            yield from _key_lines(value, (*prefix, str(index)))


def _key_name(key: Any, prefix: KeyPath) -> str:
    where = key.start_mark.line + 1, key.start_mark.column + 1
    if not isinstance(key, ScalarNode) or key.tag == f"{_CORE}null":
        kind = "null" if isinstance(key, ScalarNode) else "a list or a mapping"
        inside = f" in {'.'.join(prefix)}" if prefix else ""
        raise YamlError(f"a key{inside} is {kind}; a key must be a text", *where)
    return str(key.value)


def dump(values: Any) -> str:
    return _dump(_Document(repr(values), values))


@dataclass(frozen=True)
class _Document:
    """YAML values whose ``repr`` is complete."""

    text: str
    values: Any = field(compare=False)


@functools.lru_cache(maxsize=8)  # cached, because a run writes its configuration with its metrics and with each checkpoint
def _dump(document: _Document) -> str:
    stream = io.StringIO()
    _make_yaml().dump(document.values, stream)
    return stream.getvalue()
