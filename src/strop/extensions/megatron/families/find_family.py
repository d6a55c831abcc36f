"""The families, the one of a configuration, and what options of ``megatron_cfg`` need that a model or an installation may lack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

from strop.extensions.megatron.families.architecture import Architecture, WeightRule
from strop.extensions.megatron.families.decoders import (
    DeepSeek,
    Gemma,
    Gemma2,
    GlmMoe,
    GptOss,
    Llama,
    Mistral,
    Mixtral,
    Nemotron,
    Qwen,
    QwenMoe,
)
from strop.extensions.megatron.families.hybrids import NemotronHybrid, QwenHybrid
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.models.local_files import list_divisors
from strop.packages import is_installed


class Family(Protocol):
    """Models with one way to read a Hugging Face configuration and to name weights."""

    model_types: ClassVar[tuple[str, ...]]  # of Hugging Face configurations

    def architecture(self, hf_config: Any) -> Architecture:
        """Return what the model is made of. Raises ValueError for what Megatron Core's model cannot do."""
        ...

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        """Return where the weights of the Hugging Face model are in Megatron Core's."""
        ...


FAMILIES: tuple[Family, ...] = (
    Llama(),
    Qwen(),
    QwenMoe(),
    Mistral(),
    Mixtral(),
    Gemma(),
    Gemma2(),
    GlmMoe(),
    GptOss(),
    DeepSeek(),
    Nemotron(),
    QwenHybrid(),
    NemotronHybrid(),
)

MODEL_TYPES = tuple(sorted(name for family in FAMILIES for name in family.model_types))  # that this learner trains

# Types of models that are refused for their own reason.
REFUSED = {
    "deepseek_v4": "its attention reads compressed keys, which Megatron Core's models here do not have",
}


def find_text_type(values: Mapping[str, Any]) -> str | None:
    """Return the type of the language model in a model that reads images, by its config.json, if this learner trains that one."""
    kind = (values.get("text_config") or {}).get("model_type")
    return kind if kind in MODEL_TYPES and values.get("model_type") not in MODEL_TYPES else None


def to_text_config(hf_config: Any) -> Any:
    """Return the configuration of the language model that is trained: a part of that of a model that reads images, else its own."""
    if find_text_type(hf_config.to_dict()) is None:
        return hf_config
    from strop.models.loading import find_auto_class

    text = hf_config.text_config
    text.tie_word_embeddings = hf_config.tie_word_embeddings
    text.architectures = [find_auto_class(text)._model_mapping[type(text)].__name__]
    text.name_or_path = hf_config.name_or_path
    return text


def find_family(hf_config: Any) -> Family:
    """Return the family of a Hugging Face configuration. Raises ValueError if there is none."""
    for family in FAMILIES:
        if hf_config.model_type in family.model_types:
            return family
    if hf_config.model_type in REFUSED:
        raise ValueError(
            f"Megatron Core's learner does not train models of type {hf_config.model_type}: {REFUSED[hf_config.model_type]}. "
            "Set policy.backend=torch"
        )
    raise ValueError(
        f"Megatron Core's models here do not include {hf_config.model_type}; they are those of the types {', '.join(MODEL_TYPES)}. "
        "policy.backend=torch trains any"
    )


SECTION = "policy.megatron_cfg"


