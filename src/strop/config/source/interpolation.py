"""Interpolation with ``${...}``: absolute (``${policy.model_name}``), relative (``${.a}``, ``${..a}``), and arithmetic.

``${mul:a,b}``, ``${add:a,b}``, ``${sub:a,b}``, ``${div:a,b}``, ``${max:a,b}`` and ``${min:a,b}`` nest; ``div`` of integers is an integer
where it is exact. ``${env:NAME}`` and ``${env:NAME,default}`` (or ``oc.env``) read the environment. ``\\${`` is a literal ``${``.

``run_name`` names a run and its folders. Its placeholder ``{overrides}`` turns a sweep into one loop.
"""

from __future__ import annotations

import functools
import math
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from strop.base_config import NAMES_FILE, BaseConfig, KeyPath, fields_of, followed_keys, section_model
from strop.config.source import keys
from strop.config.source.keys import find_field
from strop.config.source.yaml_source import ConfigSource, copy_values, get_at, merge_sections, set_key
from strop.data.prompt_template import AUTO_PROMPT
from strop.problems import Origin, Problem

UNSET_VARIABLE = "the environment variable"
UNKNOWN_TARGET = re.compile(r"\$\{(?!\.*[A-Za-z_][\w.]*\}|[a-z_.]+:)")  # a name that is itself interpolated, or has brackets
PLAIN = frozenset({bool, int, float, type(None)})  # types of values that contain no text


def _divide(a: Any, b: Any) -> Any:
    return a // b if isinstance(a, int) and isinstance(b, int) and b != 0 and a % b == 0 else a / b


def _arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for numbers only: the product of a text and a number would repeat the text."""

    def compute(*numbers: Any) -> Any:
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"it computes with numbers, and found {number!r:.80}")
        return function(*numbers)

    return compute


def _read_environment(name: str, *default: Any) -> Any:
    if name in os.environ:
        return os.environ[name]
    if default:
        return default[0]
    raise ValueError(f"the environment variable {name} is not set")


RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": _arithmetic(lambda *numbers: math.prod(numbers)),
    "add": _arithmetic(lambda *numbers: sum(numbers)),
    "sub": _arithmetic(lambda a, b: a - b),
    "div": _arithmetic(_divide),
    "max": _arithmetic(max),
    "min": _arithmetic(min),
    "env": _read_environment,
}


def _register() -> None:
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # since OmegaConf 2.4, and before
    for name, function in RESOLVERS.items():
        register(name, function, replace=True)


def resolve_interpolations(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Resolve every interpolation. Return the values, and an error for each that cannot be resolved and is None in the values."""
    _register()
    errors = {
        path: f"{text!r} cannot be read as an interpolation; write ${{section.key}}, or \\${{ for a literal ${{"
        for path, text in _collect_texts(values).items()
        if not _parses(text)
    }
    readable = _without(values, errors)
    found, unresolved = _resolve_tree(_keep_referenced(readable))
    # Copies: sections and lists are cached, and a caller may change its own.
    resolved: dict[str, Any] = _map_strings(readable, lambda path, text: copy_values(found[path]))
    return resolved, {**errors, **unresolved}


def _without(values: Mapping[str, Any], unreadable: Collection[KeyPath]) -> Any:
    """Return the values with None for the texts at these paths."""
    return _map_strings(values, lambda path, text: None if path in unreadable else text) if unreadable else values


@dataclass(frozen=True)
class _ReferencedTree:
    """Values whose ``repr`` is complete, as for all values of YAML."""

    text: str
    values: dict[str, Any] = field(compare=False)


def _resolve_tree(values: dict[str, Any]) -> tuple[dict[KeyPath, Any], dict[KeyPath, str]]:
    """Return the values of all texts by path, and an error for each that cannot be resolved. Both are shared.

    A configuration is resolved before and after its translation, which rarely changes the references.
    """
    tree = _ReferencedTree(repr(values), values)
    return _resolve_texts.__wrapped__(tree) if "env:" in tree.text else _resolve_texts(tree)  # the environment may change


@functools.lru_cache(maxsize=64)
def _resolve_texts(tree: _ReferencedTree) -> tuple[dict[KeyPath, Any], dict[KeyPath, str]]:
    found: dict[KeyPath, Any] = {}
    errors: dict[KeyPath, str] = {}
    nodes = OmegaConf.create(tree.values)
    for path, text in _collect_texts(tree.values).items():
        found[path] = _resolve_value(nodes, path, text, errors)
    return found, errors


def _map_strings(value: Any, change: Any, path: KeyPath = ()) -> Any:
    if isinstance(value, dict | Mapping):  # dict first: an isinstance check with Mapping is slow
        return {
            key: inner if type(inner) in PLAIN else _map_strings(inner, change, (*path, str(key))) for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(inner, change, (*path, str(index))) for index, inner in enumerate(value)]
    return change(path, value) if isinstance(value, str) and "${" in value else value


