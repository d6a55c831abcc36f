"""The values of configuration files and overrides, with their origins.

read_config_file  read a YAML file and the files it inherits from (``defaults:``), base first; ``_override_: true`` in a section
                  replaces that of the base
apply_overrides   apply ``a.b=c`` and other overrides from the command line
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.base_config import PLAIN, BaseConfig, KeyPath
from strop.config.source import keys, yaml_text
from strop.config.source.keys import is_misspelling
from strop.problems import COMMAND_LINE, PYTHON, ConfigError, Origin, Problem


@dataclass(frozen=True, eq=False)
class ConfigSource:
    """Nested values, and the file and line of each. Compared by identity, so that derived results can be cached."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[KeyPath, Origin] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    @classmethod
    def from_python(cls, values: Mapping[str, Any]) -> ConfigSource:
        return cls(values, dict.fromkeys(iter_paths(values), Origin(PYTHON)))

    def overlay(self, other: ConfigSource) -> ConfigSource:
        """Return this source with ``other`` on top: sections merge, other values are replaced."""
        return ConfigSource(
            merge_sections(self.values, other.values), {**self.origins, **other.origins}, self.files + other.files
        )

    def layer_of(self, path: KeyPath) -> int:
        """Return the layer number that set a key: that of its file, base first, or one more for the command line."""
        origin = self.origins[path].source
        return self.files.index(origin) if isinstance(origin, Path) and origin in self.files else len(self.files)

    def find_origin(self, path: KeyPath) -> Origin | None:
        """Return where a key was set, otherwise the innermost enclosing section that was; None if neither was."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return None


def get_at(tree: Any, path: KeyPath) -> Any:
    """Return the value at a path through mappings and lists; None if there is none."""
    for name in path:
        index = _list_index(tree, name)
        tree = tree[index] if index is not None else tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def merge_sections(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        current = merged.get(key)
        merged[key] = merge_sections(current, value) if isinstance(current, Mapping) and isinstance(value, Mapping) else value
    return merged


def read_config_file(path: Path, inheriting: tuple[Path, ...] = ()) -> ConfigSource:
    """Read a file and, below it, the files of its ``defaults:``, relative to it. Raises ConfigError."""
    check_path(path, inheriting)
    if path.resolve() in [other.resolve() for other in inheriting]:
        chain = " -> ".join(str(other) for other in (*inheriting, path))
        raise ConfigError(
            [
                Problem(
                    "defaults",
                    f"the files inherit from each other in a cycle: {chain}",
                    "Remove one of the links.",
                    Origin(path),
                )
            ]
        )
    own, bases = _read_single_file(path, inheriting)
    source = ConfigSource()
    for base in bases:
        source = _inherit(source, read_config_file(path.parent / base, (*inheriting, path)))
    return _inherit(source, own) if bases else own


REPLACES = "_override_"  # in a section at the top of a file, as in NeMo-RL: discards the base's section completely


def _inherit(base: ConfigSource, own: ConfigSource) -> ConfigSource:
    """Return ``own`` on top of ``base``, without those sections of the base that it replaces."""
    marked = {name: section for name, section in own.values.items() if isinstance(section, Mapping) and section.get(REPLACES)}
    if marked:
        kept = {name: section for name, section in base.values.items() if name not in marked}
        base = ConfigSource(kept, {path: at for path, at in base.origins.items() if path[0] not in marked}, base.files)
        unmarked = {name: {key: value for key, value in section.items() if key != REPLACES} for name, section in marked.items()}
        origins = {path: at for path, at in own.origins.items() if path[1:] != (REPLACES,)}
        own = ConfigSource({**own.values, **unmarked}, origins, own.files)
    return base.overlay(own)


def check_path(path: Path, inheriting: Sequence[Path]) -> None:
    """Raise ConfigError for an invalid path."""
    try:
        path.exists()
        path.resolve()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message = f"{str(path)!r:.300} cannot be the path of a file: {reason}"
        origin = Origin(inheriting[-1]) if inheriting else None
        raise ConfigError([Problem("defaults" if inheriting else "", message, "Name a YAML file.", origin)]) from error


def _read_single_file(path: Path, inheriting: tuple[Path, ...]) -> tuple[ConfigSource, list[str]]:
    try:
        values, lines = parse_once(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([describe_missing_file(path, inheriting, error)]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"{path} is not a UTF-8 text file: {error.reason} at byte {error.start}")]) from error
    except yaml_text.YamlError as error:
        column = f", column {error.column}" if error.column is not None else ""
        where = Origin(f"{path}, line {error.line}{column}") if error.line else Origin(path)
        raise ConfigError([Problem("", f"this is not valid YAML: {error}", origin=where)]) from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(
            [Problem("", f"found {describe_type(values)}; a configuration is a mapping of sections", origin=Origin(path))]
        )
    defaults = values.pop("defaults", [])
    bases = [defaults] if isinstance(defaults, str) else defaults
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        origin = Origin(path, lines.get(("defaults",)))
        raise ConfigError(
            [
                Problem(
                    "defaults",
                    f"found {defaults!r:.300}; it must be one path or a list of paths, relative to this file",
                    origin=origin,
                )
            ]
        )
    origins = {key: Origin(path, line) for key, line in lines.items() if key[0] != "defaults"}
    return ConfigSource(values, origins, (path,)), bases


def parse_once(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse a file, cached, because many recipes of a folder inherit from the same few files."""
    values, lines = _parse(text)
    return copy_values(values), lines


