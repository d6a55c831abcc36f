"""Read and write YAML, with the line of every key.

Scalars are those of YAML 1.2: ``5e-6`` is a number, ``yes`` and ``2024-01-01`` are strings. The writer quotes by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

KeyPath = tuple[str, ...]

SCALAR_PATTERNS = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("merge", r"^(?:<<)$", "<"),
)


class Yaml12Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (not shared with the base class)


class Yaml12Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (not shared with the base class)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: Yaml12Dumper, text: str) -> yaml.ScalarNode:
    """Represent a string, with quotes and escapes where YAML would fold or drop a character."""
    needs_quotes = any(not character.isprintable() and character != "\n" for character in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if needs_quotes else None)


Yaml12Dumper.add_representer(str, _represent_text)

for _tag, _pattern, _first in SCALAR_PATTERNS:
    for _side in (Yaml12Loader, Yaml12Dumper):
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


class YamlError(Exception):
    """Invalid YAML, or a duplicate key. ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


def parse_value(text: str) -> Any:
    """Parse one value, as after ``key=`` on a command line."""
    return parse(text)[0]


def parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the document in ``text``, and the line of every key and list item. Raises YamlError."""
    try:
        loader = Yaml12Loader(text)
        node = loader.get_single_node()
        lines = {} if node is None else dict(_key_lines(node))
        return (None if node is None else loader.construct_document(node)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        detail = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(detail, *((mark.line + 1, mark.column + 1) if mark else ())) from error
    except yaml.YAMLError as error:
        raise YamlError(str(error)) from error


def _key_lines(node: yaml.Node, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen and name != "<<":
                raise YamlError(
                    f"the key {'.'.join((*prefix, name))} occurs twice, first on line {seen[name]}",
                    line,
                    key.start_mark.column + 1,
                )
            seen[name] = line
            yield (*prefix, name), line
            yield from _key_lines(value, (*prefix, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*prefix, str(index)), value.start_mark.line + 1
            yield from _key_lines(value, (*prefix, str(index)))


def dump(values: Any) -> str:
    return yaml.dump(values, Dumper=Yaml12Dumper, sort_keys=False, allow_unicode=True, width=120)
