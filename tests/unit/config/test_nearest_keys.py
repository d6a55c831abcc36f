"""A hint names the key that was meant, or there is none: one at an unrelated key is worse than the keys of the section."""

from __future__ import annotations

import pytest

from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source.nearest_keys import find_nearest_keys, is_misspelling, suggest_keys

MEANT = {
    "grpo.num_promts_per_step": "grpo.num_prompts_per_step",
    "grpo.num_prompt_per_step": "grpo.num_prompts_per_step",
    "grpo.numPromptsPerStep": "grpo.num_prompts_per_step",
    "grpo.num_prompts": "grpo.num_prompts_per_step",
    "grpo.num_generations": "grpo.num_generations_per_prompt",
    "grpo.max_steps": "grpo.max_num_steps",
    "grpo.max_step": "grpo.max_num_steps",
    "grpo.sed": "grpo.seed",
    "grpo.val_perid": "grpo.val_period",
    "grpo.max_new_tokens": "policy.generation.max_new_tokens",
    "grpo.learning_rate": "policy.optimizer.kwargs.lr",
    "grpo.policy": "policy",
    "loss_fn.lr": "policy.optimizer.kwargs.lr",
    "loss_fn.ratio_clp_min": "loss_fn.ratio_clip_min",
    "loss_fn.ratio_clip_mni": "loss_fn.ratio_clip_min",
    "policy.temperature": "policy.generation.temperature",
    "policy.modelname": "policy.model_name",
    "policy.Precision": "policy.precision",
    "policy.optimzer": "policy.optimizer",
    "policy.lora": "policy.dtensor_cfg.lora_cfg",
    "policy.max_grad_nrom": "policy.max_grad_norm",
    "policy.generation.topk": "policy.generation.top_k",
    "policy.generation.temprature": "policy.generation.temperature",
    "policy.dtensor_cfg.tensor_parallel": "policy.dtensor_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.tensor_paralel_size": "policy.dtensor_cfg.tensor_parallel_size",
    "checkpointing.save_perod": "checkpointing.save_period",
    "data.train.datset_name": "data.train.dataset_name",
    "data.dataset_name": "data.train.dataset_name",
    "cluster.gpu_per_node": "cluster.gpus_per_node",
    "val_period": "grpo.val_period",
    "polcy": "policy",
    "tokenizer": "policy.tokenizer",
}
NOTHING = [  # keys of recipes that Strop does not have, and one of no library
    "policy.generation.expose_http_server",
    "policy.generation.vllm_cfg.reasoning_parser_plugin",
    "policy.generation.real_quant",
    "policy.generation.vllm_cfg.is_mx",
    "policy.generation.bad_words",
    "policy.fuse_loss",
    "policy.sequence_packing.algorithm",
    "data.train.data_files",
    "data.train.max_samples",
    "checkpointing.ft_save_period",
    "checkpointing.ft_keep_latest_k",
    "grpo.use_best_at_k",
    "grpo.combined_training_weight",
    "loss_fn.xtoken_loss",
    "cluster.segment_size",
    "logger.clearml",
    "async_rl",
    "xyzzy",
]


@pytest.mark.parametrize(("key", "meant"), MEANT.items())
def test_a_wrong_key_is_answered_with_the_one_that_was_meant(key: str, meant: str) -> None:
    assert find_nearest_keys(key.split("."), TRAINING_RUNS["grpo"])[:1] == (meant,)


@pytest.mark.parametrize("key", NOTHING)
def test_a_key_that_is_like_none_is_answered_with_no_hint_but_the_keys_of_its_section(key: str) -> None:
    path, root = key.split("."), TRAINING_RUNS["grpo"]
    section = ".".join(path[:-1])
    assert find_nearest_keys(path, root) == ()
    assert suggest_keys(path, root).startswith(f"The keys of {section} are " if section else "The sections are algorithm, ")


def test_the_keys_of_a_large_section_are_cut_short() -> None:
    said = suggest_keys(("grpo", "xyzzy"), TRAINING_RUNS["grpo"])
    assert "more, which `strop config` lists" in said and len(said) < 500


@pytest.mark.parametrize(
    ("name", "other", "close"),
    [
        ("top_k", "topk", True),
        ("weigth", "weight", True),
        ("top_k", "top_p", False),
        ("val_period", "save_period", False),
        ("min_ratio", "max_ratio", False),
        ("ft_save_period", "save_period", False),
    ],
)
def test_names_are_compared_word_by_word(name: str, other: str, close: bool) -> None:
    assert is_misspelling(name, other) is close
