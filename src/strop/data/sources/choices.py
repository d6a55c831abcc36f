"""Multiple-choice questions: their options as text below the question, and the letter of the right one."""

from __future__ import annotations

from random import Random
from string import ascii_uppercase

from strop.data.builtin.builtin_dataset import Choices
from strop.data.sources.records import DataError, Record, get_text, get_value
from strop.data.sources.split import stable_hash


def read_choices(choices: Choices, record: Record, question: str, answer: str, where: str) -> tuple[str, str]:
    """Return the question with its options, and the letter of the right one."""
    options = _read_options(choices, record, where)
    if choices.first_is_correct:
        correct = options[0]
        Random(stable_hash(question)).shuffle(options)
        answer = ascii_uppercase[options.index(correct)]
    lines = [f"{letter}) {option}" for letter, option in zip(ascii_uppercase, options, strict=False)]
    return "\n".join([f"Question: {question}", "Options:", *lines]), answer


def _read_options(choices: Choices, record: Record, where: str) -> list[str]:
    if len(choices.options) > 1:
        return [get_text(record, column, "dataset_name", where) for column in choices.options]
    options = get_value(record, choices.options[0], "dataset_name", where)
    if not isinstance(options, list | tuple) or not 0 < len(options) <= len(ascii_uppercase):
        raise DataError(f"{where}: {choices.options[0]!r} is {options!r:.80}, not a list of up to 26 options. Fix the record")
    return [str(option) for option in options]
