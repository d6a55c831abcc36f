"""Kinds of runs, those of core and those that extensions declare."""

from __future__ import annotations

import re

import pytest

from strop.algorithms.base import Algorithm
from strop.algorithms.kl import Kl
from strop.config import TRAINING_RUNS, load_config
from strop.extensions.distillation.distillation import TopKDistillation
from strop.extensions.policy_gradients.baselines import ReinforcePP
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.supervised import SFT
from strop.monitoring.console_columns import StepTable
from strop.runs.run_algorithm import make_run_algorithm


@pytest.mark.parametrize(
    ("section", "metrics", "labels"),
    [
        ("grpo", ["train/reward", "train/loss", "validation/accuracy", "train/groups_without_signal", "train/truncated"],
         ["reward", "accuracy", "no signal", "truncated"]),
        ("grpo", ["train/reward", "validation/accuracy", "validation/score"], ["reward", "val reward"]),
        ("dpo", ["train/loss", "train/accuracy", "train/margin", "train/rewards_chosen_mean", "train/rewards_rejected_mean"],
         ["loss", "accuracy", "margin", "chosen", "rejected"]),
        ("rm", ["train/loss", "train/accuracy", "train/margin", "validation/accuracy"], ["loss", "accuracy", "margin", "val acc"]),
        ("sft", ["train/loss", "train/tokens_trained", "validation/loss"], ["loss", "val loss", "tokens"]),
        ("distillation", ["train/reward", "train/teacher_kl", "train/entropy"], ["KL teacher", "entropy"]),
    ],
)  # fmt: skip
def test_each_kind_of_run_has_columns_of_its_own(section: str, metrics: list[str], labels: list[str]) -> None:
    table = StepTable(TRAINING_RUNS[section].console, 10)
    header, _ = table.format_rows(1, dict.fromkeys(metrics, 0.5))
    assert re.split(r"  +", header.strip()) == labels


@pytest.mark.parametrize(
    ("section", "overrides", "wanted"),
    [
        ("distillation", "", TopKDistillation(kl_type="mixed", outside="renormalise")),
        ("distillation", "distillation.use_dynamic_sampling=false", TopKDistillation(kl_type="mixed", outside="renormalise")),
        (
            "grpo",
            "algorithm.name=reinforce_pp loss_fn.reference_policy_kl_penalty=0.1",
            ReinforcePP(kl=Kl(weight=0.1, estimator="k1", place="token_reward")),
        ),
        ("sft", "", SFT()),
        ("sft", "algorithm.kwargs.dft=true", SFT(dft=True)),
        ("dpo", "dpo.sft_average_log_probs=true", DPO(sft_aggregation="sequence_mean")),
    ],
    ids=str,
)
def test_flat_keys_are_the_fields_of_the_algorithm(section: str, overrides: str, wanted: Algorithm) -> None:
    base = ["policy.model_name=m", f"{section}.val_period=0"]
    sampled = ["data.train.env_name=arithmetic", "env.arithmetic={}"]
    base += sampled if section in ("grpo", "distillation") else ["data.train.dataset_name=squad"]
    base += ["teacher.model_name=t"] if section == "distillation" else []
    assert make_run_algorithm(load_config(None, [*base, *overrides.split()], root=TRAINING_RUNS[section]).config) == wanted
