"""Adapters of Megatron Core's layers have the numbers of PEFT's on the torch learner, where those share A as Megatron Core's layers do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.ranks import run_on_ranks

from strop.extensions.megatron.adapter_folder import make_peft_config
from strop.extensions.megatron.weight_map import FileWeights
from strop.models.adapters import adapter_weights, lora_layers, read_adapter_config
from strop.models.load_report import WeightsDoNotFit
from strop.weight_sync.exporter import fingerprint_adapters
from support.megatron_adapters import PEFT, adapters_on_rank
from support.megatron_parity import MegatronCase, case, compared_alone, train_cases_on_rank
from support.models import build
from support.needs import needs_megatron
from support.parity import MEGATRON, Case, Differences, compare, make_batch, shorter, train
from support.sweep import sweep
from unit.models.test_lora_beside_experts import train as train_saved

needs_megatron()
pytestmark = pytest.mark.slow

FLOAT64 = Differences(loss=3e-7, norm=3e-7, outputs=3e-7, weights=3e-8, metrics=3e-7)
FLOAT32 = Differences(loss=2e-6, norm=2e-6, outputs=2e-6, weights=1e-6, metrics=1e-5)
GEMMA = replace(FLOAT64, norm=1e-6, weights=3e-7, metrics=1e-6)  # as without adapters: Transformers' norms of it are float32
SINGLE: dict[str, Any] = {"dtype": torch.float32, "steps": 1}


def adapted(**options: Any) -> Case:
    return case(lora=True, fused=True, **options)


def make(world: int, sizes: dict[str, Any], made: Case, **options: Any) -> MegatronCase:
    section = {"peft": PEFT, **options.pop("options", {})}
    return MegatronCase(case=made, world=world, sizes=sizes, options=section, **options)


KEPT_CASES: dict[str, tuple[MegatronCase, Differences]] = {
    "tensor 2": (make(2, {"tp": 2}, adapted(family="qwen2")), FLOAT64),
    "tensor 2, sequence": (make(2, {"tp": 2, "sp": True}, adapted()), FLOAT64),
    "stages 2 x 2, recomputed": (
        make(2, {"pp": 2, "vp": 2}, adapted(family="qwen2_deep"), options={"activation_checkpointing": True}),
        FLOAT64,
    ),
    "experts 2, tensor 2": (make(2, {"ep": 2, "tp": 2, "sp": True}, adapted(family="qwen3_moe")), FLOAT64),
    "tensor 2, sequence, distributed": (
        make(2, {"tp": 2, "sp": True}, adapted(**SINGLE), distributed=True, overlap=True),
        FLOAT32,
    ),
}
CASES = {
    **KEPT_CASES,
    "tensor 2, post norms": (make(2, {"tp": 2}, adapted(family="gemma2")), GEMMA),
    "context 2, dpo": (make(2, {"cp": 2}, adapted(algorithm="dpo")), FLOAT64),
    "stages 2, tied, gspo": (make(2, {"pp": 2}, adapted(family="qwen2", algorithm="gspo")), FLOAT64),
    "stages 2, critic": (make(2, {"pp": 2}, adapted(value=True)), FLOAT64),
    "experts 2, latent attention": (
        make(2, {"ep": 2, "tp": 2, "sp": True}, adapted(family="deepseek_v3", frozen_routers=True)),
        FLOAT64,
    ),
    "tensor 2, gated delta nets": (make(2, {"tp": 2}, adapted(family=f"{MEGATRON}qwen3_5")), FLOAT64),
    "tensor 2, sequence, Mamba": (make(2, {"tp": 2, "sp": True}, adapted(family=f"{MEGATRON}nemotron_h")), FLOAT64),
    "tensor 2, stages 2": (make(4, {"tp": 2, "pp": 2, "sp": True}, adapted(family="qwen3")), FLOAT64),
    "tensor 4, more than groups of heads": (make(4, {"tp": 4}, adapted(family="qwen3", algorithm="sft")), FLOAT64),
    "experts 2, data 4": (make(4, {"ep": 2}, adapted(family="qwen3_moe")), FLOAT64),
}


@cache
def train_together(names: tuple[str, ...]) -> Callable[[str], Differences]:
    """Train cases in one start of the ranks."""
    chosen = {name: CASES[name][0] for name in names}
    if names[0] in KEPT_CASES:
        chosen = {name: replace(made, case=shorter(made.case)) for name, made in chosen.items()}
    cases = {name: (made, make_batch(made.case)) for name, made in chosen.items()}
    ranks = run_on_ranks(CASES[names[0]][0].world, train_cases_on_rank, cases)

    def differences(name: str) -> Differences:
        made, batch = cases[name]
        return compare([rank[name] for rank in ranks], compared_alone(train(made.case, batch)), len(batch.target))

    return differences


def companions(name: str) -> tuple[str, ...]:
    """The cases that share a start with a case: those kept for `make test`, or others of as many ranks."""
    world, kept = CASES[name][0].world, name in KEPT_CASES
    return tuple(other for other, (made, _) in CASES.items() if made.world == world and (other in KEPT_CASES) == kept)


@pytest.mark.parametrize("name", sweep(CASES, *KEPT_CASES))
def test_adapters_train_as_those_of_the_torch_learner(name: str) -> None:
    found, bound = train_together(companions(name))(name), CASES[name][1]
    for kind, limit in vars(bound).items():
        assert getattr(found, kind) <= limit, f"{name}: {kind} differ by {getattr(found, kind):.1e}"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What two ranks found, and their folders."""
    folder = tmp_path_factory.mktemp("adapters")
    return run_on_ranks(2, adapters_on_rank, str(folder)), folder


