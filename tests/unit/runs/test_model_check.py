"""Sizes that do not fit: tokens beyond the embedding, sequences beyond the positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.config import TRAINING_RUNS, load_config
from strop.data.sources.source import DataSource
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.environments.registry import make_environment
from strop.models.chat_template import ChatTemplate
from strop.runs.dry_run.examined_models import find_size_problems
from strop.runs.model_check import check_model, note_empty_answers, note_turn_end
from strop.runs.models import TokenizerBundle
from strop.sampling import Sampling
from support.models import build
from support.tokenizer import CHAT_TEMPLATE, build_tokenizer


def save(folder: Path, tokenizer: Any, family: str = "llama", **config: Any) -> str:
    build(family).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return str(folder)


def find(model: str, **settings: Any) -> tuple[list[str], list[str]]:
    values = {"policy": {"model_name": model, **settings}, "data": {"train": {"dataset_name": "rows.jsonl"}}}
    errors, warnings = find_size_problems(load_config(None, root=TRAINING_RUNS["sft"], values=values, check=False).config)
    return list(map(str, errors)), list(map(str, warnings))


@pytest.mark.extensions
def test_sizes_that_fit_are_no_finding(tiny_model_folder: Path) -> None:
    assert find(str(tiny_model_folder), max_total_sequence_length=256) == ([], [])


@pytest.mark.extensions
@pytest.mark.parametrize("special", [True, False])
def test_tokens_that_a_prompt_may_have_and_the_embedding_has_not_are_refused(special: bool, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|turn|>", "<|user|>"], special_tokens=special)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_start|>", "<|turn|>")
    (error,), warnings = find(save(tmp_path / "m", tokenizer), max_total_sequence_length=256)
    assert "2 tokens beyond the embedding" in error or "1 tokens beyond" in error
    assert "'<|turn|>' (307)" in error and "vocab_size = 307" in error and "resize_token_embeddings" in error
    assert error.startswith("policy.model_name") and not warnings


@pytest.mark.extensions
def test_a_stop_token_beyond_the_embedding_is_refused_with_the_tokenizers_key(tiny_model_folder: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|done|>"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (error,), _ = find(str(tiny_model_folder), tokenizer={"name": str(tmp_path / "tokenizer")}, max_total_sequence_length=256)
    assert error.startswith("policy.tokenizer.name") and "'<|done|>' (307)" in error


@pytest.mark.extensions
def test_special_tokens_that_no_template_writes_are_a_warning(tmp_path: Path) -> None:
    """Gemma 3's text models have one: the tokenizer of the family is one token longer than their embedding."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    errors, (warning,) = find(save(tmp_path / "m", tokenizer), max_total_sequence_length=256)
    assert not errors and "'<image_soft_token>' (307)" in warning


@pytest.mark.extensions
def test_a_sequence_beyond_learned_positions_is_refused_and_beyond_rotated_ones_said(tmp_path: Path) -> None:
    (error,), warnings = find(save(tmp_path / "gpt2", build_tokenizer(), "gpt2"), max_total_sequence_length=300)
    assert error.startswith("policy.max_total_sequence_length: found 300") and "256 learned positions" in error and not warnings
    errors, (warning,) = find(save(tmp_path / "llama", build_tokenizer()), max_total_sequence_length=300)
    assert not errors and "max_position_embeddings" in warning and "256" in warning
    assert find(str(tmp_path / "llama"), max_total_sequence_length=300, hf_config_overrides={"max_position_embeddings": 512}) == (
        [],
        [],
    )


@pytest.mark.extensions
def test_a_run_from_python_compares_the_sizes_before_it_trains(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<|end|>"])
    model = save(tmp_path / "m", tokenizer)
    values = {"policy": {"model_name": model}, "data": {"train": {"dataset_name": "rows.jsonl"}}}
    config = load_config(None, root=TRAINING_RUNS["sft"], values=values, check=False).config
    with pytest.raises(ValueError, match="beyond the embedding"):
        check_model(config, TokenizerBundle(tokenizer, ChatTemplate(tokenizer), (2,)), print)


@pytest.mark.parametrize(
    ("end", "stops", "sampling", "said"),
    [
        ("<|im_start|>", (2,), Sampling(), ["ends a reply with '<|im_start|>'", "Set it to [3]", "'<|im_end|>'"]),
        ("<|im_end|>", (2,), Sampling(), []),
        ("<|im_start|>", (2,), Sampling(stop_token_ids=(3,)), []),
        ("<|im_start|>", (2,), Sampling(stop_strings=("<|im_start|>",)), []),
        ("", (), Sampling(), ["neither tokenizer nor model has a token that ends a reply"]),
    ],
)
def test_the_end_of_a_turn_that_is_no_stop_token_is_said(
    end: str, stops: tuple[int, ...], sampling: Sampling, said: list[str]
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}" + end + "\n{% endfor %}"
    )
    notes: list[str] = []
    note_turn_end(TokenizerBundle(tokenizer, ChatTemplate(tokenizer), stops), sampling, "policy.generation", notes.append)
    assert all(part in " ".join(notes) for part in said) and bool(notes) == bool(said)


@pytest.mark.parametrize(
    ("answers", "said"),
    [(["1", "", "3"], "empty in 1 of 3 tasks, first in rows-"), (["", " ", ""], "empty in 3 of 3 tasks"), (["1", "2", "0"], "")],
)
def test_an_empty_reference_is_said_at_the_start_with_its_row(answers: list[str], said: str) -> None:
    environment = make_environment("reward_function", {"reward": lambda task, rollout: float(task.answer in rollout.text)})
    tasks = environment.tasks(DataSource(rows=[{"problem": f"q{index}", "answer": each} for index, each in enumerate(answers)]))
    notes: list[str] = []
    note_empty_answers(Mixture((Component("mine", LocalEnvironment(environment), tasks),)), notes.append)
    assert said in " ".join(notes) and bool(notes) == bool(said)
