"""Prompt files."""

from __future__ import annotations

import pytest

from strop.config import EvalRunConfig, load_config
from strop.data.builtin_dataset import BuiltinDataset
from strop.data.data_config import DataEntryConfig
from strop.data.prompt_template import PromptTemplate, parse_prompt_template
from strop.data.sources import source
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


def test_auto_is_the_usual_wording_of_a_built_in_set_and_else_the_question_alone(monkeypatch) -> None:
    known = {"worded": BuiltinDataset("o/n", prompt="Solve.\n{question}\nWrite \\boxed{}."), "plain": BuiltinDataset("o/n")}
    monkeypatch.setattr(source, "BUILTIN_DATASETS", known)
    for name, prompt_file, expected in (
        ("worded", "auto", "Solve.\n1+1?\nWrite \\boxed{}."),
        ("worded", None, "1+1?"),
        ("plain", "auto", "1+1?"),
        ("owner/name", "auto", "1+1?"),
    ):
        template = DataSource(dataset_name=name, prompt_file=prompt_file).load_template()
        assert template.render("1+1?")[0].content == expected
    rows = [{"problem": "1+1?", "answer": "2"}]
    assert DataSource(rows=rows, prompt_file="auto").load_template() == PromptTemplate()


def test_only_an_evaluation_has_the_usual_wording_by_default(tmp_path) -> None:
    values = {"generation": {"model_name": "m"}, "env": {"math": {}}, "data": {"dataset_name": "gsm8k"}}
    assert load_config(None, [], root=EvalRunConfig, values=values).config.data.prompt_file == "auto"
    assert load_config(None, ["data.prompt_file=null"], root=EvalRunConfig, values=values).config.data.prompt_file is None
    assert DataEntryConfig().prompt_file is None  # so that a run goes on from a checkpoint of before
