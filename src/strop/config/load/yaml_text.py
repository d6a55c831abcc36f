"""Read and write YAML 1.2 with ruamel.yaml, and find the line of every key. Dates are texts, as in the core schema of YAML 1.2."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

KeyPath = tuple[str, ...]


class YamlError(Exception):
    """Invalid YAML, or a duplicate key. ``line`` and ``column`` count from 1."""

    def __init__(self, message: str, line: int | None = None, column: int | None = None) -> None:
        super().__init__(message)
        self.line, self.column = line, column


class _Constructor(SafeConstructor):
    """Builds plain values; what only later versions of YAML call a date or a value is a text."""


class _Representer(SafeRepresenter):
    """Writes plain values without anchors, and quotes a text where YAML would fold or drop a character."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> ScalarNode:
        needs_quotes = any(not character.isprintable() and character != "\n" for character in text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if needs_quotes else None)

    def represent_number(self, number: float) -> ScalarNode:
        """Write 5.0e-06, not 5e-06, which readers of YAML 1.1 take for a text."""
        node = self.represent_float(number)
        mantissa, e, exponent = node.value.partition("e")
        node.value = f"{mantissa}.0e{exponent}" if e and "." not in mantissa else node.value
        return node


for _tag in ("timestamp", "value"):
    _Constructor.add_constructor(f"tag:yaml.org,2002:{_tag}", SafeConstructor.construct_yaml_str)
_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(float, _Representer.represent_number)


def _make_yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    yaml.default_flow_style, yaml.width = False, 120
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # annotated as None, the default
    return yaml


def parse_value(text: str) -> Any:
    """Parse one value, as after ``key=`` on a command line."""
    return parse(text)[0]


def parse(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Return the document in ``text``, and the line of every key and list item. Raises YamlError."""
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
    except (YAMLError, ValueError) as error:
        raise YamlError(str(error)) from error


def _key_lines(node: Any, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, MappingNode):
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
    elif isinstance(node, SequenceNode):
        for index, value in enumerate(node.value):
            yield (*prefix, str(index)), value.start_mark.line + 1
            yield from _key_lines(value, (*prefix, str(index)))


def dump(values: Any) -> str:
    stream = io.StringIO()
    _make_yaml().dump(values, stream)
    return stream.getvalue()
