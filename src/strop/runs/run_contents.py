"""Fingerprints of the contents behind a run's names: its weights, tokenizers, templates, data, prompts and code.

They are saved with each checkpoint and in the log folder (``contents.json``), and compared when a run is continued. A key's
content has the same role as the key (``config.source.keys``): different data, weights, tokenizers or prompts under the same name
make it another run. Code may be fixed in mid-run, which is reported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from strop.base_config import iter_sections
from strop.config import TrainingRunConfig
from strop.config.schema.run_config import RolloutRunConfig, iter_model_names
from strop.config.source.keys import ROLES, Role, role_of
from strop.data.data_config import DataEntryConfig, entry_keys
from strop.data.sources.dataset_class import is_dataset_class
from strop.data.sources.local_copies import find_copy
from strop.data.sources.records import DataError
from strop.data.sources.shards import is_pattern, list_files
from strop.models.model_sizes import find_cached_commit, find_folder
from strop.models.tokenizer_config import TokenizerConfig
from strop.storage.checksums import digest_ends, digest_files
from strop.user_code import list_own_files

CONTENTS_FILE = "contents.json"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "config.json", "adapter_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)
CODE = re.compile(r"(?P<file>[^\n:]+\.py|[A-Za-z_][\w.]*):[A-Za-z_][\w.]*")
WITHOUT_CODE = ("checkpointing.", "logger.", "watchdog.", "cluster.", "run_name")
Kind = Literal["data", "weights", "tokenizer", "chat template", "file", "code"]


@dataclass(frozen=True)
class Content:
    """The content behind a name."""

    kind: Kind
    name: str
    digest: str  # empty if unknown, for example for an uncached hub dataset
    size: str = ""

    def __str__(self) -> str:
        known = ", ".join(part for part in (self.size, self.digest) if part) or "only by its name"
        return f"{self.kind} {self.name}: {known}"


@dataclass(frozen=True)
class ContentChange:
    """A key with the same value but different content."""

    key: str
    old: Content
    new: Content
    role: Role

    def __str__(self) -> str:
        what = {"data": "other rows", "file": "another text", "weights": "other weights", "tokenizer": "other tokens or settings"}
        sizes = f" ({self.old.size}, now {self.new.size})" if self.old.size != self.new.size else ""
        return f"{self.key}: {self.new.name} has {what.get(self.new.kind, f'another {self.new.kind}')}{sizes}"


def find_contents(config: TrainingRunConfig) -> dict[str, Content]:
    """Return the contents behind a run's names, by key. Unreadable content has no digest; the run itself reports why."""
    found = [*_data(config), *_models(config), *_tokenizers(config)]
    known = dict(found)
    return known | {key: content for key, content in _files_and_code(config) if key not in known}


def compare_contents(
    old: Mapping[str, Content], new: Mapping[str, Content], model: type[TrainingRunConfig]
) -> list[ContentChange]:
    """Return the contents that differ. Differing names are compared as settings."""
    changes = []
    for key, content in new.items():
        before = old.get(key)
        if before is None or before.name != content.name or not before.digest or not content.digest:
            continue
        if before.digest != content.digest:
            role: Role = "applied" if content.kind == "code" else role_of(model, key.split("."))
            changes.append(ContentChange(key, before, content, role))
    return [change for change in changes if change.role not in ROLES[1:]]


def write_contents(contents: Mapping[str, Content]) -> str:
    """Return the text of ``contents.json``."""
    return json.dumps({key: asdict(content) for key, content in contents.items()}, indent=1, ensure_ascii=False) + "\n"


