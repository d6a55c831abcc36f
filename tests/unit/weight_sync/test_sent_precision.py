"""Weights that are rounded on their way to engines: what is sent is fingerprinted, and what is held is compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.generation.quantized_rollouts import PlannedPrecision
from strop.models.quantization.number_format import FP8_BLOCK, MXFP8, NVFP4, round_trip
from strop.models.quantization.quantization_plan import make_plan, unpack
from strop.weight_sync.base import Manifest
from strop.weight_sync.exporter import BlockingExporter
from strop.weight_sync.fingerprints import fingerprint, normalize_zeros
from strop.weight_sync.weight_source import local_weights

NAME, HEAD = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"


class KeepingSender:
    """Keeps copies of what it is given."""

    receivers = 1
    address: Any = None

    def __init__(self, receivers: int) -> None:
        self.sent: dict[str, torch.Tensor] = {}

    def send(self, manifest: Manifest, tensors: Any) -> None:
        self.sent = {name: tensor.clone() for name, tensor in tensors}
        entries = [(entry.name, entry.dtype, entry.shape) for entry in manifest.entries]
        assert entries == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.sent.items()]

    def close(self) -> None: ...


def export(
    precision: PlannedPrecision | None, *, keep: bool = False
) -> tuple[dict[str, torch.Tensor], Any, dict[str, torch.Tensor]]:
    """Send two tensors; return them as they are, the fingerprints, and what was sent."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(40, 70, generator=generator) for name in (NAME, HEAD)}
    sender = KeepingSender(1)
    exporter = BlockingExporter(
        lambda: local_weights(weights.items()),
        lambda receivers: sender,  # type: ignore[arg-type, return-value]
        dtype=torch.bfloat16,
        keep_snapshot=keep,
        quantization=precision,
    )
    plan = exporter.prepare("weights")
    assert {entry.name for entry in plan.manifest.entries} == {NAME, HEAD}
    exporter.open(1)
    fingerprints = exporter.send(read_back=True)
    return weights, fingerprints, sender.sent


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("number_format", [FP8_BLOCK, MXFP8, NVFP4], ids=lambda each: each.name)
def test_engines_are_sent_rounded_weights(number_format: Any, keep: bool) -> None:
    precision = PlannedPrecision(make_plan(number_format), torch.bfloat16, by_engine=False)
    weights, fingerprints, sent = export(precision, keep=keep)
    assert torch.equal(sent[NAME], round_trip(weights[NAME].bfloat16(), number_format))
    assert torch.equal(sent[HEAD], weights[HEAD].bfloat16())
    assert fingerprints.sent == {name: fingerprint(tensor) for name, tensor in sent.items()}
    assert fingerprints.read_back == {name: fingerprint(normalize_zeros(tensor)) for name, tensor in sent.items()}


def test_an_engine_that_rounds_itself_is_sent_the_weights_and_compared_with_the_rounded_ones() -> None:
    precision = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=True)
    weights, fingerprints, sent = export(precision)
    assert torch.equal(sent[NAME], weights[NAME].bfloat16())
    assert fingerprints.sent[NAME] == fingerprint(sent[NAME])
    held = round_trip(weights[NAME].bfloat16(), FP8_BLOCK)
    assert fingerprints.read_back[NAME] == fingerprint(normalize_zeros(held)) != fingerprint(normalize_zeros(sent[NAME]))


def test_weights_are_cast_to_the_precision_of_the_engine_before_they_are_rounded() -> None:
    precision = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=False)
    weight = torch.randn(30, 30, generator=torch.Generator().manual_seed(1))
    rounded = precision.round(weight)
    assert rounded.dtype == torch.float32 and torch.equal(rounded, round_trip(weight.bfloat16(), FP8_BLOCK).float())


@pytest.mark.parametrize("keep", [False, True])
def test_an_engine_may_be_sent_values_and_scales_and_is_compared_with_what_they_stand_for(keep: bool) -> None:
    precision = PlannedPrecision(make_plan(FP8_BLOCK), torch.bfloat16, by_engine=True, packs=True)
    weights, fingerprints, sent = export(precision, keep=keep)
    assert sent[NAME].dtype is torch.uint8 and torch.equal(sent[HEAD], weights[HEAD].bfloat16())
    assert fingerprints.sent == {name: fingerprint(tensor) for name, tensor in sent.items()}
    held = round_trip(weights[NAME].bfloat16(), FP8_BLOCK)
    assert torch.equal(unpack(sent[NAME], FP8_BLOCK).dequantize(torch.bfloat16), held)
    assert fingerprints.read_back[NAME] == fingerprint(normalize_zeros(held))
