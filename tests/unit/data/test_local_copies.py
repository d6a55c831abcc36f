"""Data sets of the hub that are read from local copies, without asking the hub."""

from __future__ import annotations

import json

import pytest

from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.sources import hub
from strop.data.sources.local_copies import find_copy
from strop.data.sources.peek import peek_dataset
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource

COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "_check_hub", refuse)


def test_a_split_is_read_from_its_local_copy_with_the_ids_of_the_hub(local_hub):
    rows = DataSource(dataset_name="openai/gsm8k", subset="main", input_key="question").load_rows()
    assert [row.id for row in rows] == ["openai/gsm8k:0", "openai/gsm8k:1"]
    assert rows[0].question == "Ann has 5 apples and eats 2. How many are left?"


@pytest.mark.extensions
def test_what_is_trained_on_and_what_is_evaluated_are_splits_of_the_copy(local_hub):
    assert [row.answer for row in DataSource(dataset_name="gsm8k").load_rows()] == ["3", "2,400"]
    assert [row.answer for row in DataSource(dataset_name="gsm8k", purpose="evaluation").load_rows()] == ["15"]
    assert len(DataSource(dataset_name="gsm8k", split="train[:1]").load_rows()) == 1


@pytest.mark.extensions
def test_a_subset_the_copy_does_not_have_is_an_error_that_names_the_copy(local_hub):
    with pytest.raises(DataError, match=rf"cannot be loaded: in its local copy {local_hub}/openai/gsm8k, .*socratic"):
        DataSource(dataset_name="gsm8k", subset="mian").load_rows()


@pytest.mark.extensions
def test_a_copy_is_peeked_at_without_reading_all_of_it(local_hub, monkeypatch):
    monkeypatch.setattr(hub, "_load_split", lambda *arguments: pytest.fail("it was loaded"))
    peek = peek_dataset("gsm8k", purpose="evaluation")
    assert peek is not None
    assert peek.records[0]["question"] == "What is 7 more than 8?"
    assert peek_dataset("gsm8k", split="train[:10%]") is not None
    with pytest.raises(DataError, match="cannot be read from its local copy"):
        peek_dataset("gsm8k", split="valid")


@pytest.mark.parametrize(
    ("address", "file"),
    [
        ("https://example.org/sets/questions.jsonl?download=true", "example.org/sets/questions.jsonl"),
        ("hf://datasets/someone/sets@main/data/questions.jsonl", "someone/sets/data/questions.jsonl"),
    ],
)
def test_the_file_of_an_address_is_read_from_its_copy(local_hub, monkeypatch, tmp_path, address, file):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"problem": "1+1?", "answer": "2"}))
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path))
    (row,) = DataSource(dataset_name=address).load_rows()
    assert (row.question, row.answer, row.id) == ("1+1?", "2", f"{address}:0")
    assert peek_dataset(address).records[0]["problem"] == "1+1?"


def test_an_address_does_not_leave_the_folder(monkeypatch, tmp_path):
    (tmp_path / "secret.jsonl").write_text("{}")
    (tmp_path / "copies" / "example.org").mkdir(parents=True)
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path / "copies"))
    assert find_copy("https://example.org/../../secret.jsonl") is None


def test_what_has_no_copy_is_asked_of_the_hub(local_hub):
    with pytest.raises(AssertionError, match="the hub was asked"):
        DataSource(dataset_name="someone/else").load_rows()


@pytest.mark.extensions
def test_a_folder_of_copies_that_is_missing_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path / "typo"))
    with pytest.raises(DataError, match=r"STROP_DATASETS is '.*typo', and there is no such folder"):
        DataSource(dataset_name="gsm8k").load_rows()


def test_a_copy_of_another_revision_is_refused(monkeypatch, tmp_path):
    notes = tmp_path / "someone/set/.cache/huggingface/download/data"
    notes.mkdir(parents=True)
    (notes / "train.parquet.metadata").write_text(f"{COMMIT}\n{'0' * 64}\n1700000000.0\n")
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path))
    assert find_copy("someone/set") == find_copy("someone/set", COMMIT) == tmp_path / "someone/set"
    assert find_copy("someone/set", "v1.0") == tmp_path / "someone/set"  # of which the copy says nothing
    with pytest.raises(DataError, match=rf"a copy of someone/set at the revision {COMMIT}, but the revision {'a' * 40} is asked"):
        find_copy("someone/set", "a" * 40)


@pytest.mark.extensions
def test_the_configured_revision_is_asked_of_the_hub_before_that_of_a_built_in_set(monkeypatch):
    asked = []

    def load(name, subset, split, revision):
        asked.append(revision)
        raise DataError("away")

    monkeypatch.setattr(hub, "_check_hub", lambda name, revision: None)
    monkeypatch.setattr(hub, "_load_split", load)
    for revision in ("v2", None):
        with pytest.raises(DataError, match="away"):
            DataSource(dataset_name="gsm8k", revision=revision).load_rows()
    assert asked == ["v2", BUILTIN_DATASETS["gsm8k"].revision]


@pytest.mark.extensions
def test_the_commit_that_a_built_in_set_is_pinned_to_counts_for_the_hub_alone(monkeypatch, tmp_path):
    (tmp_path / "openai/gsm8k/.cache/huggingface/download").mkdir(parents=True)
    (tmp_path / "openai/gsm8k/.cache/huggingface/download/README.md.metadata").write_text(f"{COMMIT}\netag\n1\n")
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path))
    assert find_copy("openai/gsm8k", BUILTIN_DATASETS["gsm8k"].revision) == tmp_path / "openai/gsm8k"
    with pytest.raises(DataError, match="is asked for"):
        find_copy("openai/gsm8k", "a" * 40)


def test_files_of_an_address_with_a_star_are_read_together(monkeypatch, tmp_path):
    conversations = pytest.importorskip("strop.extensions.recorded.examples").conversations
    folder = tmp_path / "someone/texts/part"
    folder.mkdir(parents=True)
    for number in range(2):
        (folder / f"{number}.jsonl").write_text(json.dumps({"text": f"text {number}"}))
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    examples = conversations(DataSource(dataset_name="hf://datasets/someone/texts/part/*.jsonl", text_key="text"))
    assert [example.answer for example in examples] == ["text 0", "text 1"]
    assert find_copy("hf://datasets/someone/texts/other/*.jsonl") is None
