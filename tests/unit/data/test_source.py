"""Rows from files: what is read, and what is said about data that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from strop.data.data_config import DataConfig, DataEntryConfig
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource

ROWS = [{"problem": f"What is {n}+{n}?", "answer": 2 * n, "level": n % 3} for n in range(20)]


def jsonl(folder: Path, rows: object = ROWS) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def csv_file(folder: Path) -> str:
    (folder / "rows.csv").write_text(
        "problem,answer,level\n" + "".join(f"{r['problem']},{r['answer']},{r['level']}\n" for r in ROWS)
    )
    return str(folder / "rows.csv")


def json_file(folder: Path) -> str:
    (folder / "rows.json").write_text(json.dumps(ROWS))
    return str(folder / "rows.json")


def parquet(folder: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def arrow(folder: Path) -> str:
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return str(folder / "rows.arrow")


def saved_dataset(folder: Path) -> str:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("write", [jsonl, json_file, csv_file, parquet, arrow, saved_dataset])
def test_every_format_gives_the_same_rows(write, tmp_path):
    rows = DataSource(dataset_name=write(tmp_path)).load_rows()
    assert [(row.question, row.answer) for row in rows] == [(row["problem"], str(row["answer"])) for row in ROWS]
    assert int(rows[4].metadata["level"]) == 1 and len({row.id for row in rows}) == 20


def test_keys_reach_inside_and_size_and_repeat_count(tmp_path):
    path = jsonl(tmp_path, [{"prompt": [{"content": f"q{n}"}], "reward": {"truth": "t"}, "prompt.x": "dotted"} for n in range(3)])
    data = DataSource(dataset_name=path, input_key="prompt.0.content", output_key="reward.truth", size=2, repeat=2)
    assert [row.question for row in data.load_rows()] == ["q0", "q1", "q0", "q1"]
    assert DataSource(dataset_name=path, input_key="prompt.x", output_key="reward.truth").load_rows()[0].question == "dotted"


def test_blank_lines_and_a_byte_order_mark_carry_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"problem": "a", "answer": "1"}\n\n{"problem": "b\xc3\xa9", "answer": "2"}')
    assert [row.question for row in DataSource(dataset_name=str(path)).load_rows()] == ["a", "bé"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", None, "there is no data file"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n\n", "has no rows"),
        (
            "a.jsonl",
            '{"problem": "x", "answer": "1"}\n{"problem": "y", "ans',
            r'a\.jsonl:2 is not JSON .*: \{"problem": "y", "ans\.',
        ),
        ("a.jsonl", "[1]\n", r"a\.jsonl:1 is a JSON list"),
        ("a.jsonl", b'{"problem": "\xff"}\n', r"a\.jsonl:1 is not JSON"),
        (
            "a.jsonl",
            '{"problem": "x", "answer": "1"}\n\n{"problem": "x", "solution": "1"}',
            r"a\.jsonl:3 has no key 'answer'; its keys are \['problem', 'solution'\]. Set output_key",
        ),
        ("a.jsonl", '{"question": "x", "answer": "1"}', "Set input_key"),
        ("a.jsonl", '{"problem": "x", "answer": null}', "'answer' is None, which is not text"),
        ("a.jsonl", '{"problem": " ", "answer": "1"}', "'problem' is empty"),
        ("a.json", '{"problem": 1}', "must hold a JSON list"),
        ("a.json", "[", "is not JSON"),
        ("a.csv", "problem,answer\nx,1,2\n", r"a\.csv:2 does not have the 2 fields"),
        ("a.csv", "problem,answer\n", "has no rows"),
        ("a.parquet", "nonsense", "cannot be read as Parquet"),
        ("a.arrow", "nonsense", "cannot be read as Arrow"),
        ("a.xml", "<a/>", r"ends with '\.xml'"),
    ],
)
def test_data_that_cannot_be_used_is_an_error_that_says_where(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        DataSource(dataset_name=str(path)).load_rows()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size is 0"),
        ({"repeat": 0}, "repeat is 0"),
        ({"split_validation_size": -1}, "split_validation_size"),
        ({"system_prompt": "a", "system_prompt_file": "b"}, "keep one"),
    ],
)
def test_options_that_make_no_sense_are_errors(options, message):
    with pytest.raises(DataError, match=message):
        DataSource(**options)


def test_text_that_looks_like_a_number_or_like_nothing_stays_as_it_is_written(tmp_path):
    (tmp_path / "rows.csv").write_text("problem,answer\na,007\nb,NA\nc,1.50\n")
    rows = DataSource(dataset_name=str(tmp_path / "rows.csv")).load_rows()
    assert [row.answer for row in rows] == ["007", "NA", "1.50"]


@pytest.mark.parametrize("answer", ["solution", "completion"])
def test_prompt_and_solution_are_found_where_no_key_is_set_and_the_log_says_so(answer, tmp_path, caplog):
    path = jsonl(tmp_path, [{"prompt": "1+1", answer: "2"}] * 2)
    assert [(row.question, row.answer) for row in DataSource(dataset_name=path).load_rows()] == [("1+1", "2")] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has no column 'problem': 'prompt' is used instead; set input_key=prompt",
        f"{path} has no column 'answer': {answer!r} is used instead; set output_key={answer}",
    ]


def test_columns_are_not_guessed_where_two_could_be_meant_or_a_key_is_set(tmp_path):
    path = jsonl(tmp_path, [{"problem": "1+1", "solution": "2", "completion": "It is 2."}])
    with pytest.raises(DataError, match="has no key 'answer'"):
        DataSource(dataset_name=path).load_rows()
    with pytest.raises(DataError, match="has no key 'question'"):
        DataSource(dataset_name=path, input_key="question", output_key="solution").load_rows()


def test_data_without_answers_is_an_error_unless_nobody_needs_them(tmp_path, caplog):
    source = DataSource(dataset_name=jsonl(tmp_path, [{"prompt": "Write a haiku."}]))
    with pytest.raises(DataError, match="has no key 'answer'"):
        source.load_rows()
    assert source.load_rows(needs_answers=False)[0].answer == ""
    assert "task.answer is empty; set output_key" in caplog.text
    with pytest.raises(DataError, match="has no key 'reference'"):
        DataSource(dataset_name=source.dataset_name, output_key="reference").load_rows(needs_answers=False)


def test_a_prompt_may_be_a_conversation(tmp_path):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "1+1?"}]
    path = jsonl(tmp_path, [{"prompt": talk, "answer": "2"}, {"prompt": [*talk, *talk], "answer": "3"}])
    row = DataSource(dataset_name=path, split_validation_size=1, part="train").load_rows()[0]
    assert row.question == "1+1?" and [message.role for message in row.prompt][:3] == ["user", "assistant", "user"]
    with pytest.raises(DataError, match="message 1 is 'Hi', not an object"):
        DataSource(dataset_name=jsonl(tmp_path, [{"prompt": ["Hi"], "answer": "2"}])).load_rows()


@pytest.mark.extensions
def test_no_name_a_folder_and_an_unknown_name_are_errors(tmp_path):
    with pytest.raises(DataError, match="dataset_name is not set"):
        DataSource().load_rows()
    with pytest.raises(DataError, match="is a folder"):
        DataSource(dataset_name=str(tmp_path)).load_rows()
    with pytest.raises(DataError, match="did you mean 'OpenMathInstruct-2'"):
        DataSource(dataset_name="OpenMathInstruct2").load_rows()


@pytest.mark.parametrize("size", [0.2, 4])
def test_held_out_rows_share_no_question_with_training_and_none_is_lost(size, tmp_path):
    path = jsonl(tmp_path, [*ROWS, *ROWS])
    source = DataSource(dataset_name=path, split_validation_size=size)
    train, validation = (replace(source, part=part).load_rows() for part in ("train", "validation"))
    assert len(train) + len(validation) == 40
    assert not {row.question for row in train} & {row.question for row in validation}
    assert len(validation) == (8 if size < 1 else 4)
    assert replace(source, part="validation").load_rows()[0] == validation[0]


def test_the_seed_decides_what_is_held_out(tmp_path):
    path = jsonl(tmp_path)
    sides = [
        {row.id for row in DataSource(dataset_name=path, split_validation_size=5, part="validation", seed=seed).load_rows()}
        for seed in range(5)
    ]
    assert len(set(map(frozenset, sides))) > 1


@pytest.mark.parametrize("size", [0.001, 20, 100])
def test_a_split_that_leaves_nothing_on_one_side_is_an_error(size, tmp_path):
    with pytest.raises(DataError, match="both parts need at least one row"):
        DataSource(dataset_name=jsonl(tmp_path), split_validation_size=size, part="train").load_rows()


def test_a_split_of_one_question_is_an_error(tmp_path):
    with pytest.raises(DataError, match="too few"):
        DataSource(dataset_name=jsonl(tmp_path, [ROWS[0]] * 9), split_validation_size=0.5, part="train").load_rows()


def test_the_source_of_an_entry_has_its_keys_and_the_seed_of_the_run():
    entry = DataEntryConfig(dataset_name="a.jsonl", input_key="q", system_prompt="Add.", size=7, repeat=2, env_name="sums")
    assert DataSource.from_entry(entry, seed=5, part="train") == DataSource(
        dataset_name="a.jsonl", input_key="q", system_prompt="Add.", size=7, repeat=2, seed=5
    )
    assert DataSource.from_entry(DataEntryConfig(dataset_name="a.jsonl", seed=0), seed=5, part="train").seed == 0


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"dataset_name": "a.jsonl"}, "all"),
        ({"rows": [{"prompt": "1+1"}]}, "all"),
        ({"dataset_name": "a.jsonl", "split_validation_size": 0.1}, "validation"),
        ({"size": 9}, "validation"),
    ],
)
def test_an_entry_gives_one_part_only_where_it_is_divided_or_generated(keys, part):
    assert DataSource.from_entry(DataEntryConfig(**keys), seed=1, part="validation").part == part


def test_validation_entries_are_those_of_validation_else_those_that_hold_out():
    kept, divided = DataEntryConfig(dataset_name="a"), DataEntryConfig(dataset_name="b", split_validation_size=3)
    assert DataConfig(train=(kept, divided)).validation_entries == (divided,)
    assert DataConfig(train=(kept, divided), validation=(kept,)).validation_entries == (kept,)
    assert DataConfig(train=(kept,)).validation_entries == ()
