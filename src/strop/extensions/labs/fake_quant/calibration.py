"""Find the scales of inputs that have one for a whole tensor: the greatest magnitude over texts, once, before training.

A scale of each micro-batch would make the gradient depend on how a batch is cut. The texts are read without rounding, as ModelOpt's
``max`` calibration does.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from strop.data.sources.files import open_file
from strop.data.sources.hub import open_hub
from strop.data.sources.records import DataError
from strop.extensions.labs.fake_quant.apply_fake_quant import iter_static_inputs, without_rounding
from strop.models.network import Network
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


log = logging.getLogger(__name__)

SCALES_FILE = "input_scales.json"  # {layer: greatest magnitude of its inputs}; a float's shortest form is exact


def needs_calibration(model: nn.Module) -> bool:
    return any(quantizer.amax is None for _, quantizer in iter_static_inputs(model))


@torch.no_grad()
def calibrate_inputs(network: Network, texts: Sequence[Sequence[int]], batch_size: int) -> dict[str, float]:
    """Return the greatest magnitude of the inputs of each layer that needs one, by its name, over the token ids of ``texts``.

    Texts of equal length are read together, up to ``batch_size``. Raises ValueError if a layer reads nothing or something infinite.
    """
    with without_rounding(network.model), _native_attention(network):
        for batch in _group_by_length(texts, batch_size):
            with network.autocast():
                network.decoder(input_ids=torch.tensor(batch, device=network.device), use_cache=False)
        found = {name: quantizer.amax or 0.0 for name, quantizer in iter_static_inputs(network.model)}
    for name, amax in found.items():
        if not (0 < amax < math.inf):
            raise ValueError(
                f"policy.quant_calib_data: the greatest magnitude of the inputs of {name} is {amax} over {len(texts)} texts, which gives "
                "no scale; name other texts, or disable the layer in the file of quant_cfg"
            )
    return found


def set_input_scales(model: nn.Module, found: Mapping[str, float]) -> None:
    """Set the greatest magnitudes that ``calibrate_inputs`` found; inputs are rounded from now on."""
    for name, quantizer in iter_static_inputs(model):
        quantizer.amax = found[name]
    if found:
        log.info(
            "policy.quant_cfg: %d layers have calibrated inputs, of magnitudes %.3g to %.3g",
            len(found),
            min(found.values()),
            max(found.values()),
        )


def save_input_scales(model: nn.Module, folder: Path) -> None:
    """Write the calibrated scales next to a model's configuration, for engines in other processes; nothing without any."""
    if found := {name: quantizer.amax for name, quantizer in iter_static_inputs(model)}:
        (folder / SCALES_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def load_input_scales(model: nn.Module, folder: Path) -> None:
    """Set the scales that ``save_input_scales`` wrote."""
    if needs_calibration(model):
        set_input_scales(model, json.loads((folder / SCALES_FILE).read_text(encoding="utf-8")))


@contextmanager
def _native_attention(network: Network) -> Iterator[None]:
    network.use_native_attention()
    try:
        yield
    finally:
        network.use_learner_attention()


def _group_by_length(texts: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[Sequence[int]]]:
    groups: dict[int, list[Sequence[int]]] = defaultdict(list)
    for text in texts:
        groups[len(text)].append(text)
    for group in groups.values():
        yield from (group[start : start + batch_size] for start in range(0, len(group), batch_size))
