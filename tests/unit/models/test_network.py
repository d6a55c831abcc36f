"""Which models read packed rows, and that packed and padded rows say the same."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.models.loading import ModelNotFound, find_stop_token_ids, load_model, load_tokenizer
from strop.models.network import Network, disable_dropout, freeze_routers
from strop.sampling import Sampling
from support.models import FAMILIES, WINDOW, build
from support.rollouts import pack_grpo, simple_groups
from support.sweep import one_in

FLOAT32 = 2e-5


def truth(family: str) -> torch.Tensor:
    """Log-probabilities by the model's own forward pass with its reference attention, one rollout at a time."""
    model = build(family)
    if family not in ("mixtral", "qwen3_moe", "gpt_oss"):  # the kernel of experts takes no float64
        model = model.double()
    model.set_attn_implementation("eager")
    found = []
    groups = simple_groups(*SHAPES)
    for group in groups:
        for rollout in group.rollouts:
            tokens = rollout.tokens()
            with torch.no_grad():
                logs = model(input_ids=tokens[None]).logits[0].double().log_softmax(-1)
            first = len(rollout.prompt)
            found.append(logs[first - 1 : -1].gather(1, tokens[first:, None]).squeeze(1))
    return torch.cat(found)


SHAPES = ((11, (9, 1, 14)), (2, (5,)), (5, (20, 3)))


@pytest.mark.parametrize("family", one_in(3, FAMILIES))
def test_packed_rows_give_the_log_probabilities_of_each_rollout_alone(family: str) -> None:
    """Against eager attention, which knows windows, soft caps and experts; rollouts are longer than the window of 7."""
    network = Network(build(family))
    assert network.packed, network.fallback
    assert network.fallback is None
    with torch.no_grad():
        shared = network.outputs(pack_grpo(simple_groups(*SHAPES)), Sampling()).logprobs
        alone = network.outputs(pack_grpo(simple_groups(*SHAPES), share_prefixes=False), Sampling()).logprobs
        wanted = truth(family)
    assert float((shared - wanted).abs().max()) < FLOAT32
    assert float((alone - wanted).abs().max()) < FLOAT32
    assert max(len(rollout.tokens()) for group in simple_groups(*SHAPES) for rollout in group.rollouts) > 2 * WINDOW


@pytest.mark.parametrize("family", [*FAMILIES, "recurrent_gemma"])
def test_padded_rows_give_the_log_probabilities_of_each_rollout_alone(family: str) -> None:
    """Gemma 2 among them, whose soft cap Transformers' sdpa attention leaves out without a word."""
    network = Network(build(family), packed=False)
    with torch.no_grad():
        found = network.outputs(pack_grpo(simple_groups(*SHAPES)), Sampling()).logprobs
    wanted = truth(family)
    assert float((found - wanted).abs().max()) < FLOAT32


def test_a_recurrent_model_falls_back_to_padded_rows_and_says_what_is_lost() -> None:
    with pytest.warns(
        UserWarning, match=r"RecurrentGemmaForCausalLM cannot read packed rows .*every rollout computes its prompt again"
    ):
        network = Network(build("recurrent_gemma"))
    assert not network.packed
    assert network.fallback is not None
    assert not network.supports_attention_plans()


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    model = build("llama")
    forward = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = shifted
    with pytest.raises(ValueError, match="LlamaForCausalLM transforms its logits after the output layer"):
        Network(model)


def test_a_supported_model_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Network(build("qwen3")).packed


def test_packed_attention_without_a_plan_is_an_error() -> None:
    network = Network(build("llama"))
    with pytest.raises(RuntimeError, match="needs a plan"):
        network.model(input_ids=torch.tensor([[4, 5]]))


def test_dropout_is_turned_off_and_named() -> None:
    model = build("gpt2")
    found = disable_dropout(model)
    assert found
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert disable_dropout(model) == []


def test_dropout_that_a_family_keeps_as_a_number_is_turned_off_too() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2, hidden_dropout=0.1, attention_dropout=0.2)
    model = BloomForCausalLM(config).train()
    assert len(disable_dropout(model)) >= 3
    tokens = torch.arange(12)[None]
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_a_model_whose_class_names_no_base_of_its_own_has_a_decoder() -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16, "num_local_experts": 2}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, **heads)).eval()
    assert model.get_decoder() is model
    assert Network(model, packed=False).decoder is model.model


def test_a_folder_is_loaded_in_float32_with_its_tokenizer(tiny_model_folder: Path) -> None:
    model = load_model(str(tiny_model_folder))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokenizer = load_tokenizer(str(tiny_model_folder))
    assert tokenizer.decode(tokenizer("héllo")["input_ids"]) == "héllo"
    assert "<|im_start|>user" in tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    assert find_stop_token_ids(model, tokenizer) == (2,)
    assert load_tokenizer(str(tiny_model_folder), chat_template="{{ 1 }}").chat_template == "{{ 1 }}"


def test_configuration_overrides_reach_the_model_and_unknown_ones_are_refused(tiny_model_folder: Path) -> None:
    assert load_model(str(tiny_model_folder), overrides={"attention_dropout": 0.5}).config.attention_dropout == 0.5
    with pytest.raises(ValueError, match=r"policy\.hf_config_overrides\.atention_dropout"):
        load_model(str(tiny_model_folder), overrides={"atention_dropout": 0.5})


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelNotFound, match=r"there is no folder \./nowhere"):
        load_model("./nowhere")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_frozen_routers_are_those_that_choose_experts_and_nothing_else(family: str) -> None:
    model = build(family)
    frozen = set(freeze_routers(model))
    experts = {name.split(".experts.")[0] for name, _ in model.named_parameters() if ".experts." in name}
    assert {name.rpartition(".gate")[0] for name in frozen} == experts and len(experts) in (1, 2)
    assert frozen == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert not freeze_routers(build("llama"))
