"""Datasets of the Hugging Face hub: the only module that imports ``datasets``.

The hub is asked once, with a time limit, before anything is loaded: ``datasets`` itself retries an unreachable hub for
minutes. When it cannot be reached, a copy that is already in the local cache is used, with a warning.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from strop.data.errors import DataError
from strop.data.records import Record, Records, text_of

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0  # how long the hub may take to answer that it is there


def open_hub(name: str, subset: str | None, split: str) -> Records:
    """The split of a dataset on the hub. Raises DataError when it is not there, needs a login, or cannot be reached."""
    unreachable = _probe(name)
    if unreachable is None:
        return HubRecords(name, _load(name, subset, split), split)
    try:
        with _offline():
            records = HubRecords(name, _load(name, subset, split), split)
    except DataError:
        raise DataError(
            f"the hub could not be reached for the dataset {name!r} ({unreachable}), and it is not in the local cache. "
            "Download it where there is a network, and set dataset_name to the local .jsonl, .json, .csv or .parquet file"
        ) from unreachable
    warnings.warn(f"the hub could not be reached ({unreachable}); using the cached copy of {name!r}", stacklevel=2)
    return records


def _probe(name: str) -> Exception | None:
    """None when the hub has the dataset; the error when it cannot be reached; DataError when it says no."""
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=TIMEOUT_S)
    except GatedRepoError as error:
        raise DataError(f"the dataset {name!r} is gated: accept its terms on the hub and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise DataError(f"the hub has no dataset {name!r}, or none that you may see: check dataset_name") from error
    except Exception as error:  # the HTTP client's own classes differ between versions; all mean: no answer
        return error
    return None


def _load(name: str, subset: str | None, split: str) -> Any:
    import datasets  # type: ignore[import-untyped,unused-ignore]

    try:
        return datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # datasets raises many classes; each message names the splits or subsets there are
        raise DataError(f"the dataset {name!r} (subset {subset!r}, split {split!r}) cannot be loaded: {error}") from error


@contextmanager
def _offline() -> Iterator[None]:
    """Make ``datasets`` look at its cache only. The libraries read their setting at import, hence the attributes."""
    import datasets
    import huggingface_hub

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    for module in modules:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


class HubRecords(Records):
    def __init__(self, name: str, dataset: Any, split: str) -> None:
        if len(dataset) == 0:
            raise DataError(f"the split {split!r} of the dataset {name!r} has no rows")
        self.name, self._dataset = name, dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def record(self, index: int) -> Record:
        record: Record = self._dataset[index]
        return record

    def where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def column(self, key: str, option: str) -> Iterator[str]:
        top = key.split(".")[0]
        if top not in self._dataset.column_names:
            yield from super().column(key, option)  # raises, naming the keys
        narrow = self._dataset.select_columns([top])  # decode one column, not all of them, of a million rows
        for index, record in enumerate(narrow):
            yield text_of(record, key, option, self.where(index))
