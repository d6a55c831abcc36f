"""Whole runs on recorded data: what ``strop sft``, ``dpo`` and ``rm`` leave behind, how they end, that they can die anywhere."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loop.killing import HalfALine, Kill
from loop.kinds import (
    SUMS,
    assert_same_run,
    conversation,
    preference,
    train,
    train_to_end,
    write_rows,
)
from loop.runs import metrics_of, repeatable, strop
from strop.types import assistant, user
from support.chat_templates import QWEN3
from support.sweep import sweep

pytestmark = pytest.mark.slow

LORA: Mapping[str, Any] = {
    "policy.dtensor_cfg.lora_cfg.enabled": True,
    "policy.dtensor_cfg.lora_cfg.dim": 4,
    "policy.optimizer.kwargs.lr": 0.02,
}
KTO: Mapping[str, Any] = {"algorithm.name": "kto"}


def steps(folder: Path) -> list[int]:
    """Of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "results").glob("step_*"))


def weights(folder: Path, step: int = 6) -> Path:
    return folder / "results" / f"step_{step}" / "policy" / "weights"


# --- what a run leaves behind --------------------------------------------------------------------------------------------------------

RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sft": ("sft", {}),
    "sft with adapters": ("sft", LORA),
    "dpo": ("dpo", {"dpo.sft_loss_weight": 0.1}),
    "dpo with adapters": ("dpo", LORA),
    "kto": ("dpo", KTO),
    "rm": ("rm", {"rm.use_margin": True, "rm.centering": 0.01}),
    "rm with adapters": ("rm", LORA),
}
MEASURED = {"sft": {"nll"}, "dpo": {"accuracy", "margin", "sft_loss"}, "kto": {"reference_point"}, "rm": {"accuracy", "margin"}}


@pytest.mark.parametrize("name", sweep(RUNS, "dpo"))
def test_a_run_of_every_kind_leaves_metrics_weights_and_its_configuration(name: str, tiny: Path, tmp_path: Path) -> None:
    section, changes = RUNS[name]
    said = train_to_end(section, tiny, tmp_path, **{**changes, f"{section}.val_at_start": True})
    logged = metrics_of(tmp_path / "logs")
    assert list(logged) == [0, 1, 2, 3, 4, 5, 6]
    assert all(tag.startswith("validation/") for tag in logged[0])
    wanted = MEASURED.get(name, set()) | {"loss"}
    for step in range(1, 7):
        assert {f"{part}/{tag}" for part in ("train", "validation") for tag in wanted} <= logged[step].keys()
        assert {"train/grad_norm", "train/lr", "train/examples", "performance/tokens_per_sec"} <= logged[step].keys()
        assert not any(
            "reward_std" in tag or ("generation" in tag.split("/")[-1] and "train/" in tag)
            for tag in logged[step]
            if "timing" not in tag
        )
        assert logged[step]["validation/examples"] == 8
    assert len({line["validation/loss"] for line in logged.values()}) == 7, "every step changes what is measured"
    assert "done after step 6; metrics in logs" in said and "Traceback" not in said
    again = strop(section, "--config", "logs/config.yaml", "--dry-run", "-v", folder=tmp_path)
    assert again.code == 0 and again.out.startswith((tmp_path / "logs" / "config.yaml").read_text())
    best = min((2, 4, 6), key=lambda step: logged[step]["validation/loss"])
    assert steps(tmp_path) == sorted({best, 6}), "the best by validation/loss, and the newest"


