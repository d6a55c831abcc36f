"""Calibration: static scales of inputs are the greatest magnitudes over texts, read without rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.extensions.labs.fake_quant.apply_fake_quant import apply_fake_quant, iter_static_inputs
from strop.extensions.labs.fake_quant.calibration import (
    calibrate_inputs,
    needs_calibration,
    read_calibration_tokens,
    set_input_scales,
)
from strop.extensions.labs.fake_quant.fake_quant_linear import FakeQuantLinear
from strop.extensions.labs.fake_quant.modelopt_config import read_quant_config
from strop.models.network import Network
from support.models import build

TEXTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15], [1, 2]]


class _Words:
    def __call__(self, text: str) -> dict[str, Any]:
        return {"input_ids": [len(word) for word in text.split()]}


def read(source: str, size: int = 4, length: int = 8) -> list[list[int]]:
    return read_calibration_tokens(source, size=size, length=length, tokenizer=_Words(), vocabulary=50)


def quantized(family: str = "qwen3_moe", source: str = "FP8_DEFAULT_CFG") -> Network:
    network = Network(build(family))
    apply_fake_quant(network.model, read_quant_config(source))
    return network


def test_scales_are_the_greatest_inputs_of_each_layer_over_all_texts() -> None:
    network, plain = quantized("llama"), build("llama")
    seen: dict[str, float] = {}

    def record(name: str) -> Any:
        def keep(_: Any, args: tuple[Any, ...]) -> None:
            seen[name] = max(seen.get(name, 0.0), float(args[0].detach().abs().max()))

        return keep

    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(record(name))
    for text in TEXTS:
        plain(torch.tensor([text]))
    found = calibrate_inputs(network, TEXTS, batch_size=2)
    assert found.keys() == seen.keys() and all(found[name] == pytest.approx(seen[name], rel=1e-5) for name in seen)


def test_a_calibrated_model_rounds_inputs_to_its_scales_and_saturates_beyond() -> None:
    network = quantized("llama")
    assert needs_calibration(network.model)
    set_input_scales(network.model, {name: 1.0 for name, _ in iter_static_inputs(network.model)})
    assert not needs_calibration(network.model)
    layer = next(module for module in network.model.modules() if isinstance(module, FakeQuantLinear))
    assert layer.quantizers.round_inputs(torch.full((1, 32), 7.0)).max() == 1.0


def test_experts_have_one_scale_for_a_layer() -> None:
    found = calibrate_inputs(quantized(), TEXTS, batch_size=4)
    assert {name.rpartition(".")[2] for name in found if ".experts." in name} == {"gate_up_proj", "down_proj"}
    assert all(amax > 0 for amax in found.values())


def test_rounding_and_attention_are_as_before_after_a_calibration() -> None:
    network = quantized()
    before = network.model.config._attn_implementation
    set_input_scales(network.model, calibrate_inputs(network, TEXTS, batch_size=4))
    assert network.model.config._attn_implementation == before
    assert not any(quantizer.paused for _, quantizer in iter_static_inputs(network.model))


def test_a_pass_before_the_calibration_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="before their calibration"):
        quantized("llama").model(torch.tensor([[1, 2, 3]]))


def test_texts_that_say_nothing_are_refused() -> None:
    network = quantized("llama")
    with torch.no_grad():
        network.model.get_input_embeddings().weight.zero_()
        for name, weight in network.model.named_parameters():
            if name.endswith("input_layernorm.weight"):
                weight.zero_()
    with pytest.raises(ValueError, match="which gives no scale"):
        calibrate_inputs(network, TEXTS, batch_size=2)


def test_texts_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a bb ccc\n\none\nto be or not to be that is the question\n")
    assert read(str(tmp_path / "texts.txt")) == [[1, 2, 3], [2, 2, 2, 3, 2, 2, 4, 2]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in ("a b", "cc dd", "e f")))
    assert read(str(tmp_path / "rows.jsonl"), size=2) == [[1, 1], [2, 2]]


def test_random_texts_are_the_same_in_every_run() -> None:
    first = read("random", size=3, length=5)
    assert first == read("random", size=3, length=5) and len(first) == 3 and max(map(max, first)) < 50


def test_a_file_without_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"number": 3}\n')
    with pytest.raises(ValueError, match="has the columns number"):
        read(str(tmp_path / "rows.jsonl"))
    (tmp_path / "short.txt").write_text("a\n")
    with pytest.raises(ValueError, match="no text of at least two tokens"):
        read(str(tmp_path / "short.txt"))
