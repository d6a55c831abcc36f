"""Adapters on dense layers and shared experts of mixtures, whose names PEFT takes for those of experts: it loads what is saved."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.models.adapters import (
    AdapterTargets,
    _is_renamed,
    lora_layers,
    merge_adapters,
    merged_weights,
    read_adapter_config,
    save_adapters,
)
from strop.models.lora import add_adapters, find_target_layers
from strop.models.lora_config import LoraConfig
from strop.models.value_network import load_classifier
from support.lora import with_random_adapters
from support.models import build

TOKENS = torch.arange(5, 29)[None]
RENAMED = ("deepseek_v3", "glm4_moe")  # not qwen2_moe, though PEFT's rule has its name
CHANGED = ("down_proj", "gate_proj", "up_proj")
PREFIX = "base_model.model."

pytestmark = pytest.mark.filterwarnings("ignore:the experts' weights:UserWarning")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    output: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return output


def train(folder: Path, family: str, **options: Any) -> Any:
    """Save a base and adapters on it, and return the model."""
    base = build(family)
    base.save_pretrained(folder / "base")
    model = with_random_adapters(base, base=str(folder / "base"), **options)
    save_adapters(model, folder / "adapters")
    return model


def load_base(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "base")


def check_loaded_by_peft(model: Any, folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = PeftModel.from_pretrained(load_base(folder), str(folder / "adapters"))
        found = logits(AutoModelForCausalLM.from_pretrained(folder / "adapters"))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-4)
    torch.testing.assert_close(found, logits(model), rtol=0, atol=1e-4)
    check_merged(loaded.merge_and_unload(), dict(merged_weights(model)))


def check_merged(model: Any, wanted: dict[str, Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", [*RENAMED, "qwen2_moe"])
def test_peft_and_transformers_load_adapters_on_all_linear_layers(family: str, tmp_path: Path) -> None:
    model = train(tmp_path, family, use_rslora=True)
    assert [layer.name for layer in lora_layers(model)] == find_target_layers(build(family), LoraConfig())
    config = read_adapter_config(tmp_path / "adapters")
    renamed = family in RENAMED
    assert config["target_parameters"] == ([f"{name}.weight" for name in CHANGED] if renamed else None)
    assert set(CHANGED) & set(config["target_modules"]) == (set() if renamed else set(CHANGED))
    check_loaded_by_peft(model, tmp_path)


@pytest.mark.parametrize(
    ("options", "modules", "parameters"),
    [
        ({"target_modules": ["gate_proj"], "dropout": 0.1}, [], ["gate_proj.weight"]),
        (
            {"target_modules": ["*.0.*.down_proj", "*.1.*.o_proj"]},
            ["model.layers.1.self_attn.o_proj"],
            ["model.layers.0.mlp.down_proj.weight"],
        ),
        ({"target_modules": ["o_proj"], "dropout": 0.1}, ["o_proj"], None),
    ],
)
def test_chosen_layers_are_saved_by_the_names_that_peft_leaves(
    options: dict[str, Any], modules: list[str], parameters: list[str] | None, tmp_path: Path
) -> None:
    model = train(tmp_path, "deepseek_v3", **options)
    config = read_adapter_config(tmp_path / "adapters")
    assert (config["target_modules"], config["target_parameters"]) == (modules, parameters)
    assert config["lora_dropout"] == (0.0 if parameters else options.get("dropout", 0.0)), (
        "PEFT refuses dropout beside parameters"
    )
    check_loaded_by_peft(model, tmp_path)


@pytest.mark.parametrize("family", [*RENAMED, "qwen2_moe"])
def test_new_adapters_change_nothing(family: str) -> None:
    model = build(family)
    before = logits(model)
    add_adapters(model, LoraConfig(), base="base")
    assert torch.equal(logits(model), before)


def test_a_reward_model_is_loaded_with_its_score_layer(tmp_path: Path) -> None:
    from peft import PeftModel

    build("deepseek_v3").save_pretrained(tmp_path / "base")
    model = with_random_adapters(load_classifier(str(tmp_path / "base"), seed=1), base=str(tmp_path / "base"))
    save_adapters(model, tmp_path / "adapters")
    loaded = PeftModel.from_pretrained(load_classifier(str(tmp_path / "base"), seed=2), str(tmp_path / "adapters"))
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-4)


# --- folders that name these layers as PEFT takes for experts' -------------------------------------------------------------


def name_as_peft_does(folder: Path) -> None:
    path = folder / "adapters" / "adapter_config.json"
    config = json.loads(path.read_text())
    config["target_modules"] += [name.removesuffix(".weight") for name in config.pop("target_parameters")]
    path.write_text(json.dumps(config))


def add_to_experts(folder: Path, wanted: dict[str, Tensor], scale: float) -> None:
    """Add adapters of single experts, as PEFT saved them with Transformers 4, to a folder and to merged weights."""
    path, generator = folder / "adapters" / "adapter_model.safetensors", torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for name in [name for name in wanted if ".experts." in name]:
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        wanted[name] = wanted[name].clone()
        for number, expert in enumerate(wanted[name]):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                layer = f"{PREFIX}{name.rpartition('.')[0]}.{number}.{part}"
                down = tensors[f"{layer}.lora_A.weight"] = torch.randn(8, rows.shape[1], generator=generator)
                up = tensors[f"{layer}.lora_B.weight"] = torch.randn(rows.shape[0], 8, generator=generator)
                rows += scale * up @ down
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("experts", [False, True])
def test_other_folders_with_these_layers_are_merged_whole(experts: bool, tmp_path: Path) -> None:
    model = train(tmp_path, "deepseek_v3")
    name_as_peft_does(tmp_path)
    wanted = dict(merged_weights(model))
    if experts:
        add_to_experts(tmp_path, wanted, lora_layers(model)[0].scale)
    merged = merge_adapters(load_base(tmp_path), tmp_path / "adapters")
    assert lora_layers(merged) == []
    check_merged(merged, wanted)


# --- names ----------------------------------------------------------------------------------------------------------------


def test_without_peft_the_layers_of_mixtures_are_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    ask = _is_renamed.__wrapped__
    assert (
        ask("gate_proj", "deepseek_v3", True) and not ask("o_proj", "deepseek_v3", True) and not ask("gate_proj", "llama", False)
    )


def test_models_without_experts_keep_their_names() -> None:
    assert AdapterTargets.of(["gate_proj", "q_proj"], "llama").options() == {"target_modules": ["gate_proj", "q_proj"]}
