"""Multiple-choice data sets: the options stand below the question, and the answer is a letter."""

from __future__ import annotations

import pytest

from strop.data.sources import hub
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.extensions.math.math_environment import MathEnvironment

datasets = pytest.importorskip("datasets")

MMLU = {"Question": "2+2?", "A": "3", "B": "4", "C": "5", "D": 6, "Answer": "B", "Subject": "sums"}
MMLU_PRO = {"question": "2+2?", "options": ["3", "4", "5"], "answer": "B", "category": "sums"}
GPQA = {"Question": "2+2?", "Correct Answer": "4", **{f"Incorrect Answer {n}": str(n) for n in (1, 2, 3)}}


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    asked: list[tuple[object, ...]] = []

    def load(name: str, subset: str | None, split: str, revision: str | None) -> object:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([MMLU_PRO if "Pro" in name else GPQA if "gpqa" in name else {**MMLU, "D": "6"}])

    monkeypatch.setattr(hub, "_check_hub", lambda name, revision: None)
    monkeypatch.setattr(hub, "_load_split", load)
    return asked


def test_options_are_below_the_question_and_an_instruction_needs_no_place_for_it(rows, tmp_path) -> None:
    (tmp_path / "p.txt").write_text("Choose.\n")
    (task,) = MathEnvironment(verifier="english_multichoice").tasks(
        DataSource(dataset_name="mmlu", prompt_file=str(tmp_path / "p.txt"))
    )
    assert task.messages[0].content == "Choose.\n\n\nQuestion: 2+2?\nOptions:\nA) 3\nB) 4\nC) 5\nD) 6" and task.answer == "B"
    (row,) = DataSource(dataset_name="mmlu_pro").load_rows()
    assert (row.question, row.answer) == ("Question: 2+2?\nOptions:\nA) 3\nB) 4\nC) 5", "B")
    (url, subset, split), (name, _, test) = rows
    assert str(url).endswith("/mmlu.csv") and subset is None and (split, name, test) == ("train", "TIGER-Lab/MMLU-Pro", "test")


def test_options_without_letters_are_shuffled_by_the_question(rows) -> None:
    first, again = (DataSource(dataset_name="gpqa_diamond").load_rows()[0] for _ in range(2))
    assert first == again and f"{first.answer}) 4" in first.question
    assert sorted(line[3:] for line in first.question.splitlines()[2:]) == ["1", "2", "3", "4"]


def test_subsets_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_check_hub", lambda name, revision: None)
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, subset, split, revision: datasets.Dataset.from_list([{"question": f"{subset} {split}?", "answer": "1"}]),
    )
    assert [row.question for row in DataSource(dataset_name="AIME2025").load_rows()] == ["AIME2025-I test?", "AIME2025-II test?"]


def test_a_file_at_an_address_is_loaded_by_its_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(loader: str, *, data_files: str, split: str, keep_default_na: bool) -> object:
        assert not keep_default_na  # "None" and "NA" are texts
        asked.append((loader, data_files, split))
        return datasets.Dataset.from_list([{"Question": "1+1?", "Answer": "2"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    (row,) = DataSource(dataset_name="https://example.org/a.csv", input_key="Question", output_key="Answer").load_rows()
    assert (row.question, row.answer, asked) == ("1+1?", "2", [("csv", "https://example.org/a.csv", "train")])


def test_options_are_shuffled_by_seed_and_question_when_asked_and_the_letter_follows(rows) -> None:
    plain = DataSource(dataset_name="mmlu").load_rows()[0]
    seen = set()
    for seed in range(20):
        first, again = (DataSource(dataset_name="mmlu", shuffle_choices=True, seed=seed).load_rows()[0] for _ in range(2))
        assert first == again and f"{first.answer}) 4" in first.question
        assert sorted(first.metadata["choices"]) == sorted(plain.metadata["choices"]) == ["3", "4", "5", "6"]
        assert [line[3:] for line in first.question.splitlines()[2:]] == first.metadata["choices"]
        seen.add(first.question)
    assert len(seen) > 5


@pytest.mark.parametrize("answer", ["E", "", "BC"])
def test_a_letter_of_no_option_cannot_be_shuffled(answer: str, rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MMLU_PRO, "answer", answer)
    with pytest.raises(DataError, match="not the letter of one of its 3 options"):
        DataSource(dataset_name="mmlu_pro", shuffle_choices=True).load_rows()[0]


def test_an_option_that_pandas_reads_as_no_value_is_the_text_none(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GPQA, "Incorrect Answer 2", None)
    (row,) = DataSource(dataset_name="gpqa").load_rows()
    assert "None" in row.metadata["choices"] and f"{row.answer}) 4" in row.question
