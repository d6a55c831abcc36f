"""``run_name``: the name of a run, its folders, and the placeholder ``{overrides}``, which turns a sweep into one loop."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from strop.base_config import KeyPath
from strop.config.source.yaml_source import ConfigSource, get_at, merge_sections
from strop.problems import Origin, Problem

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