@pytest.mark.exhaustive
def test_what_sft_trained_loads_in_transformers_and_says_what_it_was_taught(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    changes = {
        "sft.max_num_steps": 60,
        "policy.optimizer.kwargs.lr": 0.01,
        "data.train.size": 8,
        "data.validation.dataset_name": ...,
    }
    seldom = {"sft.val_period": 0, "checkpointing.save_period": 60}
    train_to_end("sft", tiny, tmp_path, **changes, **seldom, **{"policy.train_global_batch_size": 8})
    model = AutoModelForCausalLM.from_pretrained(weights(tmp_path, 60)).eval()
    tokenizer = AutoTokenizer.from_pretrained(weights(tmp_path, 60))
    for a, b in SUMS[1:4]:
        asked = [{"role": "user", "content": f"{a}+{b}="}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        said = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert tokenizer.decode(said) == f"{a + b}<|im_end|>"


@pytest.mark.exhaustive
def test_talks_whose_turns_the_template_rewrites_train_alike_however_they_are_cut(tiny: Path, tmp_path: Path) -> None:
    """The template adds an empty thought to the last reply alone, so that most of these examples are several sequences."""
    said = ["19", "yes", "2", "no"]
    talks = [
        [message for turn in range(1 + row % 4) for message in (user(f"{row}+{turn}="), assistant(said[turn]))]
        for row in range(16)
    ]
    rows = [{"messages": [message.as_dict() for message in talk]} for talk in talks]
    cuts: list[Mapping[str, Any]] = [
        {"train_mb_tokens": 4096},
        {"train_mb_tokens": 401, "prefix_sharing": False},
        {"enabled": False},
    ]
    losses = []
    for number, cut in enumerate(cuts):
        folder = tmp_path / str(number)
        write_rows(folder / "conversations.jsonl", rows)
        write_rows(folder / "conversations_held_out.jsonl", rows[:8])
        packing = {f"policy.sequence_packing.{key}": value for key, value in cut.items()}
        template = {"policy.tokenizer.chat_template": QWEN3.template, "policy.max_total_sequence_length": 400}
        train_to_end("sft", tiny, folder, **template, **packing)
        logged = metrics_of(folder / "logs")
        assert all(logged[step]["train/groups_dropped_for_errors"] == 0 for step in range(1, 7))
        losses.append([logged[step]["train/loss"] for step in range(1, 7)])
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_a_reward_model_loads_as_a_sequence_classifier_and_prefers_what_was_chosen(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    changes = {
        "rm.max_num_steps": 40,
        "rm.val_period": 0,
        "checkpointing.save_period": 40,
        "data.validation.dataset_name": ...,
        "policy.train_global_batch_size": 16,
    }
    train_to_end("rm", tiny, tmp_path, **changes)
    model = AutoModelForSequenceClassification.from_pretrained(weights(tmp_path, 40)).eval()
    assert model.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(weights(tmp_path, 40))
    pairs = [preference(*pair) for pair in SUMS[:16]]
    said = [[str(pair[side]) for pair in pairs] for side in ("chosen", "rejected")]
    scores = [_scores(model, tokenizer, [str(pair["prompt"]) for pair in pairs], answers) for answers in said]
    assert bool((scores[0] > scores[1]).all())


def _scores(model: Any, tokenizer: Any, prompts: list[str], answers: list[str]) -> torch.Tensor:
    """Of whole conversations, padded, as Transformers scores them; each ends with the token that ends a turn."""
    conversations = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    texts = [tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n") for messages in conversations]
    tokenizer.padding_side = "right"
    with torch.no_grad():
        return model(**tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)).logits[:, 0]


@pytest.mark.exhaustive
def test_a_reference_computed_once_gives_the_metrics_of_one_that_is_asked_at_each_step(tiny: Path, tmp_path: Path) -> None:
    changes = {"dpo.max_num_epochs": 2, "dpo.max_num_steps": -1, "dpo.val_at_start": True}
    for name, once in (("once", True), ("each", False)):
        said = train_to_end("dpo", tiny, tmp_path / name, **changes, **{"dpo.precompute_reference": once})
        assert ("computed once" in said) is once
    assert (tmp_path / "once" / "logs" / "reference_logprobs.safetensors").exists()
    once, each = (repeatable(metrics_of(tmp_path / name / "logs")) for name in ("once", "each"))
    assert once.keys() == each.keys() and len(each) == 9
    for step, line in each.items():
        assert once[step] == pytest.approx(line, rel=1e-4, abs=1e-6)
    assert each[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert each[0]["validation/loss"] == pytest.approx(math.log(2), abs=1e-5)


# --- how a run ends ------------------------------------------------------------------------------------------------------------------


def test_epochs_end_a_run_without_a_last_step(tiny: Path, tmp_path: Path) -> None:
    """Sixteen examples by threes: in two passes ten steps and two left over, which are not trained on and are said."""
    changes = {"sft.max_num_steps": -1, "sft.max_num_epochs": 2, "policy.train_global_batch_size": 3, "sft.val_at_end": True}
    said = train_to_end("sft", tiny, tmp_path, **changes, **{"sft.val_period": 0})
    logged = metrics_of(tmp_path / "logs")
    assert list(logged) == list(range(1, 11))
    assert (
        "sft.max_num_epochs ended the run after step 10: all tasks are used; the 2 left over are too few for another step" in said
    )
    assert [step for step, line in logged.items() if "validation/loss" in line] == [10]
    assert steps(tmp_path)[-1] == 10, "what was trained is saved"


def test_a_run_stops_when_its_loss_no_longer_falls_and_stays_stopped(tiny: Path, tmp_path: Path) -> None:
    """A step so large that nothing is learned after the first validations."""
    changes = {
        "sft.stop_at_validation_metric": "loss",
        "sft.stop_at_validation_higher_is_better": False,
        "sft.stop_at_validation_patience": 2,
        "sft.max_num_steps": 40,
        "policy.optimizer.kwargs.lr": 0.3,
        "policy.max_grad_norm": None,
    }
    said = train_to_end("sft", tiny, tmp_path, **changes)
    logged = metrics_of(tmp_path / "logs")
    losses = [line["validation/loss"] for line in logged.values()]
    assert len(losses) < 40 and min(losses[:-2]) <= min(losses[-2:])
    assert "has not been better than" in said and f"done after step {len(losses)}" in said
    assert steps(tmp_path)[-1] == len(losses), "the last step is saved, whatever the period"
    again = train_to_end("sft", tiny, tmp_path, **changes)
    assert f"finished at step {len(losses)} of 40 on " in again and "sft.stop_at_validation_metric=null" in again
    assert metrics_of(tmp_path / "logs") == logged


# --- killed and started again ----------------------------------------------------------------------------------------------------------

KILLED: Mapping[str, tuple[str, Mapping[str, Any], list[Any]]] = {
    "sft": (
        "sft",
        {},
        [
            Kill("at a file of the checkpoint", 1),
            Kill("at a save", 1, "after"),
            Kill("at the optimizer step", 2, "after"),
            Kill("at the log", 2),
            Kill("at a rename", 1),
        ],
    ),
    "dpo": ("dpo", {}, [Kill("at the optimizer step", 3), HalfALine(2), Kill("at pruning", 1)]),
    "dpo with a reference computed once": (
        "dpo",
        {"dpo.precompute_reference": True},
        [Kill("at a file's replacement", 1), Kill("at the optimizer step", 3), Kill("at a save", 1, "after")],
    ),
    "kto with adapters and an average": (
        "dpo",
        {**KTO, **LORA, "policy.ema.enabled": True, "policy.ema.decay": 0.5},
        [Kill("at the optimizer step", 4), Kill("at the log", 1)],
    ),
    "rm": ("rm", {}, [Kill("at the optimizer step", 4), Kill("at a save", 2)]),
}


@pytest.mark.parametrize("name", sweep(KILLED, "dpo with a reference computed once"))
def test_a_killed_run_ends_as_if_nothing_had_happened(name: str, tiny: Path, tmp_path: Path) -> None:
    section, changes, kills = KILLED[name]
    changes = {**changes, f"{section}.val_at_start": True, "checkpointing.keep_top_k": None}
    train_to_end(section, tiny, tmp_path / "whole", **changes)
    for kill in kills:
        outcome = train(section, tiny, tmp_path / "parts", before=kill, **changes)
        assert outcome.code == -signal.SIGKILL, f"it did not come to {kill}: {outcome}"
    train_to_end(section, tiny, tmp_path / "parts", **changes)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


# --- mistakes --------------------------------------------------------------------------------------------------------------------------


LONG = {"messages": [{"role": "user", "content": "9" * 60}, {"role": "assistant", "content": "9"}]}


def test_examples_that_are_too_long_are_dropped_and_counted(tiny: Path, tmp_path: Path) -> None:
    rows = [conversation(*pair) for pair in SUMS[:8]]
    write_rows(tmp_path / "rows.jsonl", [*rows, LONG, LONG])
    write_rows(tmp_path / "held_out.jsonl", [LONG, *rows[:3]])
    changes = {"data.train.dataset_name": "rows.jsonl", "data.validation.dataset_name": "held_out.jsonl", "sft.max_num_epochs": 2}
    said = train_to_end("sft", tiny, tmp_path, **changes)
    logged = metrics_of(tmp_path / "logs")
    assert sum(line["train/groups_dropped_for_errors"] for line in logged.values()) == 4
    assert all(line["train/examples"] == 4 for line in logged.values()) and len(logged) == 4
    assert all(line["validation/examples"] == 3 for line in logged.values())
    assert "1 examples of the validation data are unusable (most likely too long) and are left out" in said
