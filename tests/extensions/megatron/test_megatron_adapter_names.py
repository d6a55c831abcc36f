"""Adapters of Megatron Core's layers are named as those of the torch learner, and weights that are not finite are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from strop.extensions.megatron.adapters.adapter_folder import make_peft_config
from strop.extensions.megatron.weights.weight_reader import FileWeights
from strop.models.adapters import adapter_weights, lora_layers, read_adapter_config
from strop.models.load_report import WeightsDoNotFit
from unit.models.test_lora_beside_experts import train


def test_megatron_learners_write_the_same_names(tmp_path: Path) -> None:
    model = train(tmp_path, "deepseek_v3")
    layers = [layer.name for layer in lora_layers(model)]
    others = {f"model.layers.1.mlp.experts.{number}" for number in range(4)}
    made = make_peft_config(layers, others, base="base", model_type="deepseek_v3", dim=8, alpha=32, dropout=0.1)
    saved = read_adapter_config(tmp_path / "adapters")
    keys = ("target_modules", "target_parameters", "lora_dropout")
    assert {key: made[key] for key in keys} == {key: saved[key] for key in keys}
    assert len(adapter_weights(model)) == 2 * len(layers)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_file({"up": torch.tensor([1.0, float("nan")])}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsDoNotFit, match="infinite values up"):
        FileWeights(tmp_path).read("up", (slice(0, None),))
