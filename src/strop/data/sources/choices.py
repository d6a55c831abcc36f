"""Multiple-choice questions: their options as text below the question, and the letter of the right one."""

from __future__ import annotations

from random import Random
from string import ascii_uppercase

from strop.data.builtin.builtin_dataset import Choices
from strop.data.sources.records import DataError, Record, get_text, get_value
from strop.data.sources.split import stable_hash


def read_choices(
    choices: Choices, record: Record, question: str, answer: str, where: str, seed: int | None = None
) -> tuple[str, str, list[str]]:
    """Return the question with its options, the letter of the right one, and the options as shown.

    ``seed``: shuffle the options, by the seed and the question; None leaves them in order, unless the right one would be the first.
    """
    options = _read_options(choices, record, where)
    order = list(range(len(options)))
    if seed is not None or choices.first_is_correct:
        correct = 0 if choices.first_is_correct else _read_letter(answer, options, where)
        Random(stable_hash(question, seed or 0)).shuffle(order)
        answer = ascii_uppercase[order.index(correct)]
    shown = [options[index] for index in order]
    lines = [f"{letter}) {option}" for letter, option in zip(ascii_uppercase, shown, strict=False)]
    return "\n".join([f"Question: {question}", "Options:", *lines]), answer, shown


def _read_letter(answer: str, options: list[str], where: str) -> int:
    letter = answer.strip().upper()
    if len(letter) != 1 or letter not in ascii_uppercase[: len(options)]:
        raise DataError(
            f"{where}: the answer is {answer!r:.80}, not the letter of one of its {len(options)} options. Fix the record, or set "
            "shuffle_choices to false"
        )
    return ascii_uppercase.index(letter)


def _read_options(choices: Choices, record: Record, where: str) -> list[str]:
    if len(choices.options) > 1:
        return [_read_option(record, column, where) for column in choices.options]
    options = get_value(record, choices.options[0], "dataset_name", where)
    if not isinstance(options, list | tuple) or not 0 < len(options) <= len(ascii_uppercase):
        raise DataError(f"{where}: {choices.options[0]!r} is {options!r:.80}, not a list of up to 26 options. Fix the record")
    return [str(option) for option in options]


def _read_option(record: Record, column: str, where: str) -> str:
    """Return the option in a column. CSV files of the hub are read by pandas, for which the option "None" is no value."""
    value = get_value(record, column, "dataset_name", where)
    if isinstance(value, bool) or value is None:  # a column of "True" and "False" alone
        return str(value)
    return get_text(record, column, "dataset_name", where)
