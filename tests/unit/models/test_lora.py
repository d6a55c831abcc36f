"""Adapters: what they change and what they leave, which layers get them, and that others read what is saved."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models.adapters import (
    adapter_weights,
    disable_adapters,
    load_adapters,
    lora_layers,
    merged_weights,
    read_adapter_config,
    save_adapters,
)
from strop.models.loading import load_model
from strop.models.lora import add_adapters, count_parameters, find_target_layers
from strop.models.lora_config import LoraConfig
from strop.models.network import Network, disable_dropout
from strop.models.value_network import ValueNetwork, load_classifier
from strop.sampling import Sampling
from support.lora import build_with_adapters, copy_weights, with_random_adapters
from support.models import FAMILIES, build
from support.rollouts import pack_grpo, simple_groups
from support.sweep import sweep

TOKENS = torch.arange(5, 29)[None]
# As one of these all others: biases, norms around, Conv1D, experts.
each_kind_of_layer = pytest.mark.parametrize("family", sweep(FAMILIES, "qwen2", "gemma3", "gpt2", "gpt_oss"))

pytestmark = pytest.mark.filterwarnings("ignore:the experts' weights:UserWarning")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    output: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return output


@pytest.fixture
def saved_base(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


# --- what adapters change -------------------------------------------------------------------------------------------------


@each_kind_of_layer
def test_with_its_adapters_off_a_model_is_its_base_to_the_last_bit_and_afterwards_what_it_was(family: str) -> None:
    model = build(family)
    base = logits(model)
    trained = logits(with_random_adapters(model))
    assert float((trained - base).abs().max()) > 0.1
    with disable_adapters(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), trained)
    assert all(layer.down.requires_grad and layer.up.requires_grad for layer in lora_layers(model))


def test_an_error_while_the_adapters_are_off_does_not_leave_them_off() -> None:
    model = build_with_adapters("llama")
    trained = logits(model)
    with pytest.raises(KeyError), disable_adapters(model):
        raise KeyError
    assert torch.equal(logits(model), trained)


@each_kind_of_layer
def test_an_ordinary_model_with_the_merged_weights_computes_the_same(family: str) -> None:
    """Float64 where torch has it for the family; detours over float32 leave seven digits."""
    dtype = torch.float32 if family in ("mixtral", "qwen3_moe", "gpt_oss") else torch.float64
    model, plain = with_random_adapters(build(family, dtype=dtype), spread=0.1), build(family, dtype=dtype)
    before = copy_weights(model)
    merged = dict(merged_weights(model))
    assert list(merged) == list(plain.state_dict())
    plain.load_state_dict(merged)
    assert torch.allclose(logits(plain), logits(model), atol=2e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "merging changes nothing"


def test_merged_weights_of_a_bfloat16_model_keep_what_bfloat16_would_round_away() -> None:
    model = build_with_adapters("llama", spread=1e-5)
    model.to(torch.bfloat16)
    layer = lora_layers(model)[0]
    change = layer.merged_weight() - layer.base.weight.float()
    wanted = (layer.scale * layer.up.float() @ layer.down.float()).detach()
    assert float((change - wanted).norm() / wanted.norm()) < 1e-2
    kept = (layer.base.weight + wanted.bfloat16() != layer.base.weight).float().mean()
    assert float(kept) < 0.5, "bfloat16 loses most of it"


def test_only_adapters_are_trained_and_they_are_counted() -> None:
    model = build_with_adapters("llama")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_A." in name or ".lora_B." in name for name in trained)
    count = count_parameters(model)
    assert count.adapted_layers == 14
    assert count.trained == sum(layer.down.numel() + layer.up.numel() for layer in lora_layers(model)) == 7424
    assert str(count) == "7,424 of 42,592 parameters are trained (17.43%), in adapters on 14 layers"
    assert count_parameters(build("qwen2")).trained == count_parameters(build("qwen2")).total, "the tied head counts once"


def test_adapters_follow_from_the_seed_alone_and_leave_the_global_generator_where_it_was() -> None:
    def first(seed: int, noise: int, **options: Any) -> Tensor:
        torch.manual_seed(noise)
        model = build("llama")
        state = torch.get_rng_state()
        add_adapters(model, LoraConfig(**options), base="base", seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        return torch.cat([layer.down.detach().flatten() for layer in lora_layers(model)])

    assert torch.equal(first(3, noise=1), first(3, noise=2))
    assert not torch.equal(first(3, noise=1), first(4, noise=1))
    layers = lora_layers(build_with_adapters("llama", dim=16))
    fan = 32 + 16
    spread = torch.cat([layer.down.detach().flatten() for layer in layers if layer.down.shape[1] == 32]).std()
    assert float(spread) == pytest.approx((2 / fan) ** 0.5, rel=0.05), "xavier: a normal distribution"
    uniform = [
        layer.down.detach()
        for layer in lora_layers(build_with_adapters("llama", lora_A_init="uniform"))
        if layer.down.shape[1] == 32
    ]
    bound = 32**-0.5
    assert bound * 0.98 < float(torch.cat(uniform).abs().max()) <= bound


def test_the_scale_is_alpha_over_dim_or_over_its_root() -> None:
    assert {layer.scale for layer in lora_layers(build_with_adapters("llama", dim=4, alpha=8))} == {2.0}
    assert {layer.scale for layer in lora_layers(build_with_adapters("llama", dim=4, alpha=8, use_rslora=True))} == {4.0}


def test_adapters_of_a_bfloat16_model_are_float32() -> None:
    model = with_random_adapters(build("llama", dtype=torch.bfloat16))
    assert {layer.up.dtype for layer in lora_layers(model)} == {torch.float32}
    assert {layer.base.weight.dtype for layer in lora_layers(model)} == {torch.bfloat16}
    network = Network(model, precision=torch.bfloat16)
    outputs = network.outputs(pack_grpo(simple_groups((5, (4, 3)))), Sampling())
    outputs.logprobs.sum().backward()
    assert all(layer.up.grad is not None and layer.up.grad.dtype == torch.float32 for layer in lora_layers(model))


def test_a_second_set_of_adapters_is_refused() -> None:
    with pytest.raises(ValueError, match="already has adapters"):
        with_random_adapters(build_with_adapters("llama"))


# --- which layers ---------------------------------------------------------------------------------------------------------


def test_every_linear_layer_but_the_head_gets_an_adapter() -> None:
    names = find_target_layers(build("qwen2"), LoraConfig())
    ends = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    ends += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names == [f"model.layers.{layer}.{end}" for layer in (0, 1) for end in ends]
    model = build_with_adapters("qwen2")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(), "a tied head stays tied"


@pytest.mark.parametrize(
    ("targets", "excluded", "wanted"),
    [
        (["q_proj", "v_proj"], [], {"0.self_attn.q_proj", "1.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.v_proj"}),
        (["model.layers.1.mlp.up_proj"], [], {"1.mlp.up_proj"}),
        (["*.0.mlp.*"], ["*.gate_proj"], {"0.mlp.up_proj", "0.mlp.down_proj"}),
        (["0.self_attn.k_proj"], [], {"0.self_attn.k_proj"}),
        (["*_proj"], ["*.1.*", "*.mlp.*", "q_proj"], {f"0.self_attn.{end}_proj" for end in "kvo"}),
        ([], ["*.mlp.*", "*.1.*", "o_proj"], {f"0.self_attn.{end}_proj" for end in "qkv"}),
    ],
)
def test_patterns_name_layers(targets: list[str], excluded: list[str], wanted: set[str]) -> None:
    model = build("llama")
    options = LoraConfig(target_modules=targets, exclude_modules=excluded)
    assert set(find_target_layers(model, options)) == {f"model.layers.{name}" for name in wanted}
    add_adapters(model, options, base="base")
    assert {layer.name for layer in lora_layers(model)} == {f"model.layers.{name}" for name in wanted}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"target_modules": ["q_porj"]},
            r"target_modules: 'q_porj' matches nothing; did you mean 'q_proj'\? there are: down_proj, ",
        ),
        ({"exclude_modules": ["w_proj"]}, "exclude_modules: 'w_proj' matches nothing"),
        ({"target_modules": ["mlp.*_proj"]}, "matches nothing"),  # with a wildcard a pattern is all of the name
        ({"target_modules": ["q_proj", "lm_head"]}, "'lm_head' matches lm_head, which is the output layer"),
        (
            {"target_modules": ["embed_tokens"]},
            "matches model.embed_tokens, which is a Embedding: only linear layers of the decoder can have adapters",
        ),
        ({"target_modules": ["q_proj"], "exclude_modules": ["self_attn.q_proj"]}, "of the 14 linear layers .* all are excluded"),
    ],
)
def test_a_pattern_that_names_no_layer_is_an_error_that_says_what_there_is(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_target_layers(build("llama"), LoraConfig(**options))


@pytest.mark.filterwarnings("default:the experts' weights:UserWarning")
def test_experts_that_are_no_linear_layers_are_named_when_they_are_left_out_and_refused_when_they_are_asked_for() -> None:
    model = build("qwen3_moe")
    with pytest.warns(
        UserWarning, match=r"model\.layers\.\*\.mlp\.experts\.gate_up_proj, model\.layers\.\*\.mlp\.experts\.down_proj"
    ):
        names = find_target_layers(model, LoraConfig())
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ValueError, match=r"'gate_up_proj' matches the weight .*gate_up_proj, which is not a linear layer"):
        find_target_layers(model, LoraConfig(target_modules=["gate_up_proj"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_target_layers(model, LoraConfig(target_modules=["q_proj"]))


# --- dropout --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["pre", "post"])
def test_adapter_dropout_acts_while_gradients_are_taken_and_nowhere_else(position: str) -> None:
    plain, dropping = build_with_adapters("llama"), build_with_adapters("llama", dropout=0.5, dropout_position=position)
    disable_dropout(dropping)
    for training in (False, True):
        dropping.train(training)
        assert torch.equal(logits(dropping), logits(plain)), "scoring and sampling read the whole adapter"
        first, second = (dropping(input_ids=TOKENS, use_cache=False).logits for _ in range(2))
        assert not torch.allclose(first, second)


def test_what_is_dropped_is_what_an_adapter_adds_or_what_it_reads() -> None:
    x = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0))
    for position in ("pre", "post"):
        layer = lora_layers(build_with_adapters("llama", dropout=0.25, dropout_position=position))[0]
        with torch.no_grad():
            whole = layer.module(x) - layer.base(x)
        added = (layer.module(x) - layer.base(x)).detach()
        zeros = float((added == 0).float().mean())
        assert zeros == pytest.approx(0.25, abs=0.01) if position == "post" else zeros < 0.01
        assert float((added - whole).mean() / whole.abs().mean()) == pytest.approx(0.0, abs=0.02), "the mean is kept"


def test_recomputed_activations_see_the_same_dropout() -> None:
    found = []
    for checkpointing in (False, True):
        model = build_with_adapters("llama", dropout=0.5)
        model.train(checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(0)
        model(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
        found.append(torch.cat([layer.up.grad.flatten() for layer in lora_layers(model)]))  # type: ignore[union-attr]
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-7)
    assert float(found[0].abs().max()) > 0


# --- files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sweep(["llama", "qwen2", "gemma3", "gpt2", "qwen3_moe", "mixtral"], "qwen2", "gpt2"))
def test_peft_and_transformers_load_what_is_saved(family: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = build(family)
    base.save_pretrained(tmp_path / "base")
    model = with_random_adapters(base, base=str(tmp_path / "base"), use_rslora=True)
    save_adapters(model, tmp_path / "adapters")
    assert sorted(path.name for path in (tmp_path / "adapters").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base_config.json",
    ]
    config = read_adapter_config(tmp_path / "adapters")
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert (config["peft_type"], config["task_type"], config["inference_mode"]) == ("LORA", "CAUSAL_LM", True)
    assert config["target_modules"] == sorted(config["target_modules"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "adapters"))
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapters")), logits(model))


def test_some_layers_of_a_kind_are_saved_by_their_whole_names(tmp_path: Path) -> None:
    save_adapters(build_with_adapters("llama", target_modules=["*.1.*.q_proj"]), tmp_path)
    assert read_adapter_config(tmp_path)["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    save_adapters(build_with_adapters("llama", target_modules=["q_proj"]), tmp_path)
    assert read_adapter_config(tmp_path)["target_modules"] == ["q_proj"]


def test_saved_adapters_are_loaded_in_place_bit_for_bit(tmp_path: Path) -> None:
    trained, other = build_with_adapters("llama", seed=1), build_with_adapters("llama", seed=2)
    save_adapters(trained, tmp_path)
    held = {name: tensor.data_ptr() for name, tensor in adapter_weights(other).items()}
    load_adapters(other, tmp_path)
    assert {name: tensor.data_ptr() for name, tensor in adapter_weights(other).items()} == held
    assert torch.equal(logits(other), logits(trained))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 4, "alpha": 16}, r"have r = 8, but this run's have 4; set dtensor_cfg\.lora_cfg\.dim"),
        ({"alpha": 16}, r"have lora_alpha = 32, but this run's have 16; set dtensor_cfg\.lora_cfg\.alpha"),
        ({"use_rslora": True}, "have use_rslora = False"),
        ({"target_modules": ["q_proj"]}, "do not fit those of this run; they differ in .*mlp.down_proj"),
    ],
)
def test_adapters_of_another_form_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_adapters(build_with_adapters("llama"), tmp_path)
    model = build_with_adapters("llama", **options)
    before = copy_weights(model)
    with pytest.raises(ValueError, match=message):
        load_adapters(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_adapters_of_another_base_are_loaded_with_a_warning(tmp_path: Path) -> None:
    save_adapters(build_with_adapters("llama", base="here/model"), tmp_path)
    with pytest.warns(UserWarning, match="trained on here/model, and this run adds them to moved/model"):
        load_adapters(build_with_adapters("llama", base="moved/model"), tmp_path)


def test_a_folder_of_adapters_can_be_named_as_a_model_and_comes_merged(saved_base: Path, tmp_path: Path) -> None:
    """Trained under another configuration than the base's own, which lies beside the adapters."""
    overrides = {"rms_norm_eps": 0.5}
    model = with_random_adapters(load_model(str(saved_base), overrides=overrides), base=str(saved_base))
    save_adapters(model, tmp_path / "adapters")
    merged = load_model(str(tmp_path / "adapters"))
    assert lora_layers(merged) == []
    assert torch.allclose(logits(merged), logits(model), atol=1e-4)
    assert all(parameter.requires_grad for parameter in merged.parameters())
    again = with_random_adapters(merged, base=str(tmp_path / "adapters"), seed=7)
    save_adapters(again, tmp_path / "further")
    assert torch.allclose(logits(load_model(str(tmp_path / "further"))), logits(again), atol=1e-4), "adapters upon adapters"