def _keep_referenced(values: dict[str, Any]) -> dict[str, Any]:
    """Return the texts with ``${...}`` and the values they refer to. Creating an OmegaConf tree with all values takes long."""
    texts = _collect_texts(values)
    if any(UNKNOWN_TARGET.search(text) for text in texts.values()):
        return values
    needed = {target for path, text in texts.items() for target in iter_targets(path, text)}
    around = {path[:length] for path in (*needed, *texts) for length in range(len(path) + 1)}

    def keep(value: Any, path: KeyPath) -> Any:
        if not isinstance(value, Mapping) or path in needed:
            return value
        return {key: keep(inner, (*path, str(key))) for key, inner in value.items() if (*path, str(key)) in around}

    kept: dict[str, Any] = keep(values, ())
    return kept


def _collect_texts(values: Mapping[str, Any]) -> dict[KeyPath, str]:
    texts: dict[KeyPath, str] = {}

    def collect(value: Any, path: KeyPath) -> None:
        if isinstance(value, str):
            if "${" in value:
                texts[path] = value
        elif isinstance(value, dict | Mapping):
            for key, inner in value.items():
                if type(inner) not in PLAIN:
                    collect(inner, (*path, str(key)))
        elif isinstance(value, list | tuple):
            for index, inner in enumerate(value):
                collect(inner, (*path, str(index)))

    collect(values, ())
    return texts


def iter_targets(path: KeyPath, text: str) -> Iterator[KeyPath]:
    """Yield the paths that a text at ``path`` refers to, with repetitions. Interpolated paths are unknown."""
    for dots, name in re.findall(r"\$\{(\.*)([A-Za-z_][\w.]*)\}", text):
        yield (*(path[: -len(dots)] if dots else ()), *name.split("."))


@functools.lru_cache(maxsize=4096)
def _parses(text: str) -> bool:
    try:
        OmegaConf.create({"value": text})
    except (OmegaConfBaseException, RecursionError):
        return False
    return True


def _resolve_value(tree: DictConfig, path: KeyPath, text: str, errors: dict[KeyPath, str]) -> Any:
    try:
        node: Any = tree
        for name in path:
            node = node[int(name)] if isinstance(node, ListConfig) else node[_find_child(node, name)]
        return OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig | ListConfig) else node
    except (OmegaConfBaseException, RecursionError) as error:
        errors[path] = f"{text!r} cannot be resolved: {_explain(error)}"
        return None


def _find_child(node: DictConfig, name: str) -> Any:
    keys = node.keys()  # "in node" would resolve the value
    return name if name in keys else next((key for key in keys if str(key) == name), name)


def _explain(error: Exception) -> str:
    if isinstance(error, RecursionError) or "ecursive" in str(error) or "recursion" in str(error):
        return "it refers to itself"
    first = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).splitlines()[0])
    if variable := re.search(r"[Ee]nvironment variable '?(?P<name>\w+)'? (?:is not set|not found)", first):
        return f"{UNSET_VARIABLE} {variable['name']} is not set"
    if unknown := re.match(r"Unsupported interpolation type (?P<name>\S+)", first):
        return f"there is no resolver {unknown['name']}; there are: {', '.join(sorted([*RESOLVERS, 'oc.env']))}"
    missing = re.search(r"(?:Interpolation key|Error resolving key) '(?P<key>[^']*)'", first)
    return f"there is no key {missing['key']}" if missing else first


def referenced_keys(text: str) -> Iterator[str]:
    """Yield the absolute keys that a text refers to."""
    return (match[1] for match in re.finditer(r"\$\{([A-Za-z_][\w.]*)\}", text))


def escape_interpolations(text: str) -> str:
    """Escape ``${`` as ``\\${``, so that the text reads back unchanged."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def resolve_source(source: ConfigSource, model: type[BaseConfig]) -> tuple[Mapping[str, Any], Mapping[KeyPath, str]]:
    """Return a source's settings on top of the schema's defaults, resolved, and an error for each value that cannot be resolved.

    Both are shared: copy before changing them.
    """
    return _resolve(source, cast("Any", model))


@functools.lru_cache(maxsize=8)  # a translation and its validation resolve the same source
def _resolve(source: ConfigSource, model: type[BaseConfig]) -> tuple[Mapping[str, Any], Mapping[KeyPath, str]]:
    return resolve_interpolations(add_defaults(source.values, model))


def add_defaults(values: Mapping[str, Any], model: type[BaseConfig], default: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return values with the schema's defaults for missing keys, so that ``${...}`` can refer to any key. ``default``: those of the
    section where they are not its model's own.
    """
    default = keys.default_values(model) if default is None else default
    tree = dict(default)
    for name, value in values.items():
        tree[name] = value
        field = fields_of(model).get(name)
        if field is None:
            continue
        if (inner := section_model(field)) is not None:
            if value is None or isinstance(value, Mapping):
                tree[name] = add_defaults(value or {}, inner, default[name])
        elif value is None and followed_keys(field):
            tree[name] = default[name]  # null requests the value of the key that this one follows
        elif isinstance(value, Mapping) and not keys.is_entry_list(field) and (entry := keys.entry_model(field)):
            tree[name] = {
                alias: add_defaults(options or {}, entry, keys.default_values_of_entry(entry))
                if options is None or isinstance(options, Mapping)
                else options
                for alias, options in value.items()
            }
    return tree


