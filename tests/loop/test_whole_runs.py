"""Whole runs on the tiny model: what they leave behind, and what can be done with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.runs import grpo, metrics_of, strop
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytestmark = pytest.mark.slow


# The tags of the interface that every GRPO run with a reference and validation has in metrics.jsonl.
TAGS = [
    "train/reward",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/kl_penalty",
    "train/token_mult_prob_error",
    "train/gen_kl_error",
    "train/mean_gen_tokens_per_sample",
    "validation/accuracy",
    "timing/train/total_step_time",
    "timing/train/generation",
    "timing/train/policy_training",
    "performance/tokens_per_sec",
]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory) -> Path:
    """Trackers on, two epochs of two mini-batches, a reference, plain console."""
    folder = tmp_path_factory.mktemp("run")
    changes = {
        "grpo.update_epochs": 2,
        "policy.train_global_batch_size": 16,
        "loss_fn.reference_policy_kl_penalty": 0.01,
        "grpo.max_num_steps": 4,
        "grpo.val_at_start": True,
        "grpo.val_num_generations_per_prompt": 2,
        "logger.console": "plain",
        "logger.num_val_samples_to_print": 2,
    }
    outcome = grpo(tiny, folder, **changes)
    assert outcome.code == 0, outcome.err
    (folder / "console").write_text(outcome.out + outcome.err)
    return folder


def test_every_step_has_the_metrics_of_the_interface(run):
    metrics = metrics_of(run / "logs")
    assert list(metrics) == [0, 1, 2, 3, 4]
    for step in range(1, 5):
        assert not set(TAGS) - metrics[step].keys()
        assert all(isinstance(value, float) for value in metrics[step].values())
    assert all(name.startswith("validation/") for name in metrics[0])
    assert {"validation/avg@2", "validation/pass@1", "validation/pass@2", "validation/cons@2"} <= metrics[0].keys()


def test_sampler_and_learner_agree(run):
    for step, line in metrics_of(run / "logs").items():
        if step:
            assert 1 <= line["train/token_mult_prob_error"] < 1.0001 and abs(line["train/gen_kl_error"]) < 1e-8


def test_every_rollout_is_stored_with_what_both_networks_thought_of_it(run):
    records = list(RolloutStore(run / "logs").read_all())
    assert len(records) == 4 * 4 * 8
    for record in records:
        assert record.learner_logprobs == pytest.approx(record.sampler_logprobs, abs=1e-4)
        assert "<|im_start|>user" in record.prompt and len(record.tokens) == len(record.versions) == len(record.sampled)
        assert set(record.versions) == {record.step - 1} and record.rewards.keys() == {"correct"}


def test_the_plain_console_says_what_runs_and_one_line_a_step(run):
    text = (run / "console").read_text()
    assert "policy      " in text and "tasks       arithmetic" in text
    lines = [line[16:] for line in text.splitlines()]
    (header,) = [line.split() for line in lines if line.split()[:4] == ["reward", "accuracy", "no", "signal"]]
    for step in range(1, 5):
        (row,) = [line.split("  (")[0] for line in lines if line.startswith(f"step {step}/4 ")]
        assert len(row.split()) == len(header), "step N/M is two words, and so are two labels"
    assert "(accuracy " in text and "done after step 4; metrics in logs" in text
    assert "strop eval results/step_4\n" in text
    assert "Traceback" not in text and "Writing model shards" not in text


def test_the_configuration_is_saved_with_the_run_and_loads_again(run):
    outcome = strop("grpo", "--config", "logs/config.yaml", "--dry-run", "-v", folder=run)
    assert outcome.code == 0 and outcome.out.startswith((run / "logs" / "config.yaml").read_text())