_parse = functools.lru_cache(maxsize=64)(yaml_text.parse)


def describe_missing_file(path: Path, inheriting: Sequence[Path], error: OSError) -> Problem:
    """Return a Problem with the missing file, the file that inherits from it, and the configurations in its folder."""
    message = f"there is no file {path}" if not path.exists() else f"{path} cannot be read: {error.strerror}"
    if not path.is_absolute() and not inheriting:
        message += f" (the working directory is {Path.cwd()})"
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    siblings = sorted(str(other.relative_to(folder)) for other in folder.glob("*.y*ml"))
    fix = f"In {folder} there are: {', '.join(siblings)}." if siblings else f"There are no YAML files in {folder}."
    key, origin = ("defaults", Origin(inheriting[-1])) if inheriting else ("", None)
    return Problem(key, message, fix, origin)


OVERRIDE = re.compile(r"(?P<mark>\+\+|\+|~)?(?P<key>[^=\s~+][^=\s]*)(?:=(?P<value>.*))?", re.DOTALL)


def apply_overrides(source: ConfigSource, overrides: Sequence[str], root: type[BaseConfig]) -> tuple[ConfigSource, list[Problem]]:
    """Apply overrides in order. Return the new source and a problem for each that cannot be applied."""
    problems: list[Problem] = []
    for text in overrides:
        problem, source = apply_override(source, text, root)
        problems += [problem] if problem else []
    return source, problems


def apply_override(source: ConfigSource, text: str, root: type[BaseConfig]) -> tuple[Problem | None, ConfigSource]:
    match = OVERRIDE.fullmatch(text.strip())
    if match is None or (match["value"] is None and match["mark"] != "~"):
        hint = (
            f"For a configuration file write --config {text}."
            if text.endswith((".yaml", ".yml"))
            else "Write section.key=value, or ~section.key to delete."
        )
        return Problem("", f"{text!r} is not an override", hint, Origin(COMMAND_LINE)), source
    origin, written = Origin(COMMAND_LINE), tuple(match["key"].split("."))
    path = normalize_entry_path(written, source, root)
    if problem := _find_missing_entry(path, source, root, origin):
        return problem, source
    if match["mark"] == "~":
        return delete_key(source, path, origin)
    try:
        value = parse_override_value(path, match["value"], root)
    except yaml_text.YamlError as error:
        fix = "Put the value in quotes twice, once for the shell: key='\"value\"'."
        return Problem(match["key"], f"the value {match['value']} cannot be read: {error}", fix, origin), source
    return set_key(source, path, value, origin)


def normalize_entry_path(path: KeyPath, source: ConfigSource, root: type[BaseConfig]) -> KeyPath:
    """Add or remove the index of a single list entry, to match how the file writes it."""
    for depth in range(1, len(path)):
        field = keys.find_field(root, path[:depth])
        if field is not None and keys.entry_model(field) is not None and keys.is_entry_list(field):
            entries, rest = get_at(source.values, path[:depth]), path[depth:]
            if not isinstance(entries, list) and rest[0] == "0" and len(rest) > 1:
                return (*path[:depth], *rest[1:])
            if isinstance(entries, list) and len(entries) == 1 and not rest[0].isdigit():
                return (*path[:depth], "0", *rest)
    return path


def _find_missing_entry(path: KeyPath, source: ConfigSource, root: type[BaseConfig], origin: Origin) -> Problem | None:
    """Return a problem for an override of an entry that does not exist in a list or single entry."""
    for depth in range(1, len(path)):
        field, entries, index = keys.find_field(root, path[:depth]), get_at(source.values, path[:depth]), path[depth]
        is_list = field is not None and keys.entry_model(field) is not None and keys.is_entry_list(field)
        count = len(entries) if isinstance(entries, list) else 1
        if is_list and index.isdigit() and int(index) >= count:
            where, rest = ".".join(path[:depth]), "".join(f".{name}" for name in path[depth + 1 :])
            has = "one entry" if count == 1 else f"{count} entries, counted from 0"
            fix = f"Write {where}{f'.{count - 1}' if count > 1 else ''}{rest}=..., or name all entries in a list: {where}=[...]."
            return Problem(".".join(path), f"{where} has {has}, so there is no entry {index}", fix, origin)
    return None


