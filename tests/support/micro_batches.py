"""What a dry run says of the micro-batches of an example."""

from __future__ import annotations

from strop.config import TrainingRunConfig
from strop.config.load.device_defaults import describe_micro_batches, with_gpu_budgets
from strop.config.schema.run_config import list_trained_models
from strop.data.packing_config import GPU_TOKENS, LARGEST_TOKENS


def assert_micro_batch_is_named(config: TrainingRunConfig) -> None:
    """Assert that the micro-batch on a GPU is named with its reason, and holds the longest sequence."""
    said = describe_micro_batches(config, on_gpu=True)
    assert any(reason in said for reason in ("(default on a GPU)", "policy.train_micro_batch_size = ", ".train_mb_tokens"))
    if "default on a GPU" not in said:
        return
    assert said.removesuffix(" (default on a GPU)") in describe_micro_batches(config, on_gpu=False)
    for _, model in list_trained_models(with_gpu_budgets(config)):
        longest = model.max_total_sequence_length
        assert model.train_tokens == "auto" or model.train_tokens >= max(GPU_TOKENS, longest)
        assert model.score_tokens >= max(GPU_TOKENS, longest)
    measured = with_gpu_budgets(config).policy.train_tokens == "auto"
    assert f"at most {max(LARGEST_TOKENS if measured else GPU_TOKENS, config.policy.max_total_sequence_length)}" in said