Done = tuple[list[dict[str, Any]], Path]


def test_the_third_step_is_the_same_after_a_save_and_a_load(done: Done) -> None:
    for found in (done[0][0], done[0][0]["scores"]):
        assert found["same"] == 0.0 and found["other"] <= 1e-6
    assert "base_model.model.score.weight" in done[0][0]["scores"]["names"]


def test_only_adapters_are_trained(done: Done) -> None:
    layers = build("llama").config.num_hidden_layers
    for rank in done[0]:
        assert rank["base"] and rank["trained"] == 2 * 4 * layers


def test_the_reference_is_the_base_to_the_last_bit(done: Done) -> None:
    assert done[0][0]["reference"] == (True, True) or done[0][1]["reference"] == (True, True)


def test_peft_loads_a_checkpoint_in_any_layout(done: Done) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    folder = done[1] / "policy" / "weights"
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "base_config.json"}
    model = PeftModel.from_pretrained(build("llama"), str(folder))
    found, saved = get_peft_model_state_dict(model), load_file(folder / "adapter_model.safetensors")
    assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
    assert torch.equal(saved[_down("q_proj")], saved[_down("v_proj")]), "queries, keys and values share A"


def test_engines_are_sent_what_peft_merges(done: Done, tmp_path: Path) -> None:
    from peft import PeftModel

    published = done[0][0]["published"]
    plain = build("llama")
    base = {name: value.clone() for name, value in plain.state_dict().items()}
    assert all(torch.equal(published["base"][name], value) for name, value in base.items())
    for name, content in zip(("adapter_model.safetensors", "adapter_config.json"), published["files"], strict=True):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    model = PeftModel.from_pretrained(plain, str(tmp_path))
    layers = [layer for layer in lora_layers(model.base_model.model)]
    fingerprints = fingerprint_adapters(((layer, layer.down, layer.up) for layer in layers), torch.bfloat16)
    assert published["fingerprints"] == fingerprints
    merged = model.merge_and_unload().state_dict()
    assert list(published["merged"]) == list(merged)
    for name, value in merged.items():
        torch.testing.assert_close(published["merged"][name], value, rtol=0, atol=1e-6)
    changed = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(merged[changed], base[changed])


def test_new_adapters_are_the_same_in_any_layout(done: Done) -> None:
    one, other = done[0][0]["drawn"]
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
    assert {name.split(".")[4] for name in one if "mlp" in name} == {"1"}
    for name, value in one.items():
        assert value.dtype == torch.float32 and value.any().item() == (".lora_A." in name)
    assert not torch.equal(one[_down("q_proj", 0)], one[_down("q_proj", 1)])


def test_dropout_is_of_training_alone(done: Done) -> None:
    for rank in done[0]:
        for name, changed in rank["dropout"].items():
            assert changed == (not name.endswith("evaluation")), name


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("linear_qvk", "did you mean 'linear_qkv'"),
        ("*.layers.0.*", "not in every pipeline stage"),
        ("*experts.local_experts*", "only linear layers of experts"),
    ],
)
def test_patterns_that_cannot_work_are_refused_on_all_ranks(done: Done, pattern: str, reason: str) -> None:
    for rank in done[0]:
        assert reason in rank["refused"][pattern] and "target_modules" in rank["refused"][pattern]


def _down(name: str, layer: int = 0) -> str:
    return f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_A.weight"


def test_megatron_learners_write_the_same_names(tmp_path: Path) -> None:
    model = train_saved(tmp_path, "deepseek_v3")
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
