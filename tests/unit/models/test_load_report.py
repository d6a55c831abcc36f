"""What was loaded: weights that are not the model's are refused by name, at every load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strop.models.adapters import WEIGHTS_FILE, merge_adapters
from strop.models.load_report import WeightsDoNotFit, find_not_finite
from strop.models.loading import load_model
from strop.models.value_network import load_classifier
from support.models import build

Weights = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


def saved(folder: Path, change: Callable[[Weights], Weights], family: str = "llama") -> str:
    """Save a tiny model with other weights than it has, and return its folder."""
    build(family).save_pretrained(folder)
    rewrite(folder / "model.safetensors", change)
    return str(folder)


def rewrite(path: Path, change: Callable[[Weights], Weights]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path, metadata={"format": "pt"})


def without(*parts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: tensor for name, tensor in weights.items() if not any(part in name for part in parts)}


def spoil(value: float, name: str = UP) -> Callable[[Weights], Weights]:
    def change(weights: Weights) -> Weights:
        weights[name].view(-1)[-1] = value
        return weights

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("1.mlp.up_proj"), f"missing {UP}"),
        (without("layers.0."), "missing model.layers.0.input_layernorm.weight, .* and 4 more"),
        (lambda weights: {f"base.{name}": each for name, each in weights.items()}, "Every name begins with 'base.'"),
        (lambda weights: {f"_orig_mod.{name}": each for name, each in weights.items()}, "Every name begins with '_orig_mod.'"),
        (lambda weights: {**weights, "v_head.summary.weight": torch.zeros(1, 32)}, "unexpected v_head.summary.weight"),
        (lambda weights: {**weights, UP: torch.zeros(47, 32)}, f"of another shape {UP} .found 47 x 32, the model has 48 x 32."),
        (spoil(float("nan")), f"with NaN or infinite values {UP}"),
        (spoil(float("-inf")), f"with NaN or infinite values {UP}"),
    ],
)
def test_weights_that_are_not_the_models_are_refused_by_name(
    change: Callable[[Weights], Weights], said: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "model", change)
    with pytest.raises(WeightsDoNotFit, match=said):
        load_model(folder)


def test_experts_that_lack_a_part_are_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", without("layers.0.mlp.experts.1.up_proj"), "qwen3_moe")
    with pytest.raises(
        WeightsDoNotFit, match=r"parts that are missing or do not fit model\.layers\.0\.mlp\.experts\.gate_up_proj"
    ):
        load_model(folder)


def test_tied_weights_and_what_transformers_ignores_are_no_misfit(tmp_path: Path) -> None:
    assert load_model(saved(tmp_path / "tied", without("lm_head"), "qwen2")) is not None
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert load_model(saved(tmp_path / "buffers", lambda weights: {**weights, **inverse})) is not None


def test_large_finite_values_whose_sum_overflows_are_no_misfit() -> None:
    large = torch.full((4,), 3e38)
    assert list(find_not_finite([("large", large), ("half", torch.full((9,), 6e4, dtype=torch.float16))])) == []
    assert list(find_not_finite([("mixed", torch.tensor([float("inf"), float("-inf")]))])) == ["mixed"]


def test_a_classifier_refuses_them_too(tmp_path: Path) -> None:
    missing = saved(tmp_path / "missing", without("1.mlp.up_proj"))
    broken = saved(tmp_path / "broken", spoil(float("nan")))
    with pytest.raises(ValueError, match=f"missing {UP}"):
        load_classifier(missing)
    with pytest.raises(ValueError, match=f"infinite values {UP}"):
        load_classifier(broken)


def test_a_critic_may_lack_its_score_layer_and_nothing_else(tmp_path: Path) -> None:
    assert load_classifier(saved(tmp_path / "whole", lambda weights: weights)) is not None
    with pytest.raises(WeightsDoNotFit, match=r"unexpected v_head\.summary"):
        load_classifier(saved(tmp_path / "other", lambda weights: {**weights, "v_head.summary.weight": torch.zeros(1, 32)}))


def adapters(folder: Path, base: str) -> Path:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load_model(base), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("layers.1.self_attn.q_proj.lora_B"), "missing .*layers.1.self_attn.q_proj.lora_B"),
        (
            lambda weights: {**weights, "base_model.model.model.layers.7.x.lora_A.weight": torch.ones(2, 2)},
            "unexpected .*layers.7",
        ),
        (lambda weights: {name: tensor * float("nan") for name, tensor in weights.items()}, "infinite values .*lora_A"),
        (lambda weights: {name.replace("base_model.model.", ""): each for name, each in weights.items()}, "missing|unexpected"),
    ],
)
def test_adapters_that_are_not_those_of_the_model_are_refused(
    change: Callable[[Weights], Weights], said: str, tmp_path: Path
) -> None:
    base = saved(tmp_path / "base", lambda weights: weights)
    folder = adapters(tmp_path / "adapters", base)
    assert merge_adapters(load_model(base), folder) is not None
    rewrite(folder / WEIGHTS_FILE, change)
    with pytest.raises(WeightsDoNotFit, match=said):
        load_model(str(folder))


def test_a_configuration_with_fewer_layers_than_the_weights_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", lambda weights: weights)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1}))
    with pytest.raises(WeightsDoNotFit, match=r"unexpected model\.layers\.1\."):
        load_model(folder)
