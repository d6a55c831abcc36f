"""Find the scales of inputs that have one for a whole tensor: the greatest magnitude over texts, once, before training.

A scale of each micro-batch would make the gradient depend on how a batch is cut. The texts are read without rounding, as ModelOpt's
``max`` calibration does.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from strop.extensions.labs.fake_quant.apply_fake_quant import iter_static_inputs, without_rounding
from strop.models.network import Network

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
