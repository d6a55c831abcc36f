"""Each evaluation set of mathematics and multiple choice by name, from the command line to the number, on local files of its schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from strop import cli
from strop.extensions.math.math_sets import CHOICE_SETS, MATH_EVALUATION_SETS, REPORTED, REPORTED_CHOICES
from strop.generation.base import Completion
from strop.generation.torch.torch_engine import TorchEngine
from strop.sampling import Sampling
from support.evaluation_answers import SOLUTIONS

NAMES = [*REPORTED, *REPORTED_CHOICES]
TOGETHER = ["AIME2025", "AMC", "HMMT_Feb_2025", "OlympiadBench", "MinervaMath", "gsm8k", "mmlu", "mmlu_pro", "gpqa_diamond"]


def write_solution(prompt: str, solution: str) -> str:
    """Write as the prompt asks: a box, or the letter of an option."""
    if "of the form Answer:" in prompt:
        return f"I think.\nAnswer: {solution}"
    if "'Answer: $LETTER'" not in prompt:
        return f"I think that it is $\\boxed{{{solution}}}$."
    (letter,) = [line[0] for line in prompt.replace("<|im_end|>", "").splitlines() if line[1:] == f") {solution}"]
    return f"I think of A first.\n\n**Answer: {letter}**"


def answer_by_script(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, turns: Sequence[int]) -> list[str]:
    """Make the engine write solutions: of the samples of a task, the first has ``turns[0]`` (0: right, 1: wrong), and so on."""
    asked: list[str] = []

    async def generate(self: Any, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        text = tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False)
        (question,) = [each for each in SOLUTIONS if each in text]
        turn = turns[asked.count(text) % len(turns)]
        asked.append(text)
        written = write_solution(text, SOLUTIONS[question][turn])
        tokens = [*tokenizer(written, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        length = len(tokens)
        return Completion(
            tokens=torch.tensor(tokens),
            logprobs=torch.zeros(length),
            versions=torch.zeros(length, dtype=torch.int32),
            text=written,
            stopped=True,
        )

    monkeypatch.setattr(TorchEngine, "generate", generate)
    return asked


def evaluate(model: Path, name: str, capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, Any]:
    options = ("generation.vllm_cfg.max_model_len=1024", "generation.temperature=1", *overrides)
    code = cli.main(["eval", str(model), f"data.dataset_name={name}", *options, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def check_samples(folder: Path) -> None:
    """Of the two samples of a task one is right and one is wrong, and both have a vote."""
    (stored,) = folder.rglob("step_*.json")
    for task in json.loads(stored.read_text())["tasks"]:
        right, wrong = sorted(task["samples"], key=lambda sample: -sample["accuracy"])
        assert (right["accuracy"], wrong["accuracy"], right["error"], wrong["error"]) == (1.0, 0.0, None, None), task
        assert None not in (right["answer"], wrong["answer"]) and right["answer"] != wrong["answer"], task


@pytest.mark.exhaustive
def test_sets_by_name_to_the_number(
    tiny_model_folder: Path,
    tokenizer: Any,
    local_hub: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = answer_by_script(monkeypatch, tokenizer, (0, 1))
    overrides = ("eval.num_tests_per_prompt=2", f"eval.save_path={tmp_path}")
    metrics = evaluate(tiny_model_folder, ",".join(TOGETHER), capsys, *overrides)["metrics"]
    assert metrics["errors"] == 0
    for name in TOGETHER:
        assert (metrics[f"{name}/accuracy"], metrics[f"{name}/pass@2"]) == (0.5, 1.0), name
        before, after = str({**REPORTED, **REPORTED_CHOICES}[name].prompt).split("{question}")
        assert any(before in each and after in each for each in asked)
    check_samples(tmp_path)


@pytest.mark.exhaustive
def test_each_set_by_name_to_the_number(
    tiny_model_folder: Path,
    tokenizer: Any,
    local_hub: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer_by_script(monkeypatch, tokenizer, (0, 1))
    for name in NAMES:
        overrides = ("eval.num_tests_per_prompt=2", f"eval.save_path={tmp_path / name}")
        metrics = evaluate(tiny_model_folder, name, capsys, *overrides)["metrics"]
        assert (metrics["accuracy"], metrics["pass@2"], metrics["errors"]) == (0.5, 1.0, 0.0), name
        check_samples(tmp_path / name)


def test_every_name_is_that_of_a_set_with_a_wording_and_a_grader() -> None:
    for name, entry in {**MATH_EVALUATION_SETS, **CHOICE_SETS}.items():
        assert entry.grader is not None, name
        assert (entry.prompt or "{question}").count("{question}") == 1, name
        assert (entry.choices is None) == (entry.grader.options["verifier"] != "strict_multichoice"), name
        assert entry.splits.choose("evaluation") == entry.splits.evaluation, name
