"""Resolves files named by a configuration: relative to the working directory, otherwise to the folder of the naming file or one
above.
"""

from __future__ import annotations

from pathlib import Path

from strop.base_config import NAMES_FILE, BaseConfig, KeyPath
from strop.config.source.defaults import resolve_source
from strop.config.source.keys import find_field
from strop.config.source.yaml_source import ConfigSource, get_at, set_key
from strop.data.prompt_template import AUTO_PROMPT


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