def read_contents(path: Path) -> dict[str, Content]:
    """Return the fingerprints of a run; empty for a run of an earlier version, or an unreadable file."""
    try:
        return {str(key): Content(**values) for key, values in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


# --- data -----------------------------------------------------------------------------------------------------------------


def _data(config: TrainingRunConfig) -> Iterator[tuple[str, Content]]:
    for part, entries in (("train", config.data.train), ("validation", config.data.validation or ())):
        for key, entry in zip(entry_keys(f"data.{part}", len(entries)), entries, strict=True):
            if entry.rows is not None:
                if hasattr(entry.rows, "__len__"):  # a stream cannot be read before the run
                    size = f"{len(entry.rows):,} rows"
                    yield f"{key}.rows", Content("data", "the rows in memory", _digest_rows(entry.rows), size)
            elif entry.dataset_name is not None and not is_dataset_class(entry.dataset_name):
                yield f"{key}.dataset_name", _describe_dataset(entry, entry.dataset_name)


def _describe_dataset(entry: DataEntryConfig, name: str) -> Content:
    try:
        files, streamed = _list_data_files(entry, name)
        if files:
            digest = digest_ends(files) if streamed else digest_files(files)
            return Content("data", name, digest, _size_of(files))
    except (OSError, DataError):  # reported where the data is read
        return Content("data", name, "")
    commit = find_cached_commit("datasets", name, entry.revision)
    return Content("data", name, commit, "commit of the hub" if commit else "")


def _list_data_files(entry: DataEntryConfig, name: str) -> tuple[list[Path], bool]:
    """Return the local files of an entry, and whether they may be too large to read before the run."""
    path = Path(name).expanduser()
    if entry.is_file and path.is_file():
        return [path], entry.streaming
    if path.is_dir() or is_pattern(name):
        files = list_files(name) if is_pattern(name) else [each for each in path.rglob("*") if each.is_file()]
        return [Path(each) for each in files], True
    copy = find_copy(name, entry.revision)
    if copy is None:
        return [], False
    inside = [copy] if copy.is_file() else [each for each in copy.rglob("*") if each.is_file() and not each.name.startswith(".")]
    return inside, True


def _digest_rows(rows: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps(row, default=_describe_object, sort_keys=True, ensure_ascii=False).encode(errors="replace"))
    return digest.hexdigest()


def _describe_object(value: Any) -> Any:
    """Return a representation of an object in a row that does not contain its address."""
    for name in ("tolist", "isoformat", "tobytes"):
        if callable(method := getattr(value, name, None)):
            found = method()
            return hashlib.blake2b(found, digest_size=8).hexdigest() if isinstance(found, bytes) else found
    return hashlib.blake2b(value, digest_size=8).hexdigest() if isinstance(value, bytes) else type(value).__name__


# --- models ---------------------------------------------------------------------------------------------------------------


def _models(config: TrainingRunConfig) -> Iterator[tuple[str, Content]]:
    for key, name in iter_model_names(config):
        yield key, _describe_weights(name)


def _describe_weights(name: str) -> Content:
    folder = find_folder(name)
    if folder is None:
        return Content("weights", name, "")
    if not Path(name).expanduser().is_dir():  # a snapshot in the hub's cache
        return Content("weights", name, folder.name, "commit of the hub")
    files = _glob(folder, WEIGHT_FILES)
    try:
        digest, size = digest_files(files, root=folder), _size_of(files)
    except OSError:
        return Content("weights", name, "")
    with suppress(OSError, ValueError, AttributeError):
        base = json.loads((folder / "adapter_config.json").read_bytes()).get("base_model_name_or_path")
        digest = f"{digest} on {_describe_weights(base).digest}" if base and base != name else digest
    return Content("weights", name, digest, size)


def _tokenizers(config: TrainingRunConfig) -> Iterator[tuple[str, Content]]:
    for key, section in iter_sections(config):
        folder = find_folder(section.name) if isinstance(section, TokenizerConfig) else None
        if folder is None or not isinstance(section, TokenizerConfig):
            continue
        settings, template = _read_tokenizer_settings(folder)
        try:
            files = digest_files(_glob(folder, TOKENIZER_FILES), root=folder)
        except OSError:
            continue
        yield f"{key}.name", Content("tokenizer", section.name, _hash_text(files + settings))
        if section.chat_template in (None, "default"):
            yield f"{key}.chat_template", Content("chat template", section.name, _hash_text(template))


def _read_tokenizer_settings(folder: Path) -> tuple[str, str]:
    """Return a tokenizer's settings without its chat template, and the template."""
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    template = settings.pop("chat_template", None)
    with suppress(OSError, ValueError):
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return json.dumps(settings, sort_keys=True), json.dumps(template, sort_keys=True)


def _glob(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


# --- files and code -------------------------------------------------------------------------------------------------------


def _files_and_code(config: TrainingRunConfig) -> Iterator[tuple[str, Content]]:
    """Yield the other files and the code named by values of the configuration."""
    for key, value in _walk_values(config):
        if key.startswith(WITHOUT_CODE):
            continue
        if callable(value):
            yield key, _describe_callable(value)
        elif isinstance(value, str) and value and len(value) < 4096 and "\n" not in value:
            yield from _describe_text(key, value)


def _walk_values(config: TrainingRunConfig) -> Iterator[tuple[str, Any]]:
    for key, section in iter_sections(config):
        for name, value in vars(section).items():
            if name in ("rows", "options"):  # data in memory; options of environments are handled below
                continue
            yield from _flatten(value, f"{key}.{name}" if key else name)
    if isinstance(config, RolloutRunConfig):
        for alias, environment in config.env.items():
            yield f"env.{alias}.type", environment.type
            for name, value in environment.options.items():
                yield from _flatten(value, f"env.{alias}.{name}")


def _flatten(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{key}.{index}")
    elif isinstance(value, str) or inspect.isroutine(value) or isinstance(value, functools.partial):
        yield key, value


def _describe_text(key: str, value: str) -> Iterator[tuple[str, Content]]:
    if match := CODE.fullmatch(value):
        if (file := _find_module(match["file"])) is not None:
            yield key, Content("code", value, digest_files(_with_neighbours(file)))
        return
    files = [path for word in _split_command(key, value) if (path := Path(word).expanduser()).suffix and _is_file(path)]
    for path in files:
        kind: Kind = "code" if path.suffix in (".py", ".sh", ".js") else "file"
        with suppress(OSError):
            contents = _with_neighbours(path) if path.suffix == ".py" else [path]
            yield key, Content(kind, value, digest_files(contents), "" if kind == "code" else _size_of([path]))


def _split_command(key: str, value: str) -> list[str]:
    if not key.endswith(".command"):
        return [value]
    try:
        return shlex.split(value)
    except ValueError:
        return []


def _find_module(name: str) -> Path | None:
    """Return the file of the module at the beginning of a code name; None if it does not exist, or is part of Strop."""
    if name.endswith(".py"):
        path = Path(name).expanduser()
        return path if _is_file(path) else None
    local = Path(*name.split("."))
    for path in (local.with_suffix(".py"), local / "__init__.py"):
        if _is_file(path):
            return path
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    found = None if spec is None or spec.origin is None else Path(spec.origin)
    return found if found is not None and found.suffix == ".py" and not name.startswith("strop.") else None


def _describe_callable(function: Any) -> Content:
    inner = inspect.unwrap(getattr(function, "func", function))
    name = f"{getattr(inner, '__module__', '')}:{getattr(inner, '__qualname__', type(inner).__name__)}"
    try:
        file = Path(inspect.getsourcefile(inner) or "")
        if _is_file(file):
            return Content("code", name, digest_files(_with_neighbours(file)))
        return Content("code", name, _hash_text(inspect.getsource(inner)))  # of a notebook's cell
    except (OSError, TypeError):  # from a notebook cell that is gone, or compiled
        return Content("code", name, "")


def _with_neighbours(file: Path) -> list[Path]:
    return list_own_files(file.resolve(), file.resolve().parent)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


def _size_of(files: Iterable[Path]) -> str:
    return f"{sum(path.stat().st_size for path in files):,} bytes"


def _hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
