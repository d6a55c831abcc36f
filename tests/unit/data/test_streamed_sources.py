"""``streaming`` of a data entry: files of every kind, the hub, conversations and pairs, as they are without it."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from strop.data.data_config import DataConfig
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.data.sources.streamed import Streamed
from strop.environments.remote import EnvironmentDescription, connect
from support.environment_servers import EnvironmentServerThread

datasets = pytest.importorskip("datasets")

ROWS = [{"problem": f"What is {n} + 1?", "answer": str(n + 1), "note": "two\nlines" if n % 7 == 0 else "one"} for n in range(50)]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8-sig")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path, row_group_size=8)


def write_arrow(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow

    table = pyarrow.Table.from_pylist(list(rows))
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)


WRITERS: Mapping[str, Callable[[Path, Sequence[Mapping[str, Any]]], None]] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
    "arrow": write_arrow,
}


def stream(**options: Any) -> Streamed[Any]:
    rows = DataSource(streaming=True, **{"shuffle_buffer": 6, "shuffle": True, **options}).load_rows()
    assert isinstance(rows, Streamed)
    return rows


def questions(rows: Sequence[Any], count: int) -> list[str]:
    return [rows[position].question for position in range(count)]


@pytest.mark.parametrize("suffix", WRITERS)
def test_a_folder_of_shards_has_the_rows_of_its_files_and_resumes_in_the_middle_of_one(suffix: str, tmp_path: Path) -> None:
    for number, rows in enumerate((ROWS[:21], ROWS[21:22], ROWS[22:])):
        WRITERS[suffix](tmp_path / f"part-{number}.{suffix}", rows)
    rows = stream(dataset_name=str(tmp_path))
    found = questions(rows, 120)
    assert sorted(found[:50]) == sorted(found[50:100]) == sorted(row["problem"] for row in ROWS) and found[:50] != found[50:100]
    assert dict(rows[0].metadata)["note"] in ("one", "two\nlines")
    assert len({rows[position].id for position in range(100)}) == 50
    for stopped in (3, 20, 27, 49, 50, 75):
        first, rest = stream(dataset_name=str(tmp_path)), stream(dataset_name=f"{tmp_path}/*.{suffix}")
        questions(first, stopped)
        rest.load_state(json.loads(json.dumps(first.state())))
        assert [rest[position].question for position in range(stopped, 120)] == found[stopped:]


@pytest.mark.parametrize("suffix", WRITERS)
def test_without_shuffling_the_rows_are_in_the_order_of_the_file(suffix: str, tmp_path: Path) -> None:
    WRITERS[suffix](tmp_path / f"rows.{suffix}", ROWS)
    file = str(tmp_path / f"rows.{suffix}")
    assert questions(stream(dataset_name=file, shuffle=False), 50) == questions(DataSource(dataset_name=file).load_rows(), 50)


def test_a_dataset_of_the_hub_is_streamed_from_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "owner" / "sums" / "data"
    folder.mkdir(parents=True)
    for number in range(3):
        write_parquet(folder / f"train-{number:05}-of-00003.parquet", ROWS[number::3])
    monkeypatch.setenv("STROP_DATASETS", str(tmp_path))
    rows = stream(dataset_name="owner/sums")
    found = questions(rows, 110)
    assert sorted(found[:50]) == sorted(row["problem"] for row in ROWS)
    first, rest = stream(dataset_name="owner/sums"), stream(dataset_name="owner/sums")
    questions(first, 33)
    rest.load_state(json.loads(json.dumps(first.state())))
    assert [rest[position].question for position in range(33, 110)] == found[33:]


def test_an_iterable_dataset_is_streamed_from_python() -> None:
    rows = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=4)
    assert sorted(questions(stream(rows=rows), 50)) == sorted(row["problem"] for row in ROWS)


def test_a_part_that_is_held_out_has_no_question_of_the_other(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS * 4)
    options: dict[str, Any] = {"dataset_name": str(tmp_path / "rows.jsonl"), "split_validation_size": 0.3, "streaming": True}
    held_out = DataSource(part="validation", size=20, in_memory=True, **options).load_rows()
    assert len(held_out) == 20 and isinstance(held_out, list)
    train = stream(part="train", **{key: value for key, value in options.items() if key != "streaming"})
    seen = {train[position].question for position in range(200)}
    assert seen and not seen & {row.question for row in held_out}


def test_a_malformed_row_costs_its_own_position_and_says_its_line(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in ROWS[:9]]
    lines[4] = '{"problem": '
    lines[6] = '{"problem": "no answer"}'
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    rows = stream(dataset_name=str(tmp_path / "rows.jsonl"), shuffle=False, part="train", split_validation_size=0.00001)
    with pytest.raises(DataError, match=r"rows.jsonl:5 is not JSON"):
        rows[4]
    with pytest.raises(DataError, match=r"rows.jsonl:7 has no key 'answer'"):
        rows[6]
    assert rows[8].question == ROWS[8]["problem"]


def test_a_csv_row_with_too_few_fields_costs_its_own_position(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("problem,answer\na,1\nb\nc,3\n")
    rows = stream(dataset_name=str(tmp_path / "rows.csv"), shuffle=False)
    with pytest.raises(DataError, match=r"rows.csv:3 does not have the 2 fields of the header"):
        rows[1]
    assert rows[2].question == "c"


def test_a_first_row_without_the_columns_is_an_error_at_the_start(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"question": "?"}])
    with pytest.raises(DataError, match=r"rows.jsonl:1 has no key 'answer'"):
        stream(dataset_name=str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none-*.jsonl", "no file matches"),
        ("rows.json", "is a single JSON value, which cannot be streamed"),
        ("empty", "has no .jsonl, .csv, .parquet, .arrow file to stream"),
        ("blank.jsonl", "has no rows"),
    ],
)
def test_what_cannot_be_streamed_says_why(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=said):
        stream(dataset_name=str(tmp_path / name))


def test_what_needs_the_number_of_rows_says_so(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    rows = stream(dataset_name=str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match="its number of rows, which is needed here, is unknown; set streaming=false"):
        len(rows)
    assert rows


def test_an_environment_over_rows_streams_its_tasks(tmp_path: Path) -> None:
    MathEnvironment = pytest.importorskip("strop.extensions.math.math_environment").MathEnvironment
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    source = DataSource(dataset_name=str(tmp_path / "rows.jsonl"), streaming=True, system_prompt="Be brief.")
    tasks = MathEnvironment().tasks(source)
    assert isinstance(tasks, Streamed)
    assert [message.content for message in tasks[7].messages] == ["Be brief.", ROWS[7]["problem"]] and tasks[57].id == tasks[7].id


def test_iterating_over_a_stream_ends_with_its_epoch(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    rows = stream(dataset_name=str(tmp_path / "rows.jsonl"), shuffle=False)
    assert [row.question for row in rows] == [row["problem"] for row in ROWS]
    assert rows.state()["reached"] == 0, "a run that goes on has not come further"


@pytest.mark.extensions
def test_an_environment_that_needs_the_number_of_rows_refuses_a_stream(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"problem": "Write f.", "answer": ""}] * 3)
    source = DataSource(dataset_name=str(tmp_path / "rows.jsonl"), streaming=True)
    served = EnvironmentServerThread(EnvironmentDescription(alias="mine", name="math", sources=(source,)))
    with pytest.raises(DataError, match=r"is streamed, .* its number of rows, which is needed here, is unknown"):
        connect(served.description, [served.transport]).tasks(source)


RECORDED: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "conversations": lambda n: {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]},
    "preferences": lambda n: {"context": f"{n}?", "response1": f"{n}!", "response2": f"{n}.", "overall_preference": n % 5 - 2},
    "judgements": lambda n: {"prompt": f"{n}?", "chosen": f"{n}!", "rejected": f"{n}."},
}


@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_examples_are_those_of_the_whole_file(kind: str, tmp_path: Path) -> None:
    EXAMPLE_READERS = pytest.importorskip("strop.extensions.recorded.examples").EXAMPLE_READERS
    write_jsonl(tmp_path / "rows.jsonl", [RECORDED[kind](n) for n in range(23)])
    source = {"dataset_name": str(tmp_path / "rows.jsonl"), "repeat": 2}
    whole = EXAMPLE_READERS[kind](DataSource(**source))
    found = EXAMPLE_READERS[kind](DataSource(**source, streaming=True, shuffle_buffer=5, shuffle=True))
    assert isinstance(found, Streamed)
    wanted = sorted((example.question, example.answer) for example in whole)
    assert sorted((found[n].question, found[n].answer) for n in range(len(whole))) == wanted
    assert found.epoch(len(whole)) == 1
    assert found.beside(0).question != found[0].question


# --- settings ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"train": {"streaming": True, "env_name": "math"}}, "data.train.streaming"),
        ({"train": {"streaming": True, "dataset_name": "a/b", "split_validation_size": 7}}, "data.train.split_validation_size"),
        ({"train": {"dataset_name": "a/b"}, "validation": {"dataset_name": "a/b", "streaming": True}}, "data.validation"),
        (
            {"train": [{"dataset_name": "a/b", "streaming": True, "weight": None}, {"dataset_name": "a/c", "weight": None}]},
            "data.train",
        ),
    ],
)
def test_settings_that_need_a_number_of_rows_are_refused(section: Mapping[str, Any], key: str) -> None:
    config = TypeAdapter(DataConfig).validate_python(section)
    entries = [(f"data.{name}", entry) for name in ("train", "validation") for entry in getattr(config, name) or ()]
    problems = [*config.errors("data"), *(problem for name, entry in entries for problem in entry.errors(name))]
    assert key in [problem.key for problem in problems]


def test_opening_a_large_file_reads_its_beginning_only(tmp_path: Path) -> None:
    """The lines behind the first block are no JSON: whoever parsed the whole file at the start would fail."""
    with (tmp_path / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
        file.writelines("no JSON\n" for _ in range(200_000))
    started = time.perf_counter()
    rows = stream(dataset_name=str(tmp_path / "rows.jsonl"), shuffle_buffer=50)
    assert sorted(questions(rows, 50)) == sorted(row["problem"] for row in ROWS)
    assert time.perf_counter() - started < 5


def test_a_class_of_ones_own_is_streamed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "class Sums:\n"
        "    def __init__(self, count):\n        self.count = count\n"
        "    def __iter__(self):\n"
        "        return ({'problem': f'{n} + 1?', 'answer': str(n + 1)} for n in range(self.count))\n"
    )
    name = f"{tmp_path / 'endless.py'}:Sums"
    rows = stream(dataset_name=name, dataset_kwargs={"count": 10_000_000}, shuffle_buffer=100)
    assert sorted(row.answer for row in map(rows.__getitem__, range(100))) == sorted(str(n + 1) for n in range(100))
