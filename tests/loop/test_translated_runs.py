"""A recipe for Megatron Core, run by the torch learner: the rate of each training step is the recipe's."""

from __future__ import annotations

import pytest

from loop.runs import grpo, metrics_of

pytestmark = pytest.mark.slow

MEGATRON = {
    "enabled": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "freeze_moe_router": True,
    "optimizer": {"optimizer": "adam", "lr": 0.004, "min_lr": 0.0, "clip_grad": 0.5, "adam_beta2": 0.95, "bf16": True},
    "scheduler": {"lr_decay_style": "cosine", "lr_decay_iters": 6, "lr_warmup_iters": 2, "lr_warmup_init": 0.001},
}


@pytest.mark.exhaustive
def test_a_recipe_for_megatron_core_has_its_warm_up_in_training_steps_of_four_optimizer_steps(tiny, tmp_path) -> None:
    settings = {
        "policy.backend": "torch",
        "policy.megatron_cfg": MEGATRON,
        "policy.dtensor_cfg.enabled": False,
        "policy.optimizer.kwargs.lr": ...,
        "policy.train_global_batch_size": 8,
        "grpo.val_period": 0,
        "checkpointing.metric_name": None,
    }
    outcome = grpo(tiny, tmp_path, **settings, **{"grpo.max_num_steps": 2})
    assert outcome.code == 0, outcome.err
    outcome = grpo(tiny, tmp_path, **settings, **{"grpo.max_num_steps": 5})
    assert outcome.code == 0, outcome.err
    rates = [line["train/lr"] for line in metrics_of(tmp_path / "logs").values()]
    assert rates == pytest.approx([0.001, 0.0025, 0.004, 0.002 * (1 + 2**-0.5), 0.002])
    saved = (tmp_path / "logs" / "config.yaml").read_text()
    assert "decay_vectors: false" in saved and "max_grad_norm: 0.5" in saved