def parse_override_value(path: KeyPath, text: str, root: type[BaseConfig]) -> Any:
    """Parse a complete value as YAML: `` #`` does not begin a comment, and YAML syntax inside plain text (``*x``, ``&x``, ``a:
    b``) is part of the text. ``name=7`` is the string "7" if the key is a string. Quotes, brackets and braces have YAML's meaning.
    """
    plain = text.lstrip()[:1] not in ("[", "{", "'", '"')
    field = keys.find_field(root, path)
    is_text = field is not None and keys.format_type(field) in ("str", "str or null")
    try:
        value = yaml_text.parse_value(text)
    except yaml_text.YamlError:
        if not plain:
            raise
        return text
    if not plain:
        _refuse_rest(text, value)
        return value
    if _COMMENT.search(text) or isinstance(value, str) or (is_text and value is not None):
        return text.strip() if isinstance(value, str) or not is_text else text
    return value


_COMMENT = re.compile(r"(^|\s)#")


def _refuse_rest(text: str, value: Any) -> None:
    """Raise YamlError for text after a closing quote or bracket that YAML would drop as a comment."""
    for match in re.finditer(r"\s#", text):
        try:
            cut = yaml_text.parse_value(text[: match.start()])
        except yaml_text.YamlError:  # inside of quotes
            continue
        if cut == value:
            raise yaml_text.YamlError(f"{text[match.start() :].strip()!r} would be dropped as a comment")


def set_key(source: ConfigSource, path: KeyPath, value: Any, origin: Origin) -> tuple[Problem | None, ConfigSource]:
    """Set one key, creating sections on the way; a mapping is merged into a section."""
    values = copy_values(source.values)
    target: Any = values
    created: list[KeyPath] = []
    for depth, name in enumerate(path[:-1], 1):
        index = _list_index(target, name)
        if index is None and isinstance(target, dict) and target.get(name) is None:
            target[name] = {}
            created.append(path[:depth])
        inner = target[index] if index is not None else (target.get(name) if isinstance(target, dict) else None)
        if not isinstance(inner, dict | list):
            return _not_a_section(path, depth, inner, target, origin), source
        target = inner
    index, last = _list_index(target, path[-1]), path[-1]
    if isinstance(target, list):
        if index is None:
            return _not_a_section(path, len(path) - 1, target, target, origin), source
        target[index] = value
    else:
        current = target.get(last)
        target[last] = merge_sections(current, value) if isinstance(current, dict) and isinstance(value, dict) else value
    written = dict.fromkeys((*created, path, *iter_paths(value, path)), origin)
    return None, ConfigSource(values, {**source.origins, **written}, source.files)


def _not_a_section(path: KeyPath, depth: int, value: Any, parent: Any, origin: Origin) -> Problem:
    where = ".".join(path[:depth])
    if isinstance(value, list) or isinstance(parent, list):
        length = len(value if isinstance(value, list) else parent)
        return Problem(".".join(path), f"{where} is a list of {length}", f"Index an entry by number, from 0: {where}.0", origin)
    return Problem(
        ".".join(path), f"{where} is {value!r}, not a section, so no key can be set under it", f"Set {where} itself.", origin
    )


def delete_key(source: ConfigSource, path: KeyPath, origin: Origin) -> tuple[Problem | None, ConfigSource]:
    """Remove a key that a file sets, so that the schema's default applies."""
    dotted = ".".join(path)
    parent = get_at(source.values, path[:-1])
    if not isinstance(parent, Mapping) or path[-1] not in parent:
        near = [".".join(key) for key in source.origins if key[-1] == path[-1] or is_misspelling(key[-1], path[-1])]
        fix = f"Did you mean ~{near[0]}?" if near else "~key removes a key that the file sets; this key is not set."
        return Problem(f"~{dotted}", f"{dotted} is not set", fix, origin), source
    values = without_key(source.values, path)
    origins = {key: where for key, where in source.origins.items() if key[: len(path)] != path}
    return None, ConfigSource(values, origins, source.files)


def without_key(tree: Any, path: KeyPath) -> Any:
    """Return mappings and lists without the key at a path through them."""
    kept = list(tree) if isinstance(tree, list) else dict(tree)
    key: Any = int(path[0]) if isinstance(tree, list) else path[0]
    if len(path) == 1:
        del kept[key]
    else:
        kept[key] = without_key(kept[key], path[1:])
    return kept


def copy_values(value: Any) -> Any:
    """``copy.deepcopy`` for YAML values, whose texts and numbers need no copy."""
    if type(value) in PLAIN or isinstance(value, str):
        return value
    if type(value) is dict:
        return {key: copy_values(inner) for key, inner in value.items()}
    if type(value) is list:
        return [copy_values(inner) for inner in value]
    return copy.deepcopy(value)


def _list_index(target: Any, name: str) -> int | None:
    return int(name) if isinstance(target, list) and name.isdigit() and int(name) < len(target) else None


def iter_paths(tree: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of every key and section of nested values, each section before its keys."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in items:
        yield (*path, str(key))
        yield from iter_paths(inner, (*path, str(key)))


def iter_values(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) of everything in nested values that is neither a mapping nor a list."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else None
    if items is None:
        yield path, tree
        return
    for name, inner in items:
        yield from iter_values(inner, (*path, str(name)))


TYPE_PHRASES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


def describe_type(value: Any) -> str:
    return TYPE_PHRASES.get(type(value), type(value).__name__)
