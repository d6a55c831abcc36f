"""Data sets that a user's class or function makes, named in ``dataset_name``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from strop.config import ConfigError, GrpoRunConfig, load_config
from strop.data.sources.dataset_class import is_dataset_class
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.types import assistant, user

CODE = '''
import sys

SUMS = [{"problem": f"{n}+1?", "answer": str(n + 1)} for n in range(8)]


class Chats:
    """As a class for NeMo-RL is written: rows of messages in ``dataset``."""

    def __init__(self, level=0, split="train", input_key="question", **kwargs):
        self.task_name, self.val_dataset = "chats", None
        talks = [[("user", f"{n}+{level}?"), ("assistant", str(n + level))] for n in range(8)]
        self.dataset = [{"messages": [{"role": role, "content": text} for role, text in talk], "task_name": split} for talk in talks]


class Halves:
    def __init__(self):
        self.dataset, self.val_dataset = SUMS[:6], SUMS[6:]


class Pairs:
    def __init__(self, **kwargs):
        reply = lambda text: [{"role": "assistant", "content": text}]
        completions = [{"rank": 1, "completion": reply("5")}, {"rank": 0, "completion": reply("4")}]
        self.dataset = [{"context": [{"role": "user", "content": "2+2?"}], "completions": completions}]


class Lazy:
    """A map-style data set of torch."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise OSError("the shard is gone")
        return SUMS[index]


def sums(first, size=None, *, purpose):
    return [{**row, "purpose": purpose} for row in SUMS[first : first + (size or 8)]]


def table():
    import datasets
    return datasets.DatasetDict(train=datasets.Dataset.from_list(SUMS[:5]), test=datasets.Dataset.from_list(SUMS[5:]))


def stream():
    yield from SUMS


def texts():
    return ["2+2?"]


def nothing():
    return []


def leaves():
    sys.exit(3)


a_number = 3
'''


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)


def rows_of(name: str, **keys: Any) -> list[tuple[str, str]]:
    return [(str(row.prompt), row.answer) for row in DataSource(dataset_name=name, **keys).load_rows()]


@pytest.mark.parametrize("name", ["my_pkg.data.MyDataset", "mine:rows", "my.pkg:rows", "../code/mine.py:Rows"])
def test_names_of_code_are_known(name: str) -> None:
    assert is_dataset_class(name)


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "NuminaMath-1.5", "openai/gsm8k", "https://a.b/c.jsonl", "hf://a:b", "gsm8k", "C:/rows"]
)
def test_names_of_files_and_of_the_hub_are_none(name: str) -> None:
    assert not is_dataset_class(name)


def test_rows_of_a_class_of_nemo_rl_are_a_question_and_its_answer() -> None:
    assert rows_of("mine.py:Chats", dataset_kwargs={"level": 2})[:2] == [("0+2?", "2"), ("1+2?", "3")]


def test_its_conversations_are_trained_on_whichever_columns_it_has_read_itself() -> None:
    conversations = pytest.importorskip("strop.extensions.recorded.examples").conversations
    for key in (None, "question"):
        first = conversations(DataSource(dataset_name="mine.py:Chats", input_key=key))[0]
        assert first.messages == (user("0+0?"), assistant("0"))


def test_preferences_of_nemo_rl_are_read_by_their_ranks() -> None:
    preferences = pytest.importorskip("strop.extensions.recorded.examples").preferences
    (pair,) = preferences(DataSource(dataset_name="mine.py:Pairs"))
    assert (pair.chosen, pair.rejected) == ((assistant("4"),), (assistant("5"),))


def test_a_function_gets_its_options_and_the_keys_that_it_names() -> None:
    source = DataSource(dataset_name="mine.py:sums", dataset_kwargs={"first": 2}, size=3, purpose="validation")
    assert [row.metadata["purpose"] for row in source.load_rows()] == ["validation"] * 3
    assert rows_of("mine.py:sums", dataset_kwargs={"first": 2}, size=3)[0] == ("2+1?", "3")


def test_validation_reads_val_dataset_where_there_is_one() -> None:
    assert len(rows_of("mine.py:Halves")) == 6
    assert rows_of("mine.py:Halves", purpose="validation") == [("6+1?", "7"), ("7+1?", "8")]


def test_splits_of_a_dataset_dict_follow_the_purpose_or_the_key() -> None:
    assert [len(rows_of("mine.py:table", purpose=each)) for each in ("train", "validation")] == [5, 3]
    with pytest.raises(DataError, match=r"split is 'test', but mine.py:table has no parameter 'split'"):
        rows_of("mine.py:table", split="test")


def test_rows_of_a_lazy_data_set_are_read_one_by_one_and_say_what_it_raised() -> None:
    with pytest.raises(DataError, match=r"mine.py:Lazy, row 3 cannot be read: OSError: the shard is gone"):
        DataSource(dataset_name="mine.py:Lazy").load_rows()
    assert rows_of("mine.py:Lazy", size=2) == [("0+1?", "1"), ("1+1?", "2")]


def test_a_source_travels_to_other_processes_by_its_name() -> None:
    source = pickle.loads(pickle.dumps(DataSource(dataset_name="mine.py:Chats", dataset_kwargs={"level": 1})))
    assert source.load_rows()[0].answer == "1"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("mine.py:sums", {}, "mine.py:sums needs first; set dataset_kwargs.first"),
        ("mine.py:sums", {"frist": 1}, "dataset_kwargs has 'frist', which mine.py:sums does not take; did you mean 'first'"),
        ("mine.py:stream", {}, "of the type generator; return a list of dicts.*streaming: true"),
        ("mine.py:texts", {}, "row 1 is '2.2.', not a dict"),
        ("mine.py:nothing", {}, "returned no rows"),
        ("mine.py:leaves", {}, r"mine.py:leaves\(\) raised SystemExit: 3"),
        ("mine.py:a_number", {}, "which is 3; name a class or a function that makes rows"),
        ("mine.py:chats", {}, "'mine.py' has no 'chats'; did you mean 'Chats'"),
        ("no_such_package.data.Rows", {}, "No module named 'no_such_package'.*PYTHONPATH"),
    ],
)
def test_code_that_gives_no_rows_says_what_is_wanted(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        DataSource(dataset_name=name, dataset_kwargs=options).load_rows()


def test_arguments_without_a_class_are_an_error_of_the_configuration() -> None:
    values = {
        "policy": {"model_name": "m"},
        "env": {"math": {}},
        "data": {"train": {"dataset_name": "gsm8k", "dataset_kwargs": {"a": 1}}},
    }
    with pytest.raises(ConfigError, match="found a, but gsm8k is no class or function"):
        load_config(None, root=GrpoRunConfig, values=values)
