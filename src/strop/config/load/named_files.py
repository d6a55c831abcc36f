"""Files that a configuration names: relative to the working directory, or else to the folder of the file that names them or one above."""

from __future__ import annotations

from pathlib import Path

from strop.base_config import NAMES_FILE, BaseConfig, KeyPath
from strop.config.source.defaults import resolve_source
from strop.config.source.keys import find_field
from strop.config.source.yaml_source import ConfigSource, get_at, set_key
from strop.data.prompt_template import AUTO_PROMPT


def find_named_files(source: ConfigSource, root: type[BaseConfig]) -> ConfigSource:
    """Return the source with the whole path of each file that is not in the working directory, but beside the file that names it or in a
    folder above. One that is nowhere is left to the checks, which a saved run is read without."""
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
    """Return whether a value may be the name of a file, and the working directory has none of that name."""
    if not isinstance(value, str) or value == AUTO_PROMPT or "\n" in value or (template and not value.endswith(".jinja")):
        return False
    try:
        return not Path(value).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
