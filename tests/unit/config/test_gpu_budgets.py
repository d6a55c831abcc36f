"""Micro-batches whose size is left to the device: what a CPU and a GPU take, and what a dry run says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.config import load_config
from strop.config.load.device_defaults import describe_micro_batches, with_gpu_budgets
from strop.config.schema.run_config import TRAINING_RUNS
from strop.data.packing_config import CPU_TOKENS, GPU_TOKENS
from support.micro_batches import assert_micro_batch_is_named

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
EXAMPLES = {"quickstart": "grpo", "grpo_math_1B": "grpo", "ppo_math_1B": "ppo", "sft": "sft", "distillation_math": "distillation"}
ARITHMETIC = ("policy.model_name=m", "env.arithmetic={}", "data.train.env_name=arithmetic")
PACKING = "policy.sequence_packing"


def load(*words: str, **options: Any) -> Any:
    overrides = [*ARITHMETIC, "grpo.val_period=0", "checkpointing.metric_name=null", *words]
    return load_config(None, overrides, root=TRAINING_RUNS["grpo"], **options).config


@pytest.mark.extensions
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_names_its_micro_batch_on_a_gpu_and_why(name: str) -> None:
    """Those with keys of extensions too in tests/project/test_example_configs.py."""
    config = load_config(CONFIGS / f"{name}.yaml", root=TRAINING_RUNS[EXAMPLES[name]], check=False).config
    assert_micro_batch_is_named(config)


def test_a_budget_that_is_set_is_that_of_every_device() -> None:
    for words, tokens in (
        (["policy.train_micro_batch_size=3"], 1536),
        ([f"{PACKING}.train_mb_tokens=5000"], 5000),
        ([f"{PACKING}.train_mb_tokens=5000", "policy.train_micro_batch_size=3"], 5000),
    ):
        config = load(*words)
        assert config.policy.train_tokens == with_gpu_budgets(config).policy.train_tokens == tokens
        assert f"at most {tokens} tokens" in describe_micro_batches(config, on_gpu=True)
    scored = with_gpu_budgets(load("policy.logprob_batch_size=2")).policy
    assert (scored.train_tokens, scored.score_tokens) == ("auto", 1024)


@pytest.mark.parametrize("length", [100, 512, 2048, 40_000])
def test_a_micro_batch_holds_the_longest_sequence_on_every_device(length: int) -> None:
    config = load(f"policy.max_total_sequence_length={length}", f"{PACKING}.enabled=true")
    assert config.policy.train_tokens == config.policy.score_tokens == max(CPU_TOKENS, length)
    on_gpu = with_gpu_budgets(config).policy
    assert on_gpu.train_tokens == "auto" and on_gpu.score_tokens == max(GPU_TOKENS, length)
    assert with_gpu_budgets(with_gpu_budgets(config)) == with_gpu_budgets(config)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["policy.deterministic=true"], "policy.deterministic cuts every run alike"),
        (["cluster.gpus_per_node=2", "policy.dtensor_cfg.pipeline_parallel_size=2"], "with pipeline stages"),
        (["policy.generation.backend=vllm", "grpo.async_grpo.enabled=true"], "never sleeps"),
    ],
)
def test_where_memory_cannot_be_measured_a_gpu_takes_a_number_and_says_why(words: list[str], reason: str) -> None:
    config = load(*words, check=False)
    assert with_gpu_budgets(config).policy.train_tokens == GPU_TOKENS
    assert f"at most {GPU_TOKENS} tokens, as " in (said := describe_micro_batches(config, on_gpu=True)) and reason in said


@pytest.mark.parametrize("words", [["policy.generation.backend=vllm"], ["cluster.gpus_per_node=2"]])
def test_a_budget_is_measured_beside_engines_that_sleep_while_the_learner_trains(words: list[str]) -> None:
    config = load(*words, f"{PACKING}.train_mb_tokens=auto", "policy.generation.colocated.enabled=true")
    assert "measured when the engine first sleeps" in describe_micro_batches(config, on_gpu=True)
    assert with_gpu_budgets(load(*words)).policy.train_tokens == "auto"