def check_architecture(config: MegatronConfig, name: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError for a model whose config.json, with these ``values``, is here and has no place in Megatron Core's models."""
    family = find_family(SimpleNamespace(model_type=find_text_type(values) or values.get("model_type")))
    from strop.models.loading import read_local_model_config

    architecture = family.architecture(to_text_config(read_local_model_config(name)))
    if find_text_type(values) is not None and config.peft.enabled:
        raise ValueError(
            f"{SECTION}.peft.enabled: found true, but Megatron Core trains the language model of {values['model_type']} alone, and "
            "adapters would name its layers as that model does. Set policy.backend=torch, or save the language model first "
            "(AutoModelForCausalLM, save_pretrained) and set policy.model_name to its folder"
        )
    check_recomputation(config, architecture)
    check_recurrent(config, architecture)
    check_indexers(config, architecture)
    if architecture.transformer.get("num_moe_experts"):
        check_experts(config, architecture)


def check_recurrent(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for ranks that cannot divide the heads of recurrent layers."""
    tensor, sizes = config.tensor_model_parallel_size, architecture.recurrent
    if sizes is not None and sizes.heads % tensor:
        raise ValueError(
            f"{SECTION}.tensor_model_parallel_size: found {tensor}, which does not divide the {sizes.heads} {sizes.divided} of the model's "
            f"recurrent layers. {list_divisors(sizes.heads)}"
        )


def check_indexers(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for a stage that begins with a layer that shares the choice of an indexer in the stage before."""
    for first in list_stage_starts(config, architecture.num_layers):
        chooser = architecture.layers[first].chooser
        if chooser not in (None, first):
            raise ValueError(
                f"{SECTION}.pipeline_model_parallel_size: found {config.pipeline_model_parallel_size}, but layer {first}, with which a "
                f"stage or a part of one begins, attends to what the indexer of layer {chooser} chose, which is in the stage before; set "
                "another number of stages or of layers in the first one, or 1"
            )


def list_stage_starts(config: MegatronConfig, layers: int) -> list[int]:
    """Return the first layer of each stage, or of each part of one. Of stages that do not divide the layers: those of one stage."""
    stages, parts = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1
    ends = {0: config.num_layers_in_first_pipeline_stage, stages - 1: config.num_layers_in_last_pipeline_stage}
    own = {stage: size for stage, size in ends.items() if size is not None}
    equal = (layers - sum(own.values())) // max(1, stages - len(own))
    sizes = [own.get(stage, equal) // parts for stage in range(stages)] * parts
    return list(accumulate(sizes[:-1], initial=0)) if sum(sizes) == layers else [0]


def check_recomputation(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for modules that the model does not have."""
    modules = config.recompute_modules or ()
    if "mla_up_proj" in modules and not architecture.latent_attention:
        raise ValueError(
            f"{SECTION}.recompute_modules: found mla_up_proj, but the model has no latent attention; take it from the list"
        )
    if "moe_act" in modules and (not is_installed("transformer_engine") or config.moe_grouped_gemm is False):
        raise ValueError(
            f"{SECTION}.recompute_modules: found moe_act, which only grouped experts of Transformer Engine recompute (it must be "
            "installed, and moe_grouped_gemm not false); take moe instead"
        )


def check_experts(config: MegatronConfig, architecture: Architecture) -> None:
    """Raise ValueError for an expert bias that the model lacks or that adapters leave alone, and for a missing dispatcher."""
    biased, asked = architecture.transformer.get("moe_router_enable_expert_bias", False), config.moe_router_enable_expert_bias
    if asked is not None and asked != biased:
        why = (
            "the model chooses its experts with the bias that its weights have, and without it chooses others"
            if biased
            else "the model's weights have no such bias: engines would choose other experts than the learner"
        )
        raise ValueError(
            f"{SECTION}.moe_router_enable_expert_bias: found {str(asked).lower()}, but {why}; set it to null, which is as the model has it"
        )
    if architecture.transformer.get("add_bias_linear") and config.expert_tensor_parallel_size > 1:
        raise ValueError(
            f"{SECTION}.expert_tensor_parallel_size: found {config.expert_tensor_parallel_size}, but the model's experts have biases, "
            "which each rank would add; set it to 1, and divide experts by expert_model_parallel_size"
        )
    if biased and config.moe_router_bias_update_rate and config.peft.enabled:
        raise ValueError(
            f"{SECTION}.moe_router_bias_update_rate: found {config.moe_router_bias_update_rate:g}, which changes the expert bias of the "
            f"base, and {SECTION}.peft.enabled=true trains only adapters; set it to 0"
        )
    if config.moe_token_dispatcher_type == "flex" and not is_installed("deep_ep"):
        raise ValueError(
            f"{SECTION}.moe_token_dispatcher_type: found flex, which needs DeepEP (deep_ep) and GPUs, and it is not installed; set it to "
            "alltoall, and moe_enable_deepep=false"
        )
    if config.moe_enable_deepep and config.moe_token_dispatcher_type != "flex":
        raise ValueError(
            f"{SECTION}.moe_enable_deepep: found true, but moe_token_dispatcher_type is {config.moe_token_dispatcher_type}; set that to "
            "flex, or this to false"
        )
