"""Turns are taken apart into reasoning and what was said, by their texts and by their tokens."""

from __future__ import annotations

import re
from itertools import pairwise

from strop.extensions.view.rollout_answer import split_reasoning_parts
from support.each import each

TURNS = {  # text, whether the prompt opened the reasoning, parts: (text, is reasoning, is closed)
    "none": ("The answer is 4.", False, []),
    "tags": ("<think>\na b\n</think>\n\n4", False, [("a b", True, True), ("4", False, True)]),
    "opened by the prompt": ("a b\n</think>4", True, [("a b", True, True), ("4", False, True)]),
    "opened by a prompt that is not known": ("a b</think>4", False, [("a b", True, True), ("4", False, True)]),
    "opened by the prompt, never closed": ("a b", True, [("a b", True, False)]),
    "opened twice": ("<think>a</think>4", True, [("a", True, True), ("4", False, True)]),
    "never closed": ("4? <think>a", False, [("4? ", False, True), ("a", True, False)]),
    "several": (
        "<think>1</think>A<think>2</think>B", False, [("1", True, True), ("A", False, True), ("2", True, True), ("B", False, True)],
    ),
    "nothing else": ("<think>a</think>", False, [("a", True, True)]),
    "empty": ("<think></think>4", False, [("", True, True), ("4", False, True)]),
    "Mistral's": ("[THINK]a[/THINK]4", False, [("a", True, True), ("4", False, True)]),
    "gpt-oss's": ("<|channel|>analysis<|message|>a<|end|>4", False, [("a", True, True), ("4", False, True)]),
    "an end of a message alone": ("4<|end|>", False, []),
}  # fmt: skip


@each("name", TURNS)
def test_a_turn_is_taken_apart(name: str) -> None:
    text, is_inside, expected = TURNS[name]
    found = split_reasoning_parts(text, is_inside=is_inside)
    assert [(part.text, part.is_reasoning, part.is_closed) for part in found] == expected
    assert all(part.start is None and part.end is None for part in found)


@each("name", TURNS)
def test_its_tokens_are_taken_apart_alike_and_none_is_lost(name: str) -> None:
    text, is_inside, expected = TURNS[name]
    pieces = re.findall(r"</?think>|<\|\w+\|>|\w+|\W", text)
    found = split_reasoning_parts(text, is_inside=is_inside, pieces=pieces, first=7)
    assert [(part.text, part.is_reasoning, part.is_closed) for part in found] == expected
    if expected:
        edges = [7, *(part.end for part in found)]
        assert edges[-1] == 7 + len(pieces) and [part.start for part in found] == edges[:-1]
        tokens = ["".join(pieces[start - 7 : end - 7]) for start, end in pairwise(edges)]
        assert all(part.text.strip() in written for part, written in zip(found, tokens, strict=True))


@each("size", [1, 2, 3, 5])
def test_tokens_that_cover_a_tag_and_more_stay_in_one_part(size: int) -> None:
    text = "<think>1</think>A<think>2</think>B"
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    found = split_reasoning_parts(text, pieces=pieces)
    assert [part.start for part in found] == [0, *(part.end for part in found[:-1])] and found[-1].end == len(pieces)
    assert all(part.start <= part.end for part in found)


def test_tags_that_are_left_out_of_the_text_are_found_among_the_tokens() -> None:
    found = split_reasoning_parts("a b4", pieces=["<think>", "a", " b", "</think>", "4", "<|im_end|>"])
    assert [(part.text, part.start, part.end) for part in found] == [("a b", 0, 4), ("4<|im_end|>", 4, 6)]
