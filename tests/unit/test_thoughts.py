"""One reading of thoughts: what the policy said is never read from a thought, whoever opened it."""

from __future__ import annotations

import time

import pytest

from strop.thoughts import find_opening, find_thoughts, read_answer, split_thoughts

FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"


@pytest.mark.parametrize(
    ("text", "opening", "answer"),
    [
        ("plain", "", "plain"),
        ("<think>hm</think> 4", "", " 4"),
        ("hm</think> 4", "", " 4"),  # the prompt opened it, and nobody said so
        ("hm</think> 4", "<think>", " 4"),
        ("so \\boxed{7} but wait", "<think>", ""),  # cut off inside of what the prompt opened
        ("<think>again</think>4", "<think>", "4"),  # opened twice
        ("first <think>never ends", "", "first "),
        ("<think>a</think>4<think>b", "", "4"),
        ("<think>a</think>3<think>b</think>4", "", "4"),
        ("[THINK]a[/THINK]4", "", "4"),
        ("a[/THINK]4", "[THINK]", "4"),
        ("[THINK]a", "", ""),
        ("<seed:think>a</seed:think>4", "", "4"),
        ("<|START_THINKING|>a<|END_THINKING|>4", "", "4"),
        (f"{ANALYSIS}7<|end|><|start|>assistant{FINAL}4", "", "4"),
        (f"{ANALYSIS}7<|end|><|start|>assistant{FINAL}4<|return|>", "", "4"),
        (f"{ANALYSIS}it is 7", "", ""),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{{}}<|call|>", "", ""),
        ("", "<think>", ""),
    ],
)
def test_an_answer_is_read_outside_of_thoughts(text: str, opening: str, answer: str) -> None:
    assert read_answer(text, opening) == answer


@pytest.mark.parametrize(
    ("text", "opening", "thoughts", "outside"),
    [
        ("<think>a</think>b<think> c </think>d", "", "a\n\nc", "bd"),
        ("a</think>b", "<think>", "a", "b"),
        ("a", "<think>", "a", ""),
        ("say <think>a", "", "a", "say "),
        ("<call>{'text': '<think>'}</call>done", "", "", "<call>{'text': '<think>'}</call>done"),
        ("<think>a <call>1</call></think>b", "", "a <call>1</call>", "b"),
    ],
)
def test_calls_stand_outside_of_thoughts_and_their_arguments_open_none(
    text: str, opening: str, thoughts: str, outside: str
) -> None:
    assert split_thoughts(text, opening, call=("<call>", "</call>")) == (thoughts, outside)


def test_a_prompt_that_ends_in_an_open_tag_opens_a_thought() -> None:
    assert find_opening("<|im_start|>assistant\n<think>\n") == "<think>"
    assert find_opening("[THINK]") == "[THINK]"
    assert find_opening("<think></think>\n\n") == find_opening("Write <think> first. assistant:") == ""


@pytest.mark.parametrize(
    "text", ["<think>", "</think>", "<think></think>", "<", "[THINK]a[/THINK]", ANALYSIS, FINAL, f"{ANALYSIS}<|end|>"]
)
def test_thoughts_are_found_in_linear_time(text: str) -> None:
    started = time.process_time()
    for read in (find_thoughts, read_answer, split_thoughts):
        read(text * 50_000)  # type: ignore[operator]
    assert time.process_time() - started < 3