def find_named_files(source: ConfigSource, root: type[BaseConfig]) -> ConfigSource:
    """Return the source with the full path of each file that is missing from the working directory but exists next to the file
    that names it or in a folder above. Files that do not exist anywhere are left to the checks, which are skipped for a saved
    run.
    """
    for path in [path for path in source.origins if _may_name_file(root, path)]:
        value, named_by = get_at(source.values, path), source.origins[path]
        value = get_at(resolve_source(source, root)[0], path) if isinstance(value, str) and "${" in value else value
        if not isinstance(named_by.source, Path) or not _is_missing_file(value, template=path[-1] == "chat_template"):
            continue
        folder = named_by.source.resolve().parent
        found = next((above / value for above in (folder, *folder.parents) if (above / value).is_file()), None)
        if found is not None:
            _, source = set_key(source, path, str(found), named_by)
    return source


def _may_name_file(root: type[BaseConfig], path: KeyPath) -> bool:
    field = find_field(root, path)
    return field is not None and field.json_schema_extra == NAMES_FILE


def _is_missing_file(value: object, *, template: bool) -> bool:
    """Return whether a value may be a file name that does not exist in the working directory."""
    if not isinstance(value, str) or value == AUTO_PROMPT or "\n" in value or (template and not value.endswith(".jinja")):
        return False
    try:
        return not Path(value).is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


NAME: KeyPath = ("run_name",)
FOLDERS: dict[KeyPath, str] = {("logger", "log_dir"): "logs", ("checkpointing", "checkpoint_dir"): "results"}
OVERRIDES = "{overrides}"
# Keys that do not make it another run: its name and folders, and how it is started and monitored.
UNNAMED = ("run_name", "logger.log_dir", "checkpointing.checkpoint_dir", "checkpointing.resume", "logger.console")
LONGEST = 100  # maximum characters of the overrides in a name
SHORTEST_KEY = 4  # minimum characters of a key in a name that is too long


def name_run(source: ConfigSource, overrides: Sequence[str]) -> tuple[ConfigSource, list[Problem]]:
    """Put the overrides into the name, and name the folders after it, unless the same or a later file, or the command line, sets
    them.

    A folder that an earlier file sets with ``${run_name}`` in it stays.
    """
    name = get_at(source.values, NAME)
    if name == {"overrides": None}:  # run_name={overrides}, as parsed by YAML
        name = OVERRIDES
    if not isinstance(name, str):
        return source, []
    if OVERRIDES in name:
        given = format_overrides(overrides)
        if not given and name == OVERRIDES:
            fix = "Add text to it, such as run_name='sweep_{overrides}', or override a key."
            problem = Problem("run_name", "nothing is left of {overrides}: no key is overridden", fix, source.find_origin(NAME))
            return _set(source, NAME, None), [problem]
        name = name.replace(OVERRIDES, given).strip("_-. ")
        source = _set(source, NAME, name)
    for path, parent in FOLDERS.items():
        if not _holds(source, path):
            source = _set(source, path, f"{parent}/${{run_name}}")
    return source, []


def _holds(source: ConfigSource, path: KeyPath) -> bool:
    """Return whether a folder is set in the same source as the name or a later one, or contains the name."""
    folder = get_at(source.values, path)
    if folder is None or path not in source.origins:
        return False
    return source.layer_of(path) >= source.layer_of(NAME) or "${run_name}" in str(folder)


def _set(source: ConfigSource, path: KeyPath, value: object) -> ConfigSource:
    tree: object = value
    for name in reversed(path):
        tree = {name: tree}
    assert isinstance(tree, dict)
    origin = source.find_origin(path) or source.find_origin(NAME) or Origin("")
    return ConfigSource(merge_sections(source.values, tree), {path: origin, **source.origins}, source.files)


def format_overrides(overrides: Sequence[str]) -> str:
    """Return overrides as part of a file name: in alphabetical order, without keys that do not make it another run, bounded in
    length.

    If they are too long, keys are shortened before any value, because the runs of a sweep differ in values.
    """
    last = {override.lstrip("+~").partition("=")[0].strip(): override.strip().lstrip("+") for override in overrides}
    texts = [text for key, text in sorted(last.items()) if key not in UNNAMED]
    whole = "-".join(texts)
    short = re.sub(r"[^\w.=+-]", "_", whole)
    if len(short) > LONGEST:
        short = re.sub(r"[^\w.=+-]", "_", _shorten_keys(texts))[:LONGEST]
    return short if short == whole else f"{short}-{zlib.crc32(whole.encode()):08x}"  # other overrides may shorten to the same


def _shorten_keys(overrides: Sequence[str]) -> str:
    """Return overrides with only the last name of each key, or as much of it as leaves room for all values."""
    parts = [override.partition("=") for override in overrides]
    names = [("~" * key.startswith("~") + key.rpartition(".")[2], sign + value) for key, sign, value in parts]
    for length in range(max(len(name) for name, _ in names), SHORTEST_KEY - 1, -1):
        shown = "-".join(name[:length] + value for name, value in names)
        if len(shown) <= LONGEST:
            break
    return shown
