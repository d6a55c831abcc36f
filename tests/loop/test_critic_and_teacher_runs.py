"""Whole runs with a second model: ``strop ppo`` with its critic, ``strop distillation`` with its teachers. Adapters too."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.killing import HalfALine, Kill
from loop.kinds import assert_same_run, refusal_message, sampling_config, train, train_to_end
from loop.runs import metrics_of
from loop.tiny import build_tiny, tiny_model, tiny_tokenizer
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.sweep import sweep

pytestmark = pytest.mark.slow

LORA: Mapping[str, Any] = {"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 4}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("teacher") / "tiny", seed=1)


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same size whose tokenizer numbers its tokens otherwise."""
    folder = tmp_path_factory.mktemp("other") / "tiny"
    tokenizer = tiny_tokenizer()
    tiny_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(content))
    return folder


def policy_weights(folder: Path, step: int = 6) -> Path:
    return folder / "results" / f"step_{step}" / "policy" / "weights"


# --- a critic ------------------------------------------------------------------------------------------------------------------------

PPO: Mapping[str, Any] = {
    "ppo.ppo_epochs": 2,
    "policy.train_global_batch_size": 16,
    "ppo.policy_training_start_step": 1,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k1",
    "loss_fn.use_kl_in_reward": True,
}
CRITICS: Mapping[str, Mapping[str, Any]] = {
    "of its own": {},
    "a head on the policy": {"value.head_only": True},
    "with adapters": {**LORA, "value.dtensor_cfg.lora_cfg.enabled": True},
    "asynchronous": {"ppo.async_ppo.enabled": True, "ppo.async_ppo.max_trajectory_age_steps": 2},
}
OF_A_CRITIC = ("value_loss", "value_grad_norm", "value_lr", "values_mean", "returns_mean", "explained_variance")


@pytest.mark.parametrize("name", sweep(CRITICS, "a head on the policy", "asynchronous"))
def test_a_run_with_a_critic_leaves_the_metrics_and_weights_of_both(name: str, tiny: Path, tmp_path: Path) -> None:
    said = train_to_end("ppo", tiny, tmp_path, **{**PPO, **CRITICS[name], "ppo.val_at_start": True})
    logged = metrics_of(tmp_path / "logs")
    assert list(logged) == [0, 1, 2, 3, 4, 5, 6] and "done after step 6" in said
    for step in range(1, 7):
        assert {f"train/{tag}" for tag in OF_A_CRITIC} <= logged[step].keys()
        assert ("train/grad_norm" in logged[step]) == (step > 1), "the critic warms up alone for one step"
        assert {"validation/accuracy", "train/reward"} <= logged[step].keys()
        assert math.isfinite(logged[step]["train/value_loss"])
    assert "train/kl_penalty" in logged[6]
    saved = tmp_path / "results" / "step_6"
    assert (saved / "value" / "optimizer.pt").exists() and (saved / "policy" / "optimizer.pt").exists()
    assert all(math.isfinite(record.advantage) for record in RolloutStore(tmp_path / "logs").read_all())