# --- classifiers ----------------------------------------------------------------------------------------------------------


def scores(model: Any) -> Tensor:
    batch = pack_grpo(simple_groups((5, (6, 3)), (9, (4,))))
    classifier = copy.deepcopy(model)
    classifier.set_attn_implementation("sdpa")
    with torch.no_grad():
        return ValueNetwork(classifier).outputs(batch, Sampling()).values


@pytest.mark.parametrize("family", sweep(["llama", "qwen3"], "qwen3"))
def test_a_classifier_trains_and_saves_its_score_layer_beside_the_adapters(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    build(family).save_pretrained(tmp_path / "base")
    model = with_random_adapters(load_classifier(str(tmp_path / "base"), seed=1), base=str(tmp_path / "base"))
    model.config.pad_token_id = 3
    assert {name for name, weight in model.named_parameters() if weight.requires_grad and "lora" not in name} == {"score.weight"}
    outputs = ValueNetwork(model).outputs(pack_grpo(simple_groups((5, (6, 3)))), Sampling())
    outputs.values.sum().backward()
    assert model.score.weight.grad is not None
    with torch.no_grad():
        model.score.weight += 0.3 * torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(0))

    save_adapters(model, tmp_path / "adapters")
    assert (
        read_adapter_config(tmp_path / "adapters")["task_type"],
        read_adapter_config(tmp_path / "adapters")["modules_to_save"],
    ) == ("SEQ_CLS", ["score"])
    loaded = PeftModel.from_pretrained(load_classifier(str(tmp_path / "base"), seed=2), str(tmp_path / "adapters"))
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(loaded), logits(model))
    other = with_random_adapters(load_classifier(str(tmp_path / "base"), seed=3), base=str(tmp_path / "base"), seed=5)
    load_adapters(other, tmp_path / "adapters")
    assert torch.equal(scores(other), scores(model))

    merged = load_classifier(str(tmp_path / "adapters"))
    assert (merged.config.num_labels, merged.config.pad_token_id) == (1, 3)
    assert torch.allclose(scores(merged), scores(model), atol=1e-4)
    with pytest.raises(ValueError, match="has the adapters of a reward model, which is not a language model"):
        load_model(str(tmp_path / "adapters"))


def test_a_critic_can_begin_with_a_policy_that_was_trained_with_adapters(saved_base: Path, tmp_path: Path) -> None:
    policy = with_random_adapters(load_model(str(saved_base)), base=str(saved_base))
    save_adapters(policy, tmp_path)
    critic = load_classifier(str(tmp_path), seed=1)
    merged = load_model(str(tmp_path))
    assert all(torch.equal(weight, merged.model.state_dict()[name]) for name, weight in critic.model.state_dict().items())
    assert torch.equal(critic.score.weight, load_classifier(str(saved_base), seed=1).score.weight)
