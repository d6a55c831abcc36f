"""The ``${...}`` of which most are: a whole text that names one key, or computes with such. They are resolved as OmegaConf does.

OmegaConf needs milliseconds for a text that it reads again each time, and for a tree of all values. What is not plain here is left to it:
texts around an interpolation, sections, the environment, and whatever cannot be resolved, of which it says why.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from strop.base_config import KeyPath

DEEPEST_CHAIN = 40  # of texts that refer to each other
LONGEST = 1000  # characters
REFERENCE = re.compile(r"\$\{(?P<dots>\.*)(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)\}")
CALL = re.compile(r"\$\{(?P<resolver>[a-z]+):")
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?=[,}])")
WORDS = {"null", "true", "false", "nan", "inf"}  # values of OmegaConf's grammar, which are also names of keys
SCALARS = (str, int, float, bool, type(None))


class NotPlainError(Exception):
    """OmegaConf resolves this one, or says why it cannot be resolved."""


@dataclass(frozen=True)
class KeyReference:
    dots: int  # 0: from the root; 1: from the section of the text; 2: from the one around it
    names: KeyPath


@dataclass(frozen=True)
class ResolverCall:
    resolver: str
    arguments: tuple[Node, ...]


Node: TypeAlias = "KeyReference | ResolverCall | int"
Resolvers: TypeAlias = Mapping[str, Callable[..., Any]]


def resolve_plain(values: Mapping[str, Any], resolvers: Resolvers) -> dict[KeyPath, Any]:
    """Return the values of the texts that are plain, by their paths. ``resolvers``: functions of numbers, by name."""
    values_of = _PlainValues(values, resolvers)
    resolved = {}
    for path, text in _iter_texts(values, ()):
        try:
            resolved[path] = values_of.resolve(path, text)
        except NotPlainError:
            continue
    return resolved


def _iter_texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iter_texts(inner, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _iter_texts(inner, (*path, str(index)))
    elif isinstance(value, str) and "${" in value:
        yield path, value


@dataclass(frozen=True)
class _PlainValues:
    values: Mapping[str, Any]
    resolvers: Resolvers

    def resolve(self, path: KeyPath, text: str, depth: int = 0) -> Any:
        node = parse_plain(text)
        if node is None or depth > DEEPEST_CHAIN:
            raise NotPlainError
        return self._compute(node, path, depth)

    def _compute(self, node: Node, path: KeyPath, depth: int) -> Any:
        if isinstance(node, int):
            return node
        if isinstance(node, KeyReference):
            if node.dots > len(path):
                raise NotPlainError
            return self._find((*path[: len(path) - node.dots], *node.names) if node.dots else node.names, depth)
        arguments = [self._compute(argument, path, depth) for argument in node.arguments]
        if node.resolver not in self.resolvers:
            raise NotPlainError
        try:
            return self.resolvers[node.resolver](*arguments)
        except Exception as error:  # such as a division by 0
            raise NotPlainError from error

    def _find(self, path: KeyPath, depth: int) -> Any:
        value: Any = self.values
        for name in path:
            if isinstance(value, Mapping) and name in value:
                value = value[name]
            elif isinstance(value, list | tuple) and name.isdigit() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise NotPlainError
        if type(value) not in SCALARS or value == "???" or (isinstance(value, str) and "\\" in value):
            raise NotPlainError
        return self.resolve(path, value, depth + 1) if isinstance(value, str) and "${" in value else value


@functools.lru_cache(maxsize=4096)
def parse_plain(text: str) -> Node | None:
    """Return what a text says that is one plain interpolation from its first character to its last; None for another."""
    if len(text) > LONGEST:
        return None
    try:
        node, end = _parse(text, 0)
    except NotPlainError:
        return None
    return node if end == len(text) and not isinstance(node, int) else None


def _parse(text: str, start: int) -> tuple[Node, int]:
    if number := INTEGER.match(text, start):
        return int(number[0]), number.end()
    if reference := REFERENCE.match(text, start):
        names = tuple(reference["name"].split("."))
        if any(name.lower() in WORDS for name in names):
            raise NotPlainError
        return KeyReference(len(reference["dots"]), names), reference.end()
    call = CALL.match(text, start)
    if call is None:
        raise NotPlainError
    arguments: list[Node] = []
    end = call.end() - 1
    while not arguments or text[end : end + 1] == ",":
        argument, end = _parse(text, end + 1)
        arguments.append(argument)
    if text[end : end + 1] != "}":
        raise NotPlainError
    return ResolverCall(call["resolver"], tuple(arguments)), end + 1
