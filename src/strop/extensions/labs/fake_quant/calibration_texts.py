"""The token ids that calibration reads: of texts, or made up (``policy.quant_calib_data``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from strop.data.sources.files import open_file
from strop.data.sources.hub import open_hub
from strop.data.sources.records import DataError
from strop.storage.files import read_text_file

RANDOM = "random"
# Names of ModelOpt's data sets: (name on the hub, subset, column).
KNOWN: Mapping[str, tuple[str, str | None, str]] = {
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "article"),
    "minipile": ("JeanKaddour/minipile", None, "text"),
    "c4": ("allenai/c4", "en", "text"),
    "wikipedia": ("wikimedia/wikipedia", "20231101.en", "text"),
    "pg19": ("deepmind/pg19", None, "text"),
}
_COLUMNS = ("text", "article", "content", "prompt", "question", "problem", "input")
_LARGEST_RANDOM_ID = 100  # as NeMo-RL's random calibration has it


def read_calibration_tokens(source: str, *, size: int, length: int, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """Return the first ``length`` token ids of each of ``size`` texts, of at least two tokens; of fewer texts if the source has fewer.

    ``source``: random, a file (.txt, a text on each line; .jsonl, .json, .csv, .parquet), or a data set of the hub. Raises ValueError for
    one that cannot be read.
    """
    if source == RANDOM:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, min(_LARGEST_RANDOM_ID, vocabulary), (size, length), generator=generator)
        made: list[list[int]] = ids.tolist()
        return made
    try:
        texts = list(itertools.islice(_iter_texts(source), size))
    except DataError as error:
        raise ValueError(f"policy.quant_calib_data: {error}") from error
    tokens = [tokenizer(text)["input_ids"][:length] for text in texts]
    if not (long_enough := [ids for ids in tokens if len(ids) > 1]):
        raise ValueError(f"policy.quant_calib_data: {source} has no text of at least two tokens; name another, or random")
    return long_enough


def _iter_texts(source: str) -> Iterator[str]:
    path = Path(source).expanduser()
    if path.suffix == ".txt" and path.is_file():
        yield from (line.strip() for line in read_text_file(path).splitlines() if line.strip())
        return
    name, subset, column = KNOWN.get(source, (source, None, None))
    records: Sequence[Mapping[str, Any]] = open_file(path) if path.is_file() else open_hub(name, subset, "train")
    for record in records:
        yield _text_of(record, column, source)


def _text_of(record: Mapping[str, Any], column: str | None, source: str) -> str:
    for name in _COLUMNS if column is None else (column,):
        if isinstance(text := record.get(name), str):
            return text
    raise ValueError(
        f"policy.quant_calib_data: {source} has the columns {', '.join(map(str, record))}, and none of {', '.join(_COLUMNS)} with a text; "
        "name a file with a column text"
    )
