"""Datasets of the Hugging Face hub.

The hub is queried once, with a timeout, before a dataset is loaded, because ``datasets`` retries an unreachable hub for minutes.
If the hub is unreachable, a cached copy is used, with a warning. Datasets with a local copy (``local_copies``) are read from it.
"""

from __future__ import annotations

import gzip
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.data.builtin_dataset import BuiltinDataset
from strop.data.sources.files import is_url, parse_object
from strop.data.sources.in_memory import DatasetRecords, ListRecords, holds_media
from strop.data.sources.local_copies import COPIES_VARIABLE, HUB_ADDRESS, find_copy
from strop.data.sources.records import DataError, Records
from strop.data.sources.shards import list_shards
from strop.data.sources.streamed import RecordStream, StreamedRecords

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # time limit for the hub's first answer
PACKED_LINES = ".jsonl.gz"
URL_LOADERS = {".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # by URL suffix; others are JSON


def choose_files(builtin: BuiltinDataset, subset: str | None) -> tuple[str, ...]:
    """Return the files of a subset, for sets that list their files; nothing for others. Raises DataError."""
    if not builtin.files:
        return ()
    if subset is None or subset not in builtin.files:
        raise DataError(f"the dataset {builtin.hub!r} has no subset {subset!r}; set subset to one of {', '.join(builtin.files)}")
    return builtin.files[subset]


def open_hub(
    name: str, subset: str | None, split: str, revision: str | None = None, files: Sequence[str] = (), *, streaming: bool = False
) -> Records:
    """Open a split of a dataset on the hub, or a file at an address.

    ``files``: the dataset's files that hold the split. With ``streaming``, it is downloaded while it is read.

    Raises DataError if it does not exist, needs a login, or is unreachable and not cached.
    """
    if name.startswith(HUB_ADDRESS) and name.endswith(PACKED_LINES):
        return _open_packed_lines(name, revision)
    if is_url(name) or find_copy(name, revision) is not None:
        return _open_split(name, subset, split, revision, files, streaming)
    unreachable = _check_hub(name, revision)
    if unreachable is None:
        return _open_split(name, subset, split, revision, files, streaming)
    try:
        with _force_offline():
            records = _open_split(name, subset, split, revision, files, False)  # the cache is all or nothing
    except DataError:
        raise DataError(
            f"the hub is unreachable ({unreachable}), and the dataset {name!r} is not in the local cache. "
            "Download it on a machine with network access, and set dataset_name to the local .jsonl, .json, .csv or .parquet file, "
            f"or {COPIES_VARIABLE} to the folder that has it as {name}"
        ) from unreachable
    which = "" if revision is None else f", which may be of another revision than {revision}"
    warnings.warn(f"the hub is unreachable ({unreachable}); using the cached copy of {name!r}{which}", stacklevel=2)
    return records


def _open_packed_lines(name: str, revision: str | None) -> Records:
    """Open compressed JSON lines of a hub dataset. They are parsed here, because ``datasets`` gives every record the columns of
    all.
    """
    from huggingface_hub import hf_hub_download

    owner, dataset, file = name.removeprefix(HUB_ADDRESS).split("/", 2)
    try:
        path = find_copy(name) or hf_hub_download(f"{owner}/{dataset}", file, repo_type="dataset", revision=revision)
        with gzip.open(path) as lines:
            records = [parse_object(line, f"{name}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    except DataError:
        raise
    except Exception as error:  # raised by the HTTP client, the cache or a damaged file
        raise DataError(
            f"{name} cannot be read ({type(error).__name__}: {error!s:.300}). Download it on a machine with network access, and set "
            f"{COPIES_VARIABLE} to the folder that has it as {owner}/{dataset}/{file}"
        ) from error
    if not records:
        raise DataError(f"{name} has no rows")
    return ListRecords(name, records, "line")


def _check_hub(name: str, revision: str | None) -> Exception | None:
    """Return None if the hub has the dataset, or the error if it is unreachable. Raises DataError if the hub denies it."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=TIMEOUT_S)
    except GatedRepoError as error:
        raise DataError(f"the dataset {name!r} is gated: accept its terms on the hub and log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise DataError(
            f"the dataset {name!r} has no revision {revision!r}; set revision to a commit, a tag or a branch of it, or to null"
        ) from error
    except RepositoryNotFoundError as error:
        raise DataError(f"the hub has no dataset {name!r}, or you have no access to it: check dataset_name") from error
    except Exception as error:  # the HTTP client's error classes differ between versions; all mean that there was no answer
        return error
    return None


def _open_split(
    name: str, subset: str | None, split: str, revision: str | None, files: Sequence[str], streaming: bool
) -> Records:
    if streaming:
        if files:
            raise DataError(f"{name!r} is read from some of its files, which cannot be streamed; set streaming=false")
        stream = _load_split(name, subset, split, revision, streaming=True)
        if holds_media(getattr(stream, "features", None)):
            stream = stream.decode(False)  # images as they are stored
        return StreamedRecords(RecordStream(name, list_shards(name, stream)))
    dataset = _load_files(name, files, split, revision) if files else _load_split(name, subset, split, revision)
    if len(dataset) == 0:
        raise DataError(f"the split {split!r} of the dataset {name!r} has no rows")
    return DatasetRecords(name, dataset)


def _load_split(name: str, subset: str | None, split: str, revision: str | None, *, streaming: bool = False) -> Any:
    import datasets

    _hide_progress_bars()
    copy = find_copy(name, revision)
    path, revision = (name, revision) if copy is None else (str(copy), None)
    subsets = [None] if subset is None else subset.split(",")
    options: dict[str, Any] = {"streaming": True} if streaming else {}
    try:
        if is_url(name):
            loader = URL_LOADERS.get(Path(name).suffix, "json")
            if loader == "csv":
                options["keep_default_na"] = False  # "None" and "NA" are texts, such as MMLU options
            return datasets.load_dataset(loader, data_files=path, split=split, **options)
        parts = [datasets.load_dataset(path, each, split=split, revision=revision, **options) for each in subsets]
        return datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    except Exception as error:  # datasets raises many classes; their messages list the splits or subsets
        why = error if copy is None else f"in its local copy {copy}, {error}"
        raise DataError(f"the dataset {name!r} (subset {subset!r}, split {split!r}) cannot be loaded: {why}") from error


def _load_files(name: str, files: Sequence[str], split: str, revision: str | None) -> Any:
    """Load files of a data set of the hub as one split."""
    import datasets

    _hide_progress_bars()
    folder = find_copy(name, revision) or f"{HUB_ADDRESS}{name}{f'@{revision}' if revision else ''}"
    addresses = [f"{folder}/{file}" for file in files]
    try:
        return datasets.load_dataset(URL_LOADERS.get(Path(files[0]).suffix, "json"), data_files={split: addresses}, split=split)
    except Exception as error:  # datasets raises many classes
        raise DataError(f"the files {', '.join(addresses)} of the dataset {name!r} cannot be loaded: {error}") from error


def _hide_progress_bars() -> None:
    """Hide the progress bars of ``datasets`` where they would fill a log file; its own environment variable takes precedence."""
    import datasets  # type: ignore[import-untyped,unused-ignore]

    if not sys.stderr.isatty() and "HF_DATASETS_DISABLE_PROGRESS_BARS" not in os.environ:
        datasets.disable_progress_bars()


@contextmanager
def _force_offline() -> Iterator[None]:
    """Make ``datasets`` use only its cache. Sets module attributes, because the libraries read the environment at import."""
    import datasets
    import huggingface_hub

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    previous = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, previous, strict=True):
            module.HF_HUB_OFFLINE = value


# Upload a folder to the Hugging Face hub.


class HubUploadError(ValueError):
    """A folder cannot be uploaded; the message says why and what to do."""


def require_token() -> None:
    """Raise HubUploadError if there is no token that allows uploads."""
    from huggingface_hub import get_token

    if not get_token():
        raise HubUploadError("--push needs a token of the hub, and there is none: run `hf auth login`, or set HF_TOKEN")


def upload_folder(folder: Path, name: str, *, private: bool = False) -> str:
    """Create the repository ``name`` if it is missing, upload the folder, and return its address. Raises HubUploadError."""
    from huggingface_hub import HfApi

    require_token()
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=name, commit_message=f"Upload {folder.name}")
    except Exception as error:  # all network, naming and permission errors end in the same message
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0][:300]}"
        raise HubUploadError(
            f"{folder} was written and not uploaded to {name}: the hub returned {reason}. Upload it later: hf upload {name} {folder}"
        ) from error
    return str(address)