@pytest.mark.exhaustive
def test_a_critic_of_its_own_is_saved_as_a_sequence_classifier_and_goes_on_from_there(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    train_to_end("ppo", tiny, tmp_path, **PPO)
    critic = tmp_path / "results" / "step_6" / "value" / "weights"
    model = AutoModelForSequenceClassification.from_pretrained(critic)
    assert model.config.num_labels == 1 and bool(model.score.weight.abs().max() > 0)
    changes = {"value.model_name": str(critic), "value.tokenizer.name": str(tiny), "ppo.max_num_steps": 1}
    train_to_end("ppo", tiny, tmp_path / "next", **{**PPO, **changes})
    first, last = metrics_of(tmp_path / "logs")[1], metrics_of(tmp_path / "next" / "logs")[1]
    assert first["train/values_mean"] == 0.0 != last["train/values_mean"]


@pytest.mark.exhaustive
def test_a_killed_run_with_a_critic_ends_as_if_nothing_had_happened(tiny: Path, tmp_path: Path) -> None:
    changes = {**PPO, "ppo.val_at_start": True, "checkpointing.keep_top_k": None}
    train_to_end("ppo", tiny, tmp_path / "whole", **changes)
    for kill in (Kill("at the optimizer step", 3), Kill("at a save", 1, "after"), Kill("at a rename", 1), HalfALine(3)):
        outcome = train("ppo", tiny, tmp_path / "parts", before=kill, **changes)
        assert outcome.code == -signal.SIGKILL, f"it did not come to {kill}: {outcome}"
    train_to_end("ppo", tiny, tmp_path / "parts", **changes)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


# --- a teacher -----------------------------------------------------------------------------------------------------------------------

TEACHERS: Mapping[str, Mapping[str, Any]] = {
    "by its likely tokens": {"loss_fn.kl_type": "forward", "distillation.topk_logits_k": 16},
    "by what it says of sampled tokens": {"algorithm.name": "distillation"},
    "which is the policy, shown the answer": {
        "teacher.model_name": "self",
        "teacher.demonstration": "Write {answer}7777.",
        "distillation.topk_logits_k": 16,
        "policy.max_total_sequence_length": 96,
    },
    "which is the policy's average": {
        "algorithm.name": "distillation",
        "teacher.model_name": "self",
        "teacher.self_weights": "ema",
        "teacher.demonstration": "7777",
        "policy.ema.enabled": True,
        "policy.ema.decay": 0.5,
        "policy.max_total_sequence_length": 96,
    },
    "of a student with adapters": {**LORA, "distillation.topk_logits_k": 16},
    "asynchronous": {"algorithm.name": "distillation", "distillation.async_distillation.enabled": True},
}


@pytest.mark.parametrize("name", sweep(TEACHERS, "which is the policy's average"))
def test_a_run_with_a_teacher_says_how_far_the_student_is_from_it(name: str, tiny: Path, teacher: Path, tmp_path: Path) -> None:
    said = train_to_end("distillation", tiny, tmp_path, **{"teacher.model_name": str(teacher), **TEACHERS[name]})
    logged = metrics_of(tmp_path / "logs")
    assert list(logged) == [1, 2, 3, 4, 5, 6] and "done after step 6" in said
    distances = {"train/teacher_kl"} if TEACHERS[name].get("algorithm.name") else {"train/kl_forward", "train/kl_reverse"}
    for line in logged.values():
        assert distances | {"train/loss", "train/grad_norm", "train/reward", "validation/accuracy"} <= line.keys()
        assert line["train/grad_norm"] > 0 and all(math.isfinite(line[distance]) for distance in distances)
    assert (policy_weights(tmp_path)).is_dir()


def test_two_teachers_each_teach_their_own_environment(tiny: Path, teacher: Path, tmp_path: Path) -> None:
    """One of them is the student: from it there is nothing to learn."""
    several = {
        "data.train": [{"env_name": "graded"}, {"env_name": "other"}],
        "data.train.env_name": ...,
        "env.other.type": sampling_config("distillation", tiny)["env.graded.type"],
        "teacher.environments": ["graded"],
        "teachers.far.model_name": str(teacher),
        "teachers.far.environments": ["other"],
        "algorithm.name": "distillation",
        "distillation.max_num_steps": 1,
    }
    train_to_end("distillation", tiny, tmp_path, **several)
    credit: dict[str, list[float]] = {}
    for record in RolloutStore(tmp_path / "logs").read_all():
        credit.setdefault(record.environment, []).append(abs(record.advantage))
    assert len(credit["graded"]) == len(credit["other"]) == 8
    assert max(credit["graded"]) < 1e-4 and sum(credit["other"]) / 8 > 0.1


def test_a_teacher_of_another_family_is_refused(tiny: Path, other_tokens: Path, tmp_path: Path) -> None:
    said = refusal_message(train("distillation", tiny, tmp_path, **{"teacher.model_name": str(other_tokens)}))
    assert "the tokenizers of student and teacher differ in 2 tokens" in said


# --- adapters, and the scripts ---------------------------------------------------------------------------------------------------------
