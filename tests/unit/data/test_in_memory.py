"""Lists of dicts and datasets as data: read like files, with ids that stay the same."""

from __future__ import annotations

import pickle

import pytest

from strop.base_config import to_tree
from strop.data.data_config import DataEntryConfig
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource

datasets = pytest.importorskip("datasets")

ROWS = [{"prompt": f"What is {n}+{n}?", "answer": 2 * n, "level": n % 3} for n in range(20)]


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_rows_in_memory_are_those_of_a_file(make):
    source = DataSource(rows=make(ROWS), size=5, repeat=2)
    rows = source.load_rows()
    assert [(row.question, row.answer) for row in rows] == [(row["prompt"], str(row["answer"])) for row in ROWS[:5]] * 2
    assert rows[4].metadata == ROWS[4]


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_ids_follow_from_content_and_position_and_not_from_the_object(make):
    ids = [row.id for row in DataSource(rows=make(ROWS)).load_rows()]
    assert ids == [row.id for row in DataSource(rows=make([dict(row) for row in ROWS])).load_rows()] and len(set(ids)) == 20
    assert not set(ids) & {row.id for row in DataSource(rows=make(ROWS[1:])).load_rows()}


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_recorded_data_may_be_in_memory(make):
    examples = pytest.importorskip("strop.extensions.recorded.examples")
    conversations, preferences, unpaired_preferences = examples.conversations, examples.preferences, examples.unpaired_preferences
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert conversations(DataSource(rows=make([{"messages": talk}])))[0].answer == "Hello"
    assert conversations(DataSource(rows=make([{"prompt": "Hi", "solution": "Hello"}])))[0].answer == "Hello"
    pair = DataSource(rows=make([{"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}]))
    assert preferences(pair)[0].rejected[0].content == "Go away"
    assert [each.desirable for each in unpaired_preferences(pair)] == [True, False]
    assert (
        unpaired_preferences(DataSource(rows=make([{"prompt": "Hi", "completion": "Go", "label": False}])))[0].desirable is False
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows is empty"),
        (["text"], r"rows\[0\] is 'text', not a dict"),
        ({"prompt": ["a"]}, "of the type dict; pass a list of dicts or a datasets.Dataset$"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), r"IterableDataset; .*list\(rows.take\(1000\)\)"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), r"DatasetDict; .*one of its splits \['train'\]"),
        (datasets.Dataset.from_list(ROWS).to_pandas(), r"DataFrame; .*rows.to_dict\('records'\)"),
        ([*ROWS, {"prompt": "a"}], "row 21 has no key 'answer'"),
    ],
)
def test_rows_that_cannot_be_read_are_an_error_that_says_what_to_pass(rows, message):
    with pytest.raises(DataError, match=message):
        DataSource(rows=rows).load_rows()


def test_a_name_and_rows_are_an_error():
    with pytest.raises(DataError, match="keep one"):
        DataSource(dataset_name="gsm8k", rows=ROWS)


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list])
def test_a_data_entry_carries_rows_to_its_source_and_keeps_them_out_of_the_saved_configuration(make):
    entry = DataEntryConfig(dataset_name="gsm8k", split_validation_size=4).with_rows(make(ROWS))
    assert "rows" not in to_tree(entry) and "gsm8k" not in str(to_tree(entry))
    source = DataSource.from_entry(pickle.loads(pickle.dumps(entry)), seed=1, part="validation")
    assert len(source.load_rows()) == 4
