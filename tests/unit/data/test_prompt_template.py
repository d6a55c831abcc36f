"""Prompt files."""

from __future__ import annotations

import pytest

from strop.data.prompt_template import parse_prompt_template
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.types import system, user


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("Solve: {question}", "Solve: Q"),
        ("Put it in \\boxed{}. {question} \\boxed{{}}", "Put it in \\boxed{}. Q \\boxed{{}}"),
        ("Solve, in \\boxed{{}}:\n{}\nThink.", "Solve, in \\boxed{}:\nQ\nThink."),
        ("{}", "Q"),
    ],
)
def test_the_question_goes_where_its_place_is(text, prompt):
    assert parse_prompt_template(text, "p").render("Q") == (user(prompt),)


@pytest.mark.parametrize("text", ["no place", "{} and {}", "{question} {question}", "only \\boxed{{}}"])
def test_a_prompt_without_one_place_for_the_question_is_an_error(text):
    with pytest.raises(DataError, match="exactly once"):
        parse_prompt_template(text, "p")


def test_braces_in_a_question_stand_as_they_are():
    assert parse_prompt_template("{}", "p").render(r"\frac{1}{2} {} {question}") == (user(r"\frac{1}{2} {} {question}"),)


def test_files_are_read_and_a_missing_one_is_named(tmp_path):
    (tmp_path / "p.txt").write_text("Q: {question}\n")
    (tmp_path / "s.txt").write_text("Be brief.\n")
    data = DataSource(prompt_file=str(tmp_path / "p.txt"), system_prompt_file=str(tmp_path / "s.txt"))
    assert data.load_template().render("x") == (system("Be brief."), user("Q: x"))
    with pytest.raises(DataError, match=r"^prompt_file .*missing"):
        DataSource(prompt_file=str(tmp_path / "missing.txt")).load_template()
    with pytest.raises(DataError, match=r"^system_prompt_file .*missing"):
        DataSource(system_prompt_file=str(tmp_path / "missing.txt")).load_template()
