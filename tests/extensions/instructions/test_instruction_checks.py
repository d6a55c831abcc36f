"""IFEval's instructions against the verdicts of lm-eval, RLVR-IFeval's against a table, and hostile responses."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError
from strop.environments.compute_rewards import compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.rewards import RewardResult
from strop.extensions.instructions import instruction_following
from strop.extensions.instructions.instruction_checks import IFEVAL_CHECKS, PACKAGES, find_fault, score_instruction
from strop.extensions.instructions.instruction_following import (
    Instruction,
    InstructionFollowing,
    check_instructions,
    read_instructions,
    read_response,
)
from strop.extensions.instructions.rlvr_checks import RLVR_CHECKS, count_sentences, has_sentence_model
from strop.types import Rollout, Turn, assistant
from support.scripted_evaluation import evaluate_script

VERDICTS = [json.loads(line) for line in (Path(__file__).parents[2] / "fixtures/ifeval_verdicts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", IFEVAL_CHECKS)
def test_verdicts_are_those_of_lm_eval(name: str) -> None:
    package = PACKAGES.get(name)
    if package is not None:
        pytest.importorskip(package)
    if "sentences" in name and has_sentence_model():
        pytest.skip("the verdicts are of the list of abbreviations")
    rows = [row for row in VERDICTS if row[0] == name]
    assert len(rows) == 16 and {row[4] for row in rows} == {False, True}
    for _, options, response, strict, loose in rows:
        score = score_instruction(name, options, response)
        assert (score == 2.0, score >= 1.0) == (strict, loose), (options, response)


CONSTRAINTS = [  # name, options, a response that satisfies it, one that does not
    ("verify_keywords", {"keyword_list": ["cat", "mat"]}, "A CAT on a mat", "a cat"),
    ("verify_keyword_frequency", {"word": "cat", "N": 2}, "Cat, cat and cats", "cat"),
    ("validate_forbidden_words", {"forbidden_words": ["dog"]}, "a cat", "a Dogma"),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "banAna", "banana"),
    ("verify_paragraph_count", {"N": 2}, "one\n* * *\ntwo", "one\n* * *\n"),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "w " * 22, "w " * 23),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "one two", "one two three"),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "One. Two! Three?", "Mr. One"),
    ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 2}, "First.\n\nSo be it.", "So.\n\nNo."),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Text. P.S. More", "Text. P.S."),
    ("validate_placeholders", {"N": 2}, "[name] and [place]", "[name]"),
    ("verify_bullet_points", {"N": 2}, "* one\n - two", "* one"),
    ("validate_title", {}, "<<A title>>", "<A title>"),
    ("validate_choice", {"options": ["yes", "no"]}, "I say no", "maybe"),
    ("validate_highlighted_sections", {"N": 1}, "*this*", "this*"),
    ("validate_sections", {"N": 2, "section_splitter": "SECTION"}, "Section 1 a\nSECTION 2 b", "SECTION 1 SECTION"),
    ("validate_json_format", {}, " [1]", "[1"),
    ("validate_repeat_prompt", {"original_prompt": "Say hi"}, "Say hi: hi", "hi"),
    ("validate_two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("validate_uppercase", {}, "ALL UP 1", "All up"),
    ("validate_lowercase", {}, "all low 1", "All low"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "at least"}, "A BIG cat", "Big cat"),
    ("validate_end", {"end_phrase": "The end."}, "So it was. The end. \n", "The end. So it was."),
    ("validate_quotation", {}, '"all"', '"all'),
    ("validate_no_commas", {}, "none", "one, two"),
]


@pytest.mark.parametrize("name, options, good, bad", CONSTRAINTS)
def test_constraints_of_rlvr_ifeval(name: str, options: dict[str, object], good: str, bad: str) -> None:
    assert find_fault(name, options) is None
    assert score_instruction(name, options, good) == 2.0
    assert not RLVR_CHECKS[name](bad, **options)
    assert score_instruction(name, options, "") == 0.0


def test_every_constraint_but_that_of_a_language_is_in_the_table() -> None:
    assert {name for name, *_ in CONSTRAINTS} == set(RLVR_CHECKS) - {"validate_response_language"}


def test_languages_are_told_apart_the_same_way_each_time() -> None:
    pytest.importorskip("langdetect")
    german = "Das ist ein kurzer Satz auf Deutsch."
    assert {score_instruction("language:response_language", {"language": "de"}, german) for _ in range(20)} == {2.0}
    assert score_instruction("validate_response_language", {"language": "en"}, german) == 0.0
    assert score_instruction("validate_response_language", {"language": "en"}, "1 2") == 0.0
    assert score_instruction("language:response_language", {"language": "en"}, "1 2") == 2.0  # as IFEval's own code


@given(st.text(alphabet="aA*.,\n \"'<>[]1#", max_size=60))
def test_what_is_followed_strictly_is_followed_loosely(text: str) -> None:
    for name, options, good, _ in CONSTRAINTS[:3]:
        assert score_instruction(name, options, text) in (0.0, 1.0, 2.0)
        assert score_instruction(name, options, good) == 2.0


def test_abbreviations_end_no_sentence() -> None:
    if has_sentence_model():
        pytest.skip("NLTK's own model is installed")
    assert count_sentences("Dr. Smith met Mr. Jones at 5 p.m. in St. Louis. They had tea! Did they?") == 3


def test_a_response_that_takes_too_long_is_not_followed_and_counted() -> None:
    slow = (Instruction("keywords:existence", {"keywords": ["(a+)+b"]}), Instruction("punctuation:no_comma", {}))
    started = time.monotonic()
    found = asyncio.run(check_instructions(slow, "a" * 64, num_workers=2, timeout_s=0.5))
    assert found.strictly == (False, True) and found.loosely == (False, True) and found.unverified
    assert time.monotonic() - started < 20


def test_only_what_follows_the_thoughts_is_checked() -> None:
    assert read_response("<think>No, COMMAS</think>\n\nfine ") == "fine"
    assert read_response("<think>it never ends") == ""
    assert read_response(" as it is\n") == " as it is\n"


@pytest.mark.parametrize(
    "row, message",
    [
        ({"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]}, "did you mean 'punctuation:no_comma'"),
        ({"instruction_id_list": ["detectable_format:title"], "kwargs": [{"N": 3}]}, "takes nothing, but has N"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "no instructions that can be read"),
        ({"instruction_id_list": [], "kwargs": []}, "has no instructions; leave it out"),
        ({"ground_truth": "lowercase"}, "ground_truth with func_name"),
        ({"problem": "What?"}, "instruction_id_list and kwargs"),
    ],
)
def test_rows_without_instructions_that_can_be_checked_are_errors(row: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match="^row 7.*" + message):
        read_instructions(row, "row 7")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruction_following, "find_missing_package", lambda name: "langdetect")
    instruction_following._check_packages.cache_clear()
    row = {"ground_truth": json.dumps({"func_name": "validate_response_language", "language": "en", "N": None})}
    with pytest.raises(EnvironmentConfigError, match=r"needs the package langdetect: pip install -e '\.\[ifeval\]'"):
        read_instructions(row, "row 7")
    instruction_following._check_packages.cache_clear()


# --- The environment ``ifeval`` and the verifier of the same name, on rows of one's own ---------------------------------------


ROWS = [
    {
        "prompt": "Name two fruits.",
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:title", "startend:quotation"],
        "kwargs": [{}, {"num_words": None}, None],
    },
    {"prompt": "Say hi.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": ['{"num_words": null}']},
]
THIRD = "<<Fruits>> apples, pears"
LOOSE = 'Here you are:\n"<<Fruits>> apples and pears"'


def score(environment: Environment[Any], reply: str, row: int = 0) -> tuple[RewardResult, Rollout]:
    task = environment.tasks(DataSource(rows=ROWS, input_key="prompt"))[row]
    turn = Turn(author="policy", tokens=torch.tensor([1]), text=reply, logprobs=torch.zeros(1), versions=torch.zeros(1).int())
    rollout = Rollout(task=task, sample=0, seed=0, messages=task.messages, prompt=torch.tensor([1]))
    rollout = rollout.with_turn(turn, assistant(reply))
    return asyncio.run(compute_rewards(environment, task, rollout)), rollout


def test_rewards_are_strict_and_loose_of_a_prompt_and_its_instructions() -> None:
    result, rollout = score(InstructionFollowing(), THIRD)
    strict, loose = result.rewards["instruction_strict"], result.rewards["instruction_loose"]
    assert (result.reward, result.rewards["prompt_loose"], result.rewards["unverified"]) == (0.0, 0.0, 0.0)
    assert strict == loose == pytest.approx(1 / 3)
    assert rollout.metrics["instruction_level_strict"] == pytest.approx(1 / 3 * 3 / 2)  # of the mean of 2 instructions
    result, _ = score(InstructionFollowing(reward_weights={"prompt_strict": 0.0, "instruction_strict": 1.0}), LOOSE)
    assert (result.reward, result.rewards["prompt_loose"]) == (pytest.approx(2 / 3), 1.0)
    assert score(InstructionFollowing(), "hi", row=1)[0].reward == 1.0


def test_the_verifier_gives_all_or_the_share_strictly_or_loosely() -> None:
    rewards = {
        "all": {"verifier": "ifeval"},
        "share": {"verifier": "ifeval", "credit": "fraction"},
        "loose": {"verifier": "ifeval", "loose": True},
    }
    result, _ = score(FunctionEnvironment(rewards=rewards), LOOSE)
    assert dict(result.rewards) == {"all": 0.0, "share": pytest.approx(2 / 3), "loose": 1.0}
    assert result.metrics["all/unverified"] == 0.0
    with pytest.raises(EnvironmentConfigError, match="instruction_id_list and kwargs"):
        FunctionEnvironment(rewards=rewards).tasks(DataSource(rows=[{"prompt": "Hi.", "answer": "x"}], input_key="prompt"))


def test_a_row_that_cannot_be_checked_is_an_error_when_the_run_starts() -> None:
    bad = {**ROWS[1], "instruction_id_list": ["punctuation:no_coma"]}
    with pytest.raises(DataError, match="there is no instruction 'punctuation:no_coma'; did you mean 'punctuation:no_comma'"):
        InstructionFollowing().tasks(DataSource(rows=[*ROWS, bad], input_key="prompt"))
    with pytest.raises(EnvironmentConfigError, match="both must be positive"):
        InstructionFollowing(num_workers=0)


# --- IFEval and RLVR-IFeval by name, from local copies of the real schema to the number ---------------------------------------


ANSWERS = {"Name a colour": "A deep red", "Name an animal": '```json\n{"animal": "cat"}\n```', "Greet me": "hello there."}


def follow(prompt: str) -> str:
    return f"<think>Well, which one, then?</think>\n\n{next(text for words, text in ANSWERS.items() if words in prompt)}"


def ignore(prompt: str) -> str:
    return "Red, I WOULD say"


@pytest.mark.parametrize("name", ["ifeval", "RLVR-IFeval"])
def test_replies_that_follow_have_accuracy_1_and_others_0(name, local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    for answer, accuracy in ((follow, 1.0), (ignore, 0.0)):
        report = evaluate_script(monkeypatch, capsys, tiny_model_folder, name, answer)
        assert report["metrics"]["accuracy"] == accuracy and report["metrics"]["errors"] == 0


def test_the_four_accuracies_of_ifeval_are_those_that_are_reported(local_hub, tiny_model_folder, monkeypatch, capsys) -> None:
    def reply(prompt: str) -> str:  # follows one of two instructions, and the third without its first line
        return "Red, I say" if "colour" in prompt else 'Here it is:\n{"animal": "cat"}'

    metrics = evaluate_script(monkeypatch, capsys, tiny_model_folder, "ifeval", reply)["metrics"]
    prefix = "environments/ifeval/"
    found = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    assert (metrics["accuracy"], found["prompt_level_strict"], found["prompt_level_loose"]) == (0.0, 0.0, 0.5)
    assert found["instruction_level_strict"] == pytest.approx(1 / 3)
    assert found["instruction_level_loose"] == pytest.approx(2 / 3)
